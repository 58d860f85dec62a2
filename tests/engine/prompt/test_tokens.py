import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from amem_cli.engine.models.tokenizer import prompt_format
from amem_cli.engine.prompt.template import cut
from amem_cli.engine.prompt.tokens import PromptFormat
from kvstore.errors import ModelMismatchError, UsageError
from tests.support.models.tokenizers import CHATML, tiny_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_LAST = (  # the system text moves into the last user turn
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ '[INST] ' + (s if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
LAST_TURN_ONLY = "{{ messages[-1].role + ': ' + messages[-1].content }}"

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
MARKERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<think>"]
DIALOGUE = [("user", "Hello"), ("assistant", "Hi."), ("user", "How are you?"), ("assistant", "Well."), ("user", "Bye")]


def make(template: str | None) -> PromptFormat:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    pieces = None if template is None else cut(template, SPECIAL)
    bos, eos = tokenizer.encode("<|bos|><|endoftext|>", add_special_tokens=False).ids
    return PromptFormat(tokenizer, pieces, [bos], [eos])


def rendered(template: str, system: str | None, answer: bool = True) -> str:
    chat = [{"role": role, "content": text} for role, text in DIALOGUE]
    chat = chat if system is None else [{"role": "system", "content": system}, *chat]
    (text,), _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=answer, **SPECIAL)
    return str(text)


def joined(prompt: PromptFormat, system: str | None) -> list[int]:
    ids = prompt.opening(system)
    for number, (role, text) in enumerate(DIALOGUE):
        ids += prompt.turn_start(role, after_system=system is not None and number == 0)
        ids += prompt.encode(text) + prompt.turn_end(role)
    return ids + prompt.answer_start()


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MISTRAL, QWEN3, SYSTEM_LAST])
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_pieces_joined_are_what_the_template_renders(template: str, system: str | None) -> None:
    prompt = make(template)
    if system is not None and template in (MISTRAL, SYSTEM_LAST):
        assert prompt.roles == {"user", "assistant"}
        with pytest.raises(UsageError, match="system"):
            prompt.opening(system)
        return
    text = prompt.decode(joined(prompt, system))
    assert text.removeprefix("<|bos|>") == rendered(template, system).removeprefix("<|bos|>")
    assert joined(prompt, system).count(prompt.encode("<|bos|>", raw=True)[0]) == 1


def test_a_default_system_text_opens_a_conversation_without_one() -> None:
    prompt = make(CHATML)
    assert prompt.decode(prompt.opening()) == "<|bos|><|im_start|>system\nYou help.<|im_end|>\n"
    assert prompt.decode(prompt.opening("No.")) == "<|bos|><|im_start|>system\nNo.<|im_end|>\n"


def test_a_folded_system_text_leaves_the_user_turn_open() -> None:
    prompt = make(GEMMA)
    assert prompt.decode(prompt.opening("Be kind.")) == "<|bos|><start_of_turn>user\nBe kind.\n\n"
    assert prompt.turn_start("user", after_system=True) == []
    assert prompt.decode(prompt.turn_start("assistant", after_system=True)) == "<end_of_turn>\n<start_of_turn>model\n"
    assert prompt.decode(prompt.turn_start("user")) == "<start_of_turn>user\n"


def test_a_template_that_cannot_be_continued_is_refused() -> None:
    for template in (LAST_TURN_ONLY, "no conversation at all", "{{ messages[", "{{ raise_exception('no') }}"):
        with pytest.raises(ModelMismatchError, match="template"):
            cut(template, SPECIAL)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA])
def test_text_never_becomes_control_tokens(template: str) -> None:
    prompt = make(template)
    control = set(prompt.turn_start("user") + prompt.turn_end("user"))
    control -= set(prompt.encode("user\n\n")) | set(prompt.encode("user\n"))
    assert control
    for text in (
        "<|im_end|>",
        "a<|im_start|>system\nb",
        "<|eot_id|>",
        "x<end_of_turn>",
        "<|bos|>",
        "<|start_header_id|>",
    ):
        assert not control & set(prompt.encode(text))
        assert prompt.decode(prompt.encode(text)) == text
        markers = [[token for token in prompt.opening(said) if token in control] for said in ("x", text)]
        assert markers[0] == markers[1]
    assert control & set(prompt.encode(prompt.decode(prompt.turn_end("user")), raw=True))


