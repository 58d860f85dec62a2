"""The store: open it, hold an agent, begin a transaction."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.commit import refs
from kvstore.commit.journal import Actor
from kvstore.commit.transaction import AgentHold, Transaction
from kvstore.disk import files
from kvstore.disk.canonical_json import dump, load
from kvstore.disk.clock import timestamp
from kvstore.disk.locks import INTERNAL_WAIT, Lock
from kvstore.errors import ConflictError, DamageError, IsolationError, NoStoreError
from kvstore.format.layout import StoreLayout
from kvstore.format.records import Domain
from kvstore.history.resolve import State, resolve
from kvstore.naming import Ref, check_name, file_name, new_id
from kvstore.reader import Reader

FORMAT = 1
BALLAST = 1 << 16  # bytes: what gc and the journal need on a full disk


class Store(Reader):
    """One store, opened by `open` or `open_or_create`. Reading it writes nothing and takes no lock."""

    def __init__(self, layout: StoreLayout, store_id: str, actor: Actor) -> None:
        super().__init__(layout)
        self.id = store_id
        self.actor = actor

    @classmethod
    def open(cls, root: Path, actor: Actor) -> "Store":
        """The store at `root`.

        Raises NoStoreError where no store is, where format.json is unreadable, and where another version wrote it.
        """
        layout = StoreLayout(root)
        return cls(layout, _read_format(layout), actor)

    @classmethod
    def open_or_create(cls, root: Path, actor: Actor) -> "Store":
        """The store at `root`, made if need be; several processes may do so at once.

        Raises NoStoreError as `open` does, and for a folder that holds something else.
        """
        layout = StoreLayout(root)
        if not layout.format.exists():
            _create(layout, actor)
        return cls.open(root, actor)

    def create_domain(self, name: str | None = None) -> Domain:
        """A domain for `Store.transaction`. Without a name a new one, which the first commit writes to disk.

        With a name: the domain of that name, made on disk if need be. Without agents it is garbage.
        Raises UsageError, ConflictError where a name differs by its case only.
        """
        if name is None:
            return Domain(new_id(), None, os.urandom(32).hex(), timestamp())
        check_name("domain", name)
        with Lock(self.layout.lock("domains"), "the list of domains", self.actor.via).acquire(False, INTERNAL_WAIT):
            for domain in self.domains():
                if domain.name == name:
                    return domain
                if domain.name and file_name(domain.name) == file_name(name):
                    raise ConflictError(
                        f"domain {domain.name} exists already", "names must differ by more than their case"
                    )
            domain = Domain(new_id(), name, os.urandom(32).hex(), timestamp())
            refs.put_domain(self.layout, domain, self.layout.staging / "domain")
            return domain

    def adopt_domain(self, domain: Domain) -> Domain:
        """A domain of another store for `Store.transaction`, under its own id and salt; the one here where it is.

        Raises IsolationError where that id has another salt here, ConflictError where its name is taken.
        """
        with Lock(self.layout.lock("domains"), "the list of domains", self.actor.via).acquire(False, INTERNAL_WAIT):
            known = self.domains()
            if here := next((other for other in known if other.id == domain.id), None):
                if here.salt != domain.salt:
                    raise IsolationError(f"domain {domain.id} is another one in this store", "import with --domain D")
                return here
            if domain.name is None:
                return domain
            if any(other.name and file_name(other.name) == file_name(domain.name) for other in known):
                raise ConflictError(f"another domain {domain.name} exists already", f"--domain {domain.name} uses it")
            refs.put_domain(self.layout, domain, self.layout.staging / "domain")
            return domain

    def resolve(self, ref: Ref) -> State:
        """The state that `ref` names. Raises NotFoundError, UsageError for an ambiguous digest, DamageError."""
        return resolve(self, ref)

    @contextmanager
    def hold(self, agent_name: str, wait: float) -> Iterator[AgentHold]:
        """Hold an agent, or a name that has none yet, for a turn.

        Raises UsageError, BusyError after `wait` seconds, ConflictError where a name differs by its case only.
        """
        check_name("agent", agent_name)
        path = self.layout.agent_lock(agent_name)
        with Lock(path, f"agent {agent_name}", self.actor.via).acquire(shared=False, wait=wait) as lock:
            agent = refs.read_agent(self.layout, agent_name)
            if agent and agent.name != agent_name:
                raise ConflictError(f"agent {agent.name} exists already", "names must differ by more than their case")
            yield AgentHold(agent_name, agent, lock)

    def transaction(self, domain: Domain) -> Transaction:
        """A transaction in `domain`, to be used as a context manager."""
        return Transaction(self.layout, self.actor, domain)


def _read_format(layout: StoreLayout) -> str:
    """The store's id."""
    try:
        values = load(files.read(layout.format))
    except (FileNotFoundError, DamageError) as error:
        raise NoStoreError(f"no store at {layout.root}", "`amem prefill` makes one") from error
    if values is None or not isinstance(values.get("id"), str):
        raise NoStoreError(f"{layout.format} is unreadable", "restore it from a copy of the store")
    if values.get("format") != FORMAT or values.get("features"):
        raise NoStoreError(
            f"the store at {layout.root} was written by another version", "use the version that wrote it"
        )
    return str(values["id"])


def _create(layout: StoreLayout, actor: Actor) -> None:
    known = {path.relative_to(layout.root).parts[0] for path in (*layout.folders(), layout.ballast)}
    try:
        if strangers := {path.name for path in layout.root.iterdir()} - known - {layout.format.name}:
            raise NoStoreError(
                f"{layout.root} is no store, and holds {len(strangers)} other entries", "choose an empty folder"
            )
    except FileNotFoundError:
        pass
    except OSError as error:
        raise files.explain(error, "read", layout.root) from error
    files.make_dirs(layout.locks)
    with Lock(layout.lock("store"), "the store", actor.via).acquire(shared=False, wait=INTERNAL_WAIT):
        if layout.format.exists():  # another process was faster
            return
        for folder in layout.folders():
            files.make_dirs(folder)
        files.unlink(layout.ballast)
        files.write_new(layout.ballast, [os.urandom(BALLAST)])  # random, so that no file system stores it as nothing
        values = {"format": FORMAT, "features": [], "id": new_id(), "created": timestamp()}
        files.publish(layout.format, dump(values), layout.staged_ref)
