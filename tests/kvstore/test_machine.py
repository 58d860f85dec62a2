"""A real store against a plain dict: commits, forks, snapshots, restores, and every earlier state by ~N."""

from contextlib import ExitStack

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.lifecycle import fork, restore, snapshot
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.making import ACTOR, commit, fast_folder, journal, picture, read_whole

Tokens = list[int]


class StoreMachine(RuleBasedStateMachine):
    """`histories`: each agent's states, oldest first. `named`: snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = self.stack.enter_context(fast_folder())
        self.store = Store.open_or_create(folder / "store", ACTOR)
        self.histories: dict[str, list[Tokens]] = {}
        self.named: dict[tuple[str, str], Tokens] = {}
        self.changes = 0

    def teardown(self) -> None:
        self.stack.close()

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.histories)))

    @rule(name=st.sampled_from("ab"), length=st.integers(1, 700), token=st.integers(0, 2))
    def commit(self, name: str, length: int, token: int) -> None:
        tokens = [token] * length
        commit(self.store, name, tokens)
        self.histories.setdefault(name, []).append(tokens)
        self.changes += 1

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), added=st.integers(1, 300))
    def extend(self, data: st.DataObject, added: int) -> None:
        name = self.pick(data)
        tokens = self.histories[name][-1] + [7] * added
        commit(self.store, name, tokens)
        self.histories[name].append(tokens)
        self.changes += 1

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = self.pick(data)
        new = f"f{len(self.histories)}"
        fork(self.store, Ref(name), new)
        self.histories[new] = [self.histories[name][-1]]
        self.changes += 1

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        name = self.pick(data)
        made, new = snapshot(self.store, Ref(name))
        assert new
        self.named[name, made.name] = self.histories[name][-1]
        self.changes += 1

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def restore_back(self, data: st.DataObject) -> None:
        name = self.pick(data)
        back = data.draw(st.integers(0, len(self.histories[name]) - 1))
        self.restored(Ref(name, back=back), self.histories[name][-1 - back])

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def restore_snapshot(self, data: st.DataObject) -> None:
        name, snap = data.draw(st.sampled_from(sorted(self.named)))
        self.restored(Ref(name, snapshot=snap), self.named[name, snap])

    def restored(self, ref: Ref, tokens: Tokens) -> None:
        if restore(self.store, ref, wait=0).undo is not None:
            self.histories[ref.agent].append(tokens)
            self.changes += 1
        assert self.histories[ref.agent][-1] == tokens

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        name = self.pick(data)
        for back, tokens in enumerate(reversed(self.histories[name])):
            state = self.store.resolve(Ref(name, back=back))
            assert read_whole(self.store, state.manifest) == tokens
            assert self.store.resolve(Ref(name, digest=state.digest[:16])).digest == state.digest

    @invariant()
    def holds_what_it_should(self) -> None:
        expected = {name: states[-1] for name, states in self.histories.items()}
        expected |= {f"{name}@{snap}": tokens for (name, snap), tokens in self.named.items()}
        assert picture(self.store.layout.root) == expected
        assert len(journal(self.store.layout.root)) == self.changes


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
