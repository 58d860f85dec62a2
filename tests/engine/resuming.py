"""Runs of a model that are stopped, and runs that are not: `python -m tests.engine.resuming ROLE STORE MODEL OUT N...`

`straight` feeds N tokens and goes on at once; `stop` feeds and commits them; `resume`, in a process of its own, takes
them up from the store and goes on. OUT gets, for each N, a digest of the logits of every further pass.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from amem_cli.engine.conversation import Conversation, Conversations
from amem_cli.engine.generate import passes
from amem_cli.engine.model import load
from amem_cli.engine.registry import find
from amem_cli.engine.spec import describe
from amem_cli.engine.steps import drive
from amem_cli.engine.transcript import Transcript
from kvstore.journal import Actor
from kvstore.naming import Ref
from kvstore.shapes import CODECS, DEFAULT_CODEC
from kvstore.store import Store

CHUNK, STEPS = 5, 70  # what follows: one short pass, then steps that fill a group of 64 and go beyond


def main(role: str, root: Path, model: Path, out: Path, lengths: list[int]) -> None:
    store = Store.open_or_create(root, Actor.here("test", "0"))
    loaded = load(find(store.layout, str(model)), root.parent / "cache")
    conversations = Conversations(store, loaded, describe(loaded.model))
    vocabulary = int(loaded.config["vocab_size"])
    tokens = np.random.default_rng(7).integers(3, vocabulary, max(lengths) + CHUNK + STEPS + 1).tolist()
    digests: dict[int, list[str]] = {}
    for length in lengths:
        name = f"n{length}"
        if role == "resume":
            agent = drive(conversations.resume(store.resolve(Ref(name))))
            assert agent.cached == length
            digests[length] = go_on(agent, tokens)
            continue
        domain = store.create_domain()
        with store.transaction(domain) as txn:
            agent = drive(conversations.begin(domain, CODECS[DEFAULT_CODEC], Transcript(tokens[: length + 1]), txn))
            for n in passes(0, length, logits=False):
                agent.feeder.feed(agent.pending[:n])
            if role == "straight":
                digests[length] = go_on(agent, tokens)
            else:
                with store.hold(name, 0) as hold:
                    conversations.commit(agent, hold, txn, "prefill")
    out.write_text(json.dumps(digests))


def go_on(agent: Conversation, tokens: list[int]) -> list[str]:
    """Feed what follows, and digest each pass's logits."""
    digests = []
    for step in [*passes(agent.cached, CHUNK, logits=False), *[1] * STEPS]:
        logits = agent.feeder.feed(tokens[agent.cached : agent.cached + step], logits=True)
        assert logits is not None
        values = np.array(logits)
        assert np.isfinite(values).all() and values.std() > 0
        digests.append(hashlib.sha256(values.tobytes()).hexdigest())
    return digests


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), [int(n) for n in sys.argv[5:]])
