"""Refs and domains as documents: the few files that change, and the only ones that hold names."""

from typing import Annotated, Literal

from msgspec import Meta

from kvstore.format.document import Document, Id, Sha256

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class Domain(Document, frozen=True):
    """An isolation boundary. `salt` is random and dies with the domain; `name` is None in one made for one agent."""

    id: Id
    name: Name | None
    salt: Sha256
    created: str
    format: Literal[1] = 1


class AgentRef(Document, frozen=True):
    """An agent's head: the digest of its last committed manifest."""

    name: Name
    id: Id
    domain: Id
    manifest: Sha256
    created: str
    updated: str
    format: Literal[1] = 1


class SnapshotRef(Document, frozen=True):
    """A named state of an agent. `created` is the time of its journal line."""

    agent: Name
    name: Name
    agent_id: Id
    domain: Id
    manifest: Sha256
    note: str | None
    created: str
    format: Literal[1] = 1
