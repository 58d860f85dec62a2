"""One object of a store, found by a prefix of its digest: what it is, and which refs need it."""

from dataclasses import dataclass
from typing import Any

from amem_cli.shell.output import digest
from kvstore.errors import NotFoundError, UsageError
from kvstore.format.block import read_metadata
from kvstore.format.kinds import MANIFEST, PAGE, StoredObject
from kvstore.format.manifest import FileRow
from kvstore.graph.objects import find_objects, size_of
from kvstore.graph.roots import agent_roots
from kvstore.graph.walk import Holders, own_history
from kvstore.history.log import REF_DIGITS
from kvstore.history.resolve import State
from kvstore.naming import Ref
from kvstore.store import Store


@dataclass(frozen=True)
class FoundObject:
    """An object and the id of its domain."""

    domain: str
    object: StoredObject


def find(store: Store, prefix: str, domain_id: str | None) -> FoundObject:
    """The one object whose SHA-256 starts with `prefix`, in one domain or in any.

    Raises NotFoundError and UsageError.
    """
    domains = [domain.id for domain in store.domains()] if domain_id is None else [domain_id]
    found = {FoundObject(domain, named) for domain in domains for named in find_objects(store.layout, domain, prefix)}
    if not found:
        raise NotFoundError(f"no object sha256:{prefix}", "`amem inspect` lists the agents")
    if len(found) > 1:
        raise UsageError(f"sha256:{prefix} matches {len(found)} digests", "give more digits")
    return found.pop()


def state_of(store: Store, found: FoundObject) -> State | None:
    """The state of a manifest; None for another kind of object, or if its agent is removed. Raises DamageError."""
    if found.object.kind is not MANIFEST:
        return None
    sha256 = found.object.sha256
    manifest = store.manifest(found.domain, sha256)
    for agent in store.agents():
        if agent.id == manifest.agent:
            return State(Ref(agent.name, digest=sha256[:REF_DIGITS]), agent, sha256, manifest)
    return None


def details(store: Store, found: FoundObject) -> dict[str, Any]:
    """The contents of an object in brief, and the agents and snapshots that need it. Raises DamageError."""
    return {
        "kind": found.object.kind.name,
        "digest": digest(found.object.sha256),
        "domain": store.domain(found.domain).name or found.domain,
        "bytes": size_of(store.layout, found.domain, found.object),
        **_contents(store, found),
        "held_by": _holders(store, found),
    }


def _contents(store: Store, found: FoundObject) -> dict[str, Any]:
    sha256 = found.object.sha256
    if found.object.kind is MANIFEST:
        manifest = store.manifest(found.domain, sha256)
        return {"agent_id": manifest.agent, "op": manifest.op, "tokens": manifest.tokens, "created": manifest.created}
    if found.object.kind is PAGE:
        page = store.page(found.domain, FileRow(sha256, xxh3="", bytes=0, tokens=0))
        return {"position": page.start, "tokens": len(page.tokens), "blocks": len(page.blocks)}
    metadata = read_metadata(store.layout.object(found.domain, *found.object))
    described = {key: metadata[key] for key in ("group", "codec", "model") if key in metadata}
    return described | {key: int(metadata[key]) for key in ("position", "tokens") if key in metadata}


def _holders(store: Store, found: FoundObject) -> list[str]:
    """Agents whose head or kept history needs the object, and snapshots that need it."""
    holders = Holders(store, found.domain)
    for agent in store.agents():
        if agent.domain == found.domain:
            for root in agent_roots(store, agent):
                holders.add(str(root), own_history(agent.id), [root.manifest], lenient=True)
    return sorted(holders.of[found.object])
