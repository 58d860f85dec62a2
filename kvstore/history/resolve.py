"""From a REF to a state: heads, snapshots, earlier states of an agent, and states by digest.

An agent's history is the chain of `previous` from its head, as far as gc has kept it. An incomplete state is not part
of it: the state after it takes over its `previous`.
"""

from collections.abc import Iterator

from msgspec import Struct

from kvstore.errors import DamageError, NotFoundError, UsageError
from kvstore.format.manifest import Manifest
from kvstore.format.records import AgentRef
from kvstore.graph.roots import agent_roots
from kvstore.graph.walk import StateWalk, own_history, pass_over_damage
from kvstore.naming import Ref
from kvstore.reader import Reader


class State(Struct, frozen=True):
    """The state that a REF names: a manifest and its digest, with the agent's ref at that time."""

    ref: Ref
    agent: AgentRef
    digest: str
    manifest: Manifest


def lineage(reader: Reader, agent: AgentRef) -> Iterator[tuple[str, Manifest]]:
    """An agent's states from its head back, as (digest, manifest), as far as they are kept. Raises DamageError."""
    return history_from(reader, agent.domain, agent.manifest)


def history_from(reader: Reader, domain_id: str, head: str) -> Iterator[tuple[str, Manifest]]:
    """The states from the one of digest `head` back, as far as they are kept. Raises DamageError."""
    for digest, manifest in StateWalk(reader, domain_id, _previous).visit([head]):
        assert manifest is not None  # the walk raises for a state that cannot be read
        yield digest, manifest


def _previous(manifest: Manifest, depth: int) -> Iterator[tuple[str, int]]:
    """Follow an agent's own history, without the states that it resumes."""
    if manifest.previous:
        yield manifest.previous, depth


def reachable_states(reader: Reader, agent: AgentRef) -> set[str]:
    """The digests of all kept states reachable from an agent's head and snapshots, unreadable ones included.

    A fork reaches the state that it came from, not the other agent's history.
    """
    roots = [root.manifest for root in agent_roots(reader, agent)]
    read = pass_over_damage(reader, agent.domain)
    walk = StateWalk(reader, agent.domain, own_history(agent.id), read)
    return {visit.digest for visit in walk.visit(roots) if reader.has_manifest(agent.domain, visit.digest)}


def resolve(reader: Reader, ref: Ref) -> State:
    """The state that `ref` names.

    Raises NotFoundError, UsageError for an ambiguous digest, and DamageError.
    """
    try:
        return _resolve(reader, ref)
    except DamageError:
        # files are read without a lock: another process may have moved or removed the ref and deleted what it named
        return _resolve(reader, ref)


def _resolve(reader: Reader, ref: Ref) -> State:
    agent = reader.agent(ref.agent)
    if ref.snapshot is not None:
        digest = reader.snapshot(ref.agent, ref.snapshot).manifest
    elif ref.digest is not None:
        digest = _by_prefix(reader, agent, ref.digest)
    else:
        digest = _back(reader, agent, ref.back)
    return State(ref, agent, digest, reader.manifest(agent.domain, digest))


def _by_prefix(reader: Reader, agent: AgentRef, prefix: str) -> str:
    matches = [digest for digest in reachable_states(reader, agent) if digest.startswith(prefix)]
    if len(matches) > 1:
        raise UsageError(
            f"sha256:{prefix} is ambiguous: {len(matches)} states of agent {agent.name} begin with it",
            "give more digits",
        )
    if not matches:
        raise NotFoundError(f"agent {agent.name} has no state sha256:{prefix}", f"run `amem log {agent.name}`")
    return matches[0]


def _back(reader: Reader, agent: AgentRef, back: int) -> str:
    count = 0
    for count, (digest, _) in enumerate(lineage(reader, agent)):
        if count == back:
            return digest
    raise NotFoundError(
        f"agent {agent.name} has {count} earlier states: {agent.name}~{back} does not exist",
        f"run `amem log {agent.name}`",
    )
