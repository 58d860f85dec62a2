"""The tokenizer inside a GGUF file, for `tokenizers`: SentencePiece scores (`llama`) or byte-level BPE (`gpt2`)."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvstore.errors import ModelMismatchError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}


def tokenizer_of(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a GGUF file's fields, and the content of tokenizer_config.json.

    Raises ModelMismatchError for an unknown kind of tokenizer.
    """

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{key}", default)

    kind, split = get("model"), get("pre", "default")
    tokens, types = get("tokens"), get("token_type")
    if kind == "llama":
        tokenizer = _sentencepiece(tokens, types, get("scores"), get("add_space_prefix", True))
    elif kind == "gpt2" and split in _SPLITS:
        tokenizer = _byte_level(tokens, get("merges"), split)
    else:
        raise ModelMismatchError(f"a GGUF file with a {kind!r} tokenizer of kind {split!r} cannot be read")
    _add_special(tokenizer, tokens, types)

    def text(role: str) -> str | None:
        id_ = get(f"{role}_token_id")
        return None if id_ is None else tokens[id_]

    bos = text("bos")
    add_bos = bos is not None and get("add_bos_token", kind == "llama" or split == "llama-bpe")
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": text("eos"),
        "pad_token": text("padding"),
        "add_bos_token": bool(add_bos),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    return tokenizer, {key: value for key, value in settings.items() if value is not None}


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add control tokens and the user's own, which are matched before any merge."""
    for type_, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, types, strict=True) if its == type_]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])


def _byte_level(tokens: list[str], merges: list[str], split: str) -> Tokenizer:
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a whole word that is in its vocabulary, whatever its merges would give
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], types: list[int], scores: list[float], space_prefix: bool) -> Tokenizer:
    """SentencePiece merges the two neighbours whose joint piece scores best, so every split of a piece is a merge."""
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    merges: list[tuple[str, str, float]] = []
    for piece, type_, score in zip(tokens, types, scores, strict=True):
        if type_ != _NORMAL:  # no text may grow into a control token
            continue
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(a, b, score) for a, b in sorted(splits, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), "<unk>")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[(a, b) for a, b, _ in merges], unk_token=unknown, byte_fallback=True, fuse_unk=True
        )
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer
