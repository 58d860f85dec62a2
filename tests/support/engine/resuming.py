"""Runs of models that are stopped, and runs that are not.

`python -m tests.support.engine.resuming ROLE ROOT OUT STEPS LENGTHS MODEL...`: `straight` feeds N tokens, for each N
of the lengths, and continues at once; `stop` feeds and commits them; `resume`, in a process of its own, takes them up
from the store, a fork of the longest, too, and continues. OUT gets a digest of the logits of every further pass.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from amem_cli.engine.cache.feeder import passes
from amem_cli.engine.cache.probe import describe
from amem_cli.engine.models.load import load
from amem_cli.engine.models.registry import find
from amem_cli.engine.prompt.transcript import Transcript
from amem_cli.engine.turns.agent_state import AgentState, AgentStates
from amem_cli.engine.turns.steps import drive
from kvstore import lifecycle
from kvstore.commit.journal import Actor
from kvstore.format.codecs import CODECS, DEFAULT_CODEC
from kvstore.naming import Ref
from kvstore.store import Store

CHUNK = 5  # tokens of the first pass that follows; then come steps
Digests = dict[str, list[str]]


def main(role: str, root: Path, out: Path, steps: int, lengths: list[int], models: list[Path]) -> None:
    store = Store.open_or_create(root, Actor.here("test", "0"))
    digests: Digests = {}
    for model in models:
        digests |= run(role, store, model, steps, lengths)
    out.write_text(json.dumps(digests))


def run(role: str, store: Store, model: Path, steps: int, lengths: list[int]) -> Digests:
    loaded = load(find(store.layout, str(model)), store.layout.root.parent / "cache")
    conversations = AgentStates(store, loaded, describe(loaded.model))
    tokens = np.random.default_rng(7).integers(3, 300, max(lengths) + CHUNK + steps + 1).tolist()
    digests: Digests = {}
    for length in lengths:
        name = f"{model.name}-{length}"
        if role == "resume":
            names = [name]
            if length == max(lengths):
                names.append(f"{name}-fork")
                lifecycle.fork(store, Ref(name), names[1])
            for each in names:
                agent = drive(conversations.resume(store.resolve(Ref(each))))
                assert agent.cached == length
                digests[each] = go_on(agent, tokens, steps)
                agent.release()
            continue
        domain = store.create_domain()
        with store.transaction(domain) as txn:
            agent = drive(conversations.begin(domain, CODECS[DEFAULT_CODEC], Transcript(tokens[: length + 1]), txn))
            for n in passes(0, length, logits=False):
                agent.feeder.feed(agent.pending[:n])
            if role == "straight":
                digests[name] = go_on(agent, tokens, steps)
            else:
                with store.hold(name, 0) as hold:
                    conversations.commit(agent, hold, txn, "prefill")
        agent.release()
    return digests


def go_on(agent: AgentState, tokens: list[int], steps: int) -> list[str]:
    """Feed what follows, and digest each pass's logits."""
    digests = []
    for step in [*passes(agent.cached, CHUNK, logits=False), *[1] * steps]:
        logits = agent.feeder.feed(tokens[agent.cached : agent.cached + step], logits=True)
        assert logits is not None
        values = np.array(logits)
        assert not np.isnan(values).any() and np.ptp(values[np.isfinite(values)]) > 0
        digests.append(hashlib.sha256(values.tobytes()).hexdigest())
    return digests


if __name__ == "__main__":
    role, root, out, steps, lengths, *models = sys.argv[1:]
    main(role, Path(root), Path(out), int(steps), [int(n) for n in lengths.split(",")], [Path(m) for m in models])
