"""Text to tokens: the turns of a conversation, and the chat template's pieces around them.

A conversation grows by appending: every text is tokenized once and separately, and cached text is never tokenized
again. Control tokens come only from the template's pieces: in a user's text `<|im_end|>` stays text.
"""

import threading
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer

from amem_cli.engine.prompt.template import Pieces
from kvstore.errors import UsageError


class TextStream:
    """Text of tokens that come one at a time, held back while a character of several tokens is incomplete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those before `_read` are emitted, and kept as context
        self._read = 0

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._unread()
        if text.endswith("\ufffd"):
            return ""
        if text:
            del self._ids[: self._read]
            self._read = len(self._ids)
        return text

    def finish(self) -> str:
        """The rest of the text: an incomplete character, as U+FFFD."""
        text = self._unread()
        self._ids, self._read = [], 0
        return text

    def _unread(self) -> str:
        shown = _decode(self._tokenizer, self._ids[: self._read])
        return _decode(self._tokenizer, self._ids)[len(shown) :]


class PromptFormat:
    """The prompt format of one model. It returns token ids; its methods are thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, pieces: Pieces | None, bos: Sequence[int], stop_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._bos = list(bos)
        self._lock = threading.Lock()  # guards the tokenizer's one setting
        stop = set(stop_ids)
        if pieces is not None:
            _protect(tokenizer, pieces)
            special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
            stop |= special.intersection(self.turn_end("assistant")[:1])
        self.stop_ids = frozenset(stop)

    @property
    def has_template(self) -> bool:
        return self._pieces is not None

    @property
    def roles(self) -> frozenset[str]:
        """The roles of turns, and `system` if a conversation may begin with a system text."""
        refused = self._pieces is not None and self._pieces.system is None
        return frozenset({"user", "assistant"} if refused else {"system", "user", "assistant"})

    def encode(self, text: str, raw: bool = False) -> list[int]:
        """Token ids of `text` alone, without BOS or EOS. `raw`: control tokens written in it become such tokens."""
        with self._lock:
            self._tokenizer.encode_special_tokens = not raw
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def opening(self, system: str | None = None) -> list[int]:
        """The tokens before the first turn: BOS, if the model uses one, and the system turn.

        Without a system text this is the template's default one, if it has any. Raises UsageError if the template
        takes no system text.
        """
        if self._pieces is None:
            return self._bos + (self.encode(system) if system else [])
        if system is None:
            ids = self.encode(self._pieces.opening, raw=True)
        elif self._pieces.system is None:
            raise UsageError("this model's chat template takes no system text", "put it into the first user turn")
        else:
            before, after = self._pieces.system
            ids = [*self.encode(before, raw=True), *self.encode(system), *self.encode(after, raw=True)]
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids

    def turn_start(self, role: str, after_system: bool = False) -> list[int]:
        """The tokens before a turn of `role`. `after_system`: it is the first turn after a given system text.

        (Some templates put the system text into the first user turn, which is then open.) Raises UsageError for an
        unknown role.
        """
        self._check(role)
        if self._pieces is None:
            return []
        start = self._pieces.start[role]
        if after_system and self._pieces.folded:
            start = "" if role == "user" else self._pieces.end["user"] + start
        return self.encode(start, raw=True)

    def turn_end(self, role: str) -> list[int]:
        """The tokens that close a turn of `role`. Raises UsageError for an unknown role."""
        self._check(role)
        return [] if self._pieces is None else self.encode(self._pieces.end[role], raw=True)

    def answer_start(self) -> list[int]:
        """The generation prompt: the tokens that open the model's answer after a closed turn."""
        return [] if self._pieces is None else self.encode(self._pieces.answer, raw=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        return _decode(self._tokenizer, ids)

    def stream(self) -> TextStream:
        """A fresh incremental detokenizer."""
        return TextStream(self._tokenizer)

    def _check(self, role: str) -> None:
        if role not in ("user", "assistant"):
            hint = (
                "a system text is given once, when the agent is made" if role == "system" else "use user or assistant"
            )
            raise UsageError(f"a turn cannot have the role {role!r}", hint)


def _protect(tokenizer: Tokenizer, pieces: Pieces) -> None:
    """Make the template's markers control tokens if the tokenizer lists them as plain added ones."""
    around = [pieces.opening, pieces.answer, *pieces.start.values(), *pieces.end.values(), *(pieces.system or ())]
    for token in tokenizer.get_added_tokens_decoder().values():
        # added tokens of white space are no markers: a user's text has them, too
        if not token.special and token.content.strip() and any(token.content in piece for piece in around):
            tokenizer.add_special_tokens([AddedToken(token.content, normalized=False, special=True)])


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