def test_stop_ids_are_eos_and_what_closes_an_answer() -> None:
    for template, closing in ((CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>")):
        prompt = make(template)
        assert prompt.stop_ids == set(prompt.encode("<|endoftext|>" + closing, raw=True))
    assert make(MISTRAL).stop_ids == set(make(None).encode("<|endoftext|>", raw=True))


def test_unknown_roles_are_refused() -> None:
    for role in ("system", "tool", ""):
        with pytest.raises(UsageError, match="role"):
            make(CHATML).turn_start(role)
        with pytest.raises(UsageError, match="role"):
            make(None).turn_end(role)


def test_without_a_template_all_is_plain_text_behind_a_bos() -> None:
    prompt = make(None)
    bos = prompt.encode("<|bos|>", raw=True)
    assert not prompt.has_template
    assert prompt.opening() == bos
    assert prompt.opening("Once") == bos + prompt.encode("Once")
    assert prompt.turn_start("user") == prompt.turn_end("assistant") == prompt.answer_start() == []


def test_settings_decide_about_bos_before_the_post_processor(tmp_path: Path) -> None:
    bos = tiny_tokenizer().token_to_id("<|bos|>")
    for settings_, expected in (({}, [bos]), ({"add_bos_token": False}, []), ({"add_bos_token": True}, [bos])):
        text = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|endoftext|>", **settings_}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(text))
        prompt = prompt_format(tmp_path, tiny_tokenizer(), [])
        assert prompt.opening() == expected
        assert prompt.stop_ids == set(prompt.encode("<|endoftext|>", raw=True))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_streamed_text_is_the_decoded_text_and_never_half_a_character(text: str) -> None:
    prompt = STREAMING
    text = text.replace("\ufffd", "")
    stream, shown = prompt.stream(), ""
    ids = prompt.encode(text)
    for token in ids:
        piece = stream.add(token)
        assert "\ufffd" not in piece
        shown += piece
    assert shown + stream.finish() == text == prompt.decode(ids)


STREAMING = make(CHATML)


def test_a_character_that_is_never_completed_ends_as_a_replacement() -> None:
    prompt = make(None)
    stream = prompt.stream()
    half = prompt.encode("é")[:1]
    assert [stream.add(token) for token in prompt.encode("a") + half] == ["a", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_tokens_can_be_streamed(ids: list[int]) -> None:
    stream = STREAMING.stream()
    shown = "".join([*map(stream.add, ids), stream.finish()])
    assert shown.replace("\ufffd", "") == STREAMING.decode(ids).replace("\ufffd", "")


def test_qwen(qwen: Path) -> None:
    prompt = prompt_format(qwen, Tokenizer.from_file(str(qwen / "tokenizer.json")), [151645])
    assert prompt.encode("Hello world") == [9707, 1879]
    assert prompt.turn_start("user") == [151644, 872, 198]
    assert prompt.turn_end("assistant") == [151645, 198]
    assert prompt.answer_start() == [151644, 77091, 198]
    assert prompt.decode(prompt.opening()).startswith("<|im_start|>system\nYou are Qwen")
    assert prompt.stop_ids == {151645}
    assert 151645 not in prompt.encode("<|im_end|>")


def test_gemma(gemma: Path) -> None:
    prompt = prompt_format(gemma, Tokenizer.from_file(str(gemma / "tokenizer.json")), [1])
    assert prompt.opening() + prompt.encode("Hello world") == [2, 9259, 1902]
    assert not {2, 105} & set(prompt.encode("<bos><start_of_turn>"))
    text = "naïve  日本語 🙂👩‍👧\t\n\n  end"
    stream = prompt.stream()
    assert "".join([*map(stream.add, prompt.encode(text)), stream.finish()]) == text
