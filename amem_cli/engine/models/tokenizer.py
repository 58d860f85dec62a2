"""A model's tokenizer and prompt format, read from its small files: no MLX, no weights."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from amem_cli.engine.models.folder import chat_template, read_config, tokenizer_settings
from amem_cli.engine.prompt.template import cut
from amem_cli.engine.prompt.tokens import PromptFormat
from kvstore.errors import ModelMismatchError


def load_prompt(folder: Path) -> PromptFormat:
    """The prompt format of the model in `folder`, from its small files alone.

    Raises NotFoundError, and ModelMismatchError for files that cannot be read.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except (ValueError, OSError) as error:
        raise ModelMismatchError(f"cannot read the tokenizer in {folder}", "the files are damaged") from error
    return prompt_format(folder, tokenizer, stop_ids(read_config(folder)))


def stop_ids(config: dict[str, Any]) -> list[int]:
    """The EOS tokens that a model's config names."""
    ids = config.get("eos_token_id")
    return [ids] if isinstance(ids, int) else ids or []


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises ValueError and OSError for files that cannot be read."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
    else:  # SentencePiece and the like, which only transformers converts; it takes seconds
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ValueError(error) from error


def prompt_format(folder: Path, tokenizer: Tokenizer, stop_ids: Iterable[int]) -> PromptFormat:
    """The PromptFormat of the model in `folder`; `stop_ids` are the EOS tokens of its config.

    Raises ModelMismatchError for a template that cannot be cut.
    """
    settings, template = tokenizer_settings(folder), chat_template(folder)
    special = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
    eos = tokenizer.token_to_id(special.get("eos_token", ""))
    pieces = None if template is None else cut(template, special)
    bos = _leading_tokens(tokenizer, settings.get("add_bos_token"), special.get("bos_token"))
    return PromptFormat(tokenizer, pieces, bos, [*stop_ids, *([] if eos is None else [eos])])


def _leading_tokens(tokenizer: Tokenizer, add_bos: bool | None, bos: str | None) -> list[int]:
    """What the tokenizer puts before every text. `add_bos` in the settings overrides its post-processor."""
    bos_id = tokenizer.token_to_id(bos) if bos else None
    if add_bos is not None:
        return [bos_id] if add_bos and bos_id is not None else []
    encoded = tokenizer.encode("a")
    return [
        id_ for id_, _ in takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
    ]


def _token_text(value: Any) -> str | None:
    """A special token of the settings: a string, or an object that holds one."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
