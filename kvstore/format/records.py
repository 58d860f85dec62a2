"""TODO."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """An isolation boundary. `salt` is random and dies with the domain; `name` is None in one made for one agent."""

    id: str
    name: str | None
    salt: str
    created: str


@dataclass(frozen=True)
class AgentRef:
    """An agent's head: the digest of its last committed manifest."""

    name: str
    id: str
    domain: str
    manifest: str
    created: str
    updated: str


@dataclass(frozen=True)
class SnapshotRef:
    """A named state of an agent. `created` is the time of its journal line."""

    agent: str
    name: str
    agent_id: str
    domain: str
    manifest: str
    note: str | None
    created: str
