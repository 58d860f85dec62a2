"""Evicting an agent: its next state holds its tokens and feeds only, so that gc can take its blocks.

Nothing of the conversation is lost. The agent's next turn prefills again, pass by pass as the feeds say.
"""

from collections.abc import Iterator

from kvstore.disk.clock import timestamp
from kvstore.errors import BusyError
from kvstore.format.document import replace
from kvstore.format.manifest import EVICT, Manifest, Page, encode
from kvstore.graph.roots import Root
from kvstore.store import Store


def is_evictable(store: Store, root: Root) -> bool:
    """Whether a ref is an agent's head with something in its cache. Raises DamageError."""
    return root.snapshot is None and store.manifest(root.domain, root.manifest).cached > 0


def evicted_bytes(store: Store, root: Root) -> int:
    """About how many bytes the state takes that an eviction of this head would write."""
    head = store.manifest(root.domain, root.manifest)
    return len(encode(_evicted(head))) + sum(len(encode(page)) for page in _pages(store, head))


def evict(store: Store, root: Root) -> bool:
    """Evict the agent of a head. False where it is held, or has moved on since.

    Raises DamageError, NoSpaceError; the agent is then as it was.
    """
    try:
        with store.hold(root.agent, wait=0) as hold:
            if hold.agent is None or hold.agent.manifest != root.manifest:
                return False
            head = store.manifest(root.domain, root.manifest)
            with store.transaction(store.domain(root.domain)) as transaction:
                pages = tuple(transaction.put_page(page) for page in _pages(store, head))
                previous = root.manifest if head.complete else head.previous
                manifest = replace(_evicted(head), pages=pages, previous=previous)
                transaction.commit(hold, manifest, root.manifest)
    except BusyError:
        return False
    return True


def _pages(store: Store, head: Manifest) -> Iterator[Page]:
    """The tokens of a state, in pages that list no blocks."""
    return (replace(page, blocks=()) for page in store.pages(head))


def _evicted(head: Manifest) -> Manifest:
    return replace(head, op=EVICT, cached=0, resumes=None, window_blocks=(), tail=None, created=timestamp())
