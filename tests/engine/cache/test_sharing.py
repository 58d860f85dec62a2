"""Agents of one domain hold the full slabs that they have in common once, and are what they are alone."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from amem_cli.engine.cache.attention_caches import FullCache
from amem_cli.engine.cache.slabs import Slab, SlabPool
from amem_cli.engine.prompt.transcript import Text, Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import PrefillOptions
from amem_cli.engine.turns.steps import Work, drive
from kvstore import lifecycle
from kvstore.errors import DamageError
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.format.kinds import BLOCK
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.naming import Ref
from kvstore.remove.remove import remove_domain
from kvstore.verify.checks import Checks
from kvstore.verify.verify import verify
from tests.support.engine.caches import layer_group
from tests.support.engine.places import SENTENCE, Place

Tiny = Callable[[str], Path]
SLAB_TOKENS = 16 * BLOCK_TOKENS
CODEC = CODECS[DEFAULT_CODEC]


class Family:
    """An agent whose first slab is full and whose second is not, and its forks.

    It has grown beyond the first one's end in the engine's memory, and is still there.
    """

    def __init__(self, place: Place, engine: Engine) -> None:
        self.place, self.engine = place, engine
        self.text = SENTENCE * (20 * SLAB_TOKENS // len(engine.model.prompt.encode(20 * SENTENCE)) + 5)
        first, rest = self.text[: -10 * len(SENTENCE)], self.text[-10 * len(SENTENCE) :]
        engine.prefill("parent", [Text(first)])
        assert place.state("parent").manifest.cached < SLAB_TOKENS
        engine.extend("parent", [Text(rest)])
        assert SLAB_TOKENS + 64 < place.state("parent").manifest.cached < 2 * SLAB_TOKENS
        for name in ("left", "right"):
            lifecycle.fork(place.store, Ref("parent"), name)

    def memory(self) -> AgentStates:
        """The same agents with nothing in memory."""
        return AgentStates(self.place.store, self.engine.model, self.engine.spec)

    def resume(self, memory: AgentStates, name: str) -> AgentState:
        return drive(memory.resume(self.place.state(name)))


@pytest.fixture(scope="module")
def family(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    place = Place(tmp_path_factory.mktemp("family"))
    return Family(place, place.engine(endless, checkpoint_seconds=1e9))


def slabs(agent: AgentState) -> list[Slab]:
    return agent.feeder.cache.slabs


def go_on(agent: AgentState, tokens: int) -> list[mx.array]:
    """The logits of further passes."""
    logits = [agent.feeder.feed([5 + n % 90], logits=True) for n in range(tokens)]
    return [array for array in logits if array is not None]


def test_a_fork_beside_its_parent_is_what_it_is_alone(family: Family) -> None:
    """To the last bit, while the other agent continues too, and past its end."""
    alone = go_on(family.resume(family.memory(), "left"), 70)
    memory = family.memory()
    parent, fork = family.resume(memory, "parent"), family.resume(memory, "left")
    assert slabs(parent)[0] is slabs(fork)[0] and slabs(parent)[1] is not slabs(fork)[1]
    with_it = []
    for n in range(70):
        parent.feeder.feed([7 + n])
        with_it += [fork.feeder.feed([5 + n % 90], logits=True)]
    assert len(alone) == len(with_it) == 70
    assert all(b is not None and mx.array_equal(a, b) for a, b in zip(alone, with_it, strict=True))
    parent.release()
    again = family.resume(memory, "right")
    assert slabs(again)[0] is slabs(fork)[0]
    fork.release()
    assert all(map(mx.array_equal, go_on(again, 70), alone))


def test_rings_have_one_writer(tiny: Tiny, place: Place) -> None:
    engine = place.engine(tiny("gemma3_text"))
    engine.prefill("parent", [Text(SENTENCE * 50)])
    lifecycle.fork(place.store, Ref("parent"), "fork")
    agents = [drive(engine.agents.resume(place.state(name))) for name in ("parent", "fork")]
    assert agents[0].cached > 4 * BLOCK_TOKENS
    assert not set(slabs(agents[0])) & set(slabs(agents[1]))


def test_a_shared_slab_is_not_read_again(family: Family) -> None:
    memory = family.memory()
    parent = family.resume(memory, "parent")
    held, before = memory.pool.nbytes, parent.feeder.cache.nbytes
    fork = family.resume(memory, "left")
    shared = slabs(parent)[0].nbytes
    assert memory.pool.nbytes == held + fork.feeder.cache.nbytes - shared
    assert fork.feeder.cache.nbytes == before
    assert fork.rows == parent.rows


def test_agents_that_are_read_at_the_same_time_share_in_the_end(family: Family) -> None:
    memory = family.memory()
    begun = [memory.resume(family.place.state(name)) for name in ("left", "right")]
    works = [next(steps) for steps in begun]
    agents = []
    for work in works:
        assert isinstance(work, Work)
        work.run()
    for steps in begun:
        with pytest.raises(StopIteration) as done:
            steps.send(None)
        agents.append(done.value.value)
    assert slabs(agents[0])[0] is slabs(agents[1])[0]
    assert all(map(mx.array_equal, *(go_on(agent, 3) for agent in agents)))


def test_domains_share_nothing(family: Family) -> None:
    """Not with the same text, and not with a domain that bore the same name."""
    place, memory = family.place, family.memory()
    agents = [family.resume(memory, "parent")]
    for _ in range(2):
        family.engine.prefill("other", [Text(family.text)], PrefillOptions(domain="named"))
        agents.append(family.resume(memory, "other"))
        remove_domain(place.store, "named", 0)
    assert len({agent.domain.id for agent in agents}) == 3
    assert len({slab for agent in agents for slab in slabs(agent)}) == sum(len(slabs(agent)) for agent in agents) == 6


def test_an_agent_that_grew_in_memory_shares_what_it_committed(family: Family) -> None:
    state = family.place.state("parent")
    memory = family.engine.agents
    fork = family.resume(memory, "left")
    grown = family.engine.memory_budget.take(state.agent.id, state.digest)
    assert grown is not None and slabs(grown)[0] is slabs(fork)[0]
    assert slabs(grown)[1] is not slabs(fork)[1]
    assert all(map(mx.array_equal, go_on(grown, 3), go_on(fork, 3)))
    for agent in (grown, fork):
        agent.release()


def test_a_damaged_block_is_found_where_nothing_is_shared(family: Family) -> None:
    """It is never shared, and the memory that it was to be read into is given back."""
    place = family.place
    row = next(iter(place.store.blocks(place.state("parent").manifest)))
    path = place.store.layout.object(place.state("parent").agent.domain, BLOCK, row.sha256)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        memory, held = family.memory(), []
        for name in ("parent", "left", "parent"):
            with pytest.raises(DamageError):
                family.resume(memory, name)
            held.append(memory.pool.nbytes)
        assert held[0] == held[1] == held[2] > 0
    finally:
        path.write_bytes(whole)
        path.chmod(0o400)
    assert not verify(place.store, Checks("deep")).findings
    agent = family.resume(memory, "parent")
    assert memory.pool.nbytes == agent.feeder.cache.nbytes  # it has what they were to have
    assert mx.array_equal(go_on(agent, 1)[0], go_on(family.resume(family.memory(), "parent"), 1)[0])


def test_another_text_in_a_shared_slab_s_place_leaves_it_alone(family: Family) -> None:
    place, memory = family.place, family.memory()
    parent = family.resume(memory, "parent")
    codes = [buffer.host.copy() for buffer in slabs(parent)[0].buffers.values()]
    state = place.state("left")
    tokens = place.store.tokens(state.manifest).tolist()
    for parting in (SLAB_TOKENS - 100, SLAB_TOKENS, SLAB_TOKENS + 64):
        other = [*tokens[:parting], *[9] * 300]
        with place.store.transaction(parent.domain) as txn:
            agent, parted_at = drive(memory.rewind(state, CODEC, Transcript(other), txn))
        assert parted_at >= parting
        assert agent.cached == parting // 64 * 64
        assert (slabs(parent)[0] in slabs(agent)) == (parting >= SLAB_TOKENS)
        for _ in range(2):
            agent.feeder.feed(agent.pending[: BLOCK_TOKENS - agent.cached % BLOCK_TOKENS])
        agent.release()
        for before, buffer in zip(codes, slabs(parent)[0].buffers.values(), strict=True):
            np.testing.assert_array_equal(before, buffer.host)


def filled(pool: SlabPool, keys: list[str]) -> FullCache:
    """Full slabs of one byte, a different one for each key, as if they had been read; then shared."""
    cache = FullCache(layer_group(layers=1, kv_heads=1), CODEC, pool)
    cache.begin(keys)
    for i, key in enumerate(keys):
        if not cache.shares(16 * i):
            for buffer in cache.slabs[i].buffers.values():
                buffer.host.fill(ord(key))
    cache.share(keys)
    cache.block(16 * len(keys))  # the open one
    return cache


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_released_in_any_order(order: tuple[int, ...]) -> None:
    pool = SlabPool()
    keys = [["a", "b"], ["a"], ["a", "b", "c"]]
    agents = [filled(pool, each) for each in keys]
    taken = {slab for agent in agents for slab in agent.slabs}
    assert len(taken) == 3 + 3  # three keys, and an open one each
    recent = agents[0].recent_k.host.nbytes + agents[0].recent_v.host.nbytes
    assert pool.nbytes == sum(slab.nbytes for slab in taken) + 3 * recent
    for n in order:
        agents[n].release()
        for left in (agents[m] for m in order[order.index(n) + 1 :]):
            for slab, key in zip(left.slabs, keys[agents.index(left)], strict=False):
                assert all((buffer.host == ord(key)).all() for buffer in slab.buffers.values())
    assert pool.nbytes == sum(slab.nbytes for slab in taken)
    assert not any(buffer.host.any() for slab in taken for buffer in slab.buffers.values())
    again = filled(pool, ["a"])  # nothing is shared with what is gone
    assert set(again.slabs) < taken and pool.nbytes == sum(slab.nbytes for slab in taken) + recent
