"""Every error that a user can meet, with its stable exit code and its JSON code.

A class is a kind of failure. The message says what happened and to what; the hint says what to do next.
Neither may hold prompt text or token ids: they end up in logs.
"""

from typing import ClassVar


class AmemError(Exception):
    """An expected failure: it ends as one clear line and an exit code, never as a traceback."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "failure"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AmemError):
    """The request itself is wrong: a bad name, a bad option, an empty prompt."""

    exit_code = 2
    code = "usage"


class PartialError(AmemError):
    """Some of what was asked for is done, and the rest is not."""

    exit_code = 3
    code = "partial"


class NotFoundError(AmemError):
    """No agent, snapshot, digest, file or model of that name."""

    exit_code = 4
    code = "not-found"


class ConflictError(AmemError):
    """The name exists with another content, or the head has moved."""

    exit_code = 5
    code = "conflict"


class ModelMismatchError(AmemError):
    """KV of other weights, config, tokenizer, template or adapter, or a model that cannot be served."""

    exit_code = 6
    code = "model-mismatch"


class DamageError(AmemError):
    """A file of the store is missing, truncated or altered."""

    exit_code = 8
    code = "damage"


class IsolationError(AmemError):
    """An object of one domain is where another domain would read it."""

    exit_code = 9
    code = "isolation"


class NoStoreError(AmemError):
    """There is no store at that path, or one that this version cannot read."""

    exit_code = 10
    code = "no-store"


class BusyError(AmemError):
    """Another process holds the agent or the store."""

    exit_code = 11
    code = "busy"


class KeyMissingError(AmemError):
    """An encrypted file needs a key that was not given, or another one."""

    exit_code = 12
    code = "key"


class NoSpaceError(AmemError):
    """The disk is full; nothing that was committed is lost."""

    exit_code = 13
    code = "no-space"
