"""From a REF to a state: heads, snapshots, earlier states of an agent, and states by digest.

An agent's history is the chain of `previous` from its head, as far as gc has kept it. A state that is
not complete does not stand in it: the one after it took over its `previous`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.commit import refs
from kvstore.errors import DamageError, NotFoundError, UsageError
from kvstore.format.manifest import Manifest
from kvstore.format.records import AgentRef
from kvstore.naming import Ref
from kvstore.reader import Reader


@dataclass(frozen=True)
class State:
    """What a REF stands for: a manifest and its digest, with the agent's ref as it was then."""

    ref: Ref
    agent: AgentRef
    digest: str
    manifest: Manifest


def lineage(reader: Reader, agent: AgentRef) -> Iterator[tuple[str, Manifest]]:
    """An agent's states from its head back, as (digest, manifest), as far as they are kept."""
    digest: str | None = agent.manifest
    while digest is not None:
        manifest = reader.manifest(agent.domain, digest)
        yield digest, manifest
        digest = manifest.previous
        if digest is not None and not reader.has_manifest(agent.domain, digest):
            return


def reachable(reader: Reader, agent: AgentRef) -> set[str]:
    """The digests of all kept states that an agent's head and snapshots lead to, by `previous` and `resumes`.

    A fork leads to the state that it came from, not into the other agent's history.
    """
    found: set[str] = set()
    snapshots = refs.read_snapshots(reader.layout, agent.name)
    todo: list[str | None] = [agent.manifest, *(s.manifest for s in snapshots if s.agent_id == agent.id)]
    while todo:
        digest = todo.pop()
        if digest is None or digest in found or not reader.has_manifest(agent.domain, digest):
            continue
        found.add(digest)
        try:
            manifest = reader.manifest(agent.domain, digest)
        except DamageError:  # other states must stay within reach
            continue
        if manifest.agent == agent.id:
            todo += (manifest.previous, manifest.resumes)
    return found


def resolve(reader: Reader, ref: Ref) -> State:
    """The state that `ref` names.

    Raises NotFoundError, UsageError for an ambiguous digest, and DamageError.
    """
    agent = reader.agent(ref.agent)
    if ref.snapshot is not None:
        digest = reader.snapshot(ref.agent, ref.snapshot).manifest
    elif ref.digest is not None:
        digest = _by_prefix(reader, agent, ref.digest)
    else:
        digest = _back(reader, agent, ref.back)
    return State(ref, agent, digest, reader.manifest(agent.domain, digest))


def _by_prefix(reader: Reader, agent: AgentRef, prefix: str) -> str:
    matches = [digest for digest in reachable(reader, agent) if digest.startswith(prefix)]
    if len(matches) > 1:
        raise UsageError(f"sha256:{prefix} stands for {len(matches)} states of agent {agent.name}", "give more digits")
    if not matches:
        raise NotFoundError(f"agent {agent.name} has no state sha256:{prefix}", f"run `amem log {agent.name}`")
    return matches[0]


def _back(reader: Reader, agent: AgentRef, back: int) -> str:
    count = 0
    for count, (digest, _) in enumerate(lineage(reader, agent)):
        if count == back:
            return digest
    raise NotFoundError(
        f"agent {agent.name} has {count} earlier states, so there is no {agent.name}~{back}",
        f"run `amem log {agent.name}`",
    )
