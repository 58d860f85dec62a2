"""A conversation as tokens: its turns, and the closing tokens that the last turn still owes.

Text is tokenized once, separately, and appended; cached text is never tokenized again. A turn is closed when the role
changes: consecutive parts of one role are one turn, and a turn that was interrupted gets its closing tokens when
something follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from amem_cli.engine.prompt.tokens import PromptFormat
from kvstore.errors import UsageError
from kvstore.format.manifest import Manifest, Role, Turn


@dataclass(frozen=True)
class Text:
    """Text of one role. `raw`: without a template, and control tokens in it are such tokens. `label` names a phase."""

    text: str
    role: str = "user"
    label: str | None = None
    raw: bool = False


@dataclass
class Transcript:
    """Token ids, their turns, and the closing tokens that the last turn still owes."""

    tokens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    owed: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: Manifest, tokens: Sequence[int]) -> "Transcript":
        """The transcript of a manifest and its token ids."""
        return cls(list(tokens), list(manifest.turns), list(manifest.owed))

    def open(self, prompt: PromptFormat, system: str | None) -> None:
        """Begin a conversation: BOS and system text. Raises UsageError if the template takes no system text."""
        ids = prompt.opening(system)
        if ids:
            self._append(ids, "system" if system else "raw", None)  # some templates change a given text

    def add(self, prompt: PromptFormat, text: Text) -> None:
        """Append a part of a turn, which stays open. Raises UsageError for a role that the template refuses."""
        if text.raw or not prompt.has_template:
            self._append(prompt.encode(text.text, raw=text.raw), "raw", text.label)
            self.owed = []
            return
        closing = prompt.turn_end(text.role)  # refuses an unknown role before anything is appended
        last = self.turns[-1].role if self.turns else None
        if last == text.role and self.owed:
            ids = prompt.encode("\n\n" + text.text)
        else:
            ids = [*self.owed, *prompt.turn_start(text.role, after_system=last == "system"), *prompt.encode(text.text)]
        self._append(ids, "user" if text.role == "user" else "assistant", text.label)
        self.owed = closing

    def begin_answer(self, prompt: PromptFormat) -> None:
        """Close the open turn and open the model's answer."""
        self._append([*self.owed, *prompt.answer_start()], "assistant", None)
        self.owed = []

    def end_answer(self, prompt: PromptFormat, answer: Sequence[int], stopped: bool) -> None:
        """Append the answer's tokens. `stopped`: the last one is a token that ends answers.

        The template's own closing token replaces it, since a model may end an answer with one of several. The closing
        tokens after that one are owed.
        """
        closing = prompt.turn_end("assistant") if prompt.has_template else []
        if stopped and closing:
            self._extend([*answer[:-1], closing[0]])
            self.owed = closing[1:]
        else:
            self._extend(answer)
            self.owed = closing

    def _append(self, ids: Sequence[int], role: Role, label: str | None) -> None:
        start = len(self.tokens)
        self.tokens.extend(ids)
        if ids:
            self.turns.append(Turn(role, start, len(self.tokens), label))

    def _extend(self, ids: Sequence[int]) -> None:
        """Append to the open answer; without a template, as a new one."""
        start = len(self.tokens)
        if self.turns and self.turns[-1].role == "assistant":
            start = self.turns.pop().start
        self.tokens.extend(ids)
        self.turns.append(Turn("assistant", start, len(self.tokens)))


def transcript_of(prompt: PromptFormat, system: str | None, texts: Sequence[Text]) -> Transcript:
    """A new conversation. Raises UsageError for an empty one, and for a role that the template refuses."""
    transcript = Transcript()
    transcript.open(prompt, system)
    for text in texts:
        transcript.add(prompt, text)
    if not transcript.tokens:
        raise UsageError("the prompt is empty", "give a text or a system text")
    return transcript


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two token sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
