"""What a turn is asked for (options), who watches it, and what it reports. Plain values, without MLX."""

from collections.abc import Callable
from dataclasses import dataclass

LOCK_SECONDS = 10.0  # how long a turn waits for an agent that another process holds


@dataclass(frozen=True)
class PrefillOptions:
    """How to prefill an agent. None: no system text, a domain of its own, the agent's own codec or the default one."""

    system: str | None = None
    domain: str | None = None  # its name
    replace: bool = False  # replace another text, and keep the common beginning
    codec: str | None = None  # its name
    wait: float = LOCK_SECONDS


@dataclass(frozen=True)
class ExtendOptions:
    """How to extend an agent. `expect`: the first digits of the digest that its head must have."""

    expect: str | None = None
    wait: float = LOCK_SECONDS


@dataclass(frozen=True)
class ChatOptions:
    """How to chat. Without `save` nothing is locked or written. `expect`: as for an extension."""

    save: bool = True
    expect: str | None = None
    wait: float = LOCK_SECONDS


PREFILL_DEFAULTS, EXTEND_DEFAULTS, CHAT_DEFAULTS = PrefillOptions(), ExtendOptions(), ChatOptions()


@dataclass(frozen=True)
class Generation:
    """How to answer. `seed` None: a random one, which the result reports."""

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
    """No listener."""


def _never() -> bool:
    """No interruption."""
    return False


@dataclass(frozen=True)
class Watcher:
    """Callbacks of a turn: its text, its progress, and whether to stop. All are called on the engine's thread."""

    on_text: Callable[[str], None] = _ignore
    on_progress: Callable[[PrefillProgress], None] = _ignore
    should_stop: Callable[[], bool] = _never


NOBODY = Watcher()


@dataclass(frozen=True)
class TurnResult:
    """What a turn did. Agent, model and domain are names, states are digests."""

    agent: str
    model: str
    domain: str  # the id of an agent's own domain, which has no name
    manifest: str | None  # None: nothing was saved
    before: str | None
    tokens: int
    reused: int  # tokens whose keys and values came from the store
    prefilled: int  # tokens fed before the first generated one
    load_ms: float
    seconds: float
    template: bool  # False: the model has no chat template, and text is continued
    generated: int = 0
    parted_at: int | None = None  # the first token that differs between a replaced text and the new one
    ttft_ms: float | None = None  # from the request to the first token, without loading the model
    new_blocks: int = 0
    bytes_written: int = 0
    complete: bool = True
    recomputed: bool = False
    changed: bool = True
    text: str | None = None
    finish: str | None = None  # stop, length or interrupted
    seed: int | None = None
    temp: float | None = None
