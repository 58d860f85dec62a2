"""What is asked of a turn, and what it reports."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """How to answer. `seed` None: one is drawn, and reported."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrefillProgress:
    """Tokens prefilled so far, out of how many, and how fast."""

    done: int
    total: int
    tokens_per_second: float


def _ignore(_: object) -> None:
    """Nobody listens."""


def _never() -> bool:
    """Nobody interrupts."""
    return False


@dataclass(frozen=True)
class Watcher:
    """Who watches a turn: hears its text and its progress, and may stop it. All are called on the engine's thread."""

    on_text: Callable[[str], None] = _ignore
    on_progress: Callable[[PrefillProgress], None] = _ignore
    should_stop: Callable[[], bool] = _never


NOBODY = Watcher()


@dataclass(frozen=True)
class TurnResult:
    """What a turn did. Names for agent, model and domain, digests for states."""

    agent: str
    model: str
    domain: str  # its id where it has no name, being the agent's own
    manifest: str | None  # None: nothing was saved
    before: str | None
    tokens: int
    reused: int  # tokens whose keys and values came out of the store
    prefilled: int  # tokens fed before the first generated one
    load_ms: float
    seconds: float
    template: bool  # False: the model has no chat template, and text is continued
    generated: int = 0
    parted_at: int | None = None  # the token at which a replaced conversation and its successor part
    ttft_ms: float | None = None  # from the request to the first token, the model being loaded
    new_blocks: int = 0
    bytes_written: int = 0
    complete: bool = True
    recomputed: bool = False
    changed: bool = True
    text: str | None = None
    finish: str | None = None  # stop, length or interrupted
    seed: int | None = None
    temp: float | None = None
