"""Text to tokens: the turns of a conversation, and what the model's chat template puts around them.

A conversation grows by appending: every text is tokenized once and on its own, and what the cache holds is never
tokenized again. Control tokens come from the template's pieces alone: in a user's text `<|im_end|>` stays text.
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
        self._ids: list[int] = []  # those before `_read` are shown, and kept as the context of what follows
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
        """What is left: a character that was never completed, as U+FFFD."""
        text = self._unread()
        self._ids, self._read = [], 0
        return text

    def _unread(self) -> str:
        shown = _decode(self._tokenizer, self._ids[: self._read])
        return _decode(self._tokenizer, self._ids)[len(shown) :]


class PromptFormat:
    """How one model wants its prompts. Everything is handed out as token ids; the methods are thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, pieces: Pieces | None, bos: Sequence[int], stop_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._bos = list(bos)
        self._lock = threading.Lock()  # over the tokenizer's one switch
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
        """The roles that a turn may have; `system` is in it where a system text may open a conversation."""
        refused = self._pieces is not None and self._pieces.system is None
        return frozenset({"user", "assistant"} if refused else {"system", "user", "assistant"})

    def encode(self, text: str, raw: bool = False) -> list[int]:
        """Token ids of `text` on its own, no BOS or EOS added; with `raw`, control tokens written in it count."""
        with self._lock:
            self._tokenizer.encode_special_tokens = not raw
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def opening(self, system: str | None = None) -> list[int]:
        """What stands before the first turn: a BOS where the model wants one, and the system turn.

        Without a system text this is the template's default one, if it has any. Raises UsageError where the template
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
        """What stands before a turn of `role`; `after_system` where it is the first one behind a given system text.

        (Some templates put the system text into the first user turn, which is open then.) Raises UsageError for a role
        that the template does not know.
        """
        self._check(role)
        if self._pieces is None:
            return []
        start = self._pieces.start[role]
        if after_system and self._pieces.folded:
            start = "" if role == "user" else self._pieces.end["user"] + start
        return self.encode(start, raw=True)

    def turn_end(self, role: str) -> list[int]:
        """What closes a turn of `role`. Raises UsageError for a role that the template does not know."""
        self._check(role)
        return [] if self._pieces is None else self.encode(self._pieces.end[role], raw=True)

    def answer_start(self) -> list[int]:
        """The generation prompt: what opens the model's answer behind a closed turn."""
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
    """Make the template's markers control tokens where the tokenizer lists them as plain added ones."""
    around = [pieces.opening, pieces.answer, *pieces.start.values(), *pieces.end.values(), *(pieces.system or ())]
    for token in tokenizer.get_added_tokens_decoder().values():
        # added tokens of white space are no markers: a user's text has them too
        if not token.special and token.content.strip() and any(token.content in piece for piece in around):
            tokenizer.add_special_tokens([AddedToken(token.content, normalized=False, special=True)])


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
