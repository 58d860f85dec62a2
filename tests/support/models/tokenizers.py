"""Tokenizers of tiny models, and chat templates."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN_CHATML = (  # without a system text of its own
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TRAINING_TEXT = (
    "The system helps the user, and the assistant answers. The cat sat on the mat and thought of the sea. "
    "What is the name of the river that runs through the city? It is the one that they told you about."
)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with a BOS and the ChatML markers, trained on two sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=_bytes(), show_progress=False)
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    bos = (_SPECIAL[0], tokenizer.token_to_id(_SPECIAL[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are the 256 bytes and the two ChatML markers."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(_bytes())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())
