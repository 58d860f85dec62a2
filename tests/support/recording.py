"""What is recorded of a store, so that another version can be held against it. Nothing here knows the code of any.

`Opened` is what a version's adapter gives: `tests.support.old_store` for the code beside these tests, and
`tests.data.version_0_1_0` for the one that made the store in `tests/data`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

MODELS = "models"  # the folder of the models in an archive, beside the store's
STORE = "store"
PLACEHOLDER = "/store-0.1.0/models"  # in an archive's model records: the folder that they are unpacked to
ANSWER = 24  # tokens
SAMPLED_TEMP, SAMPLED_SEED = 0.8, 7
# fields of commands' lines that differ between runs, name a place on this machine, or are sentences
VOLATILE = {"started", "finished", "store", "source", "load_ms", "ttft_ms", "seconds", "proven", "not_proven"}

Array = npt.NDArray[np.float32]
Line = dict[str, Any]


@dataclass(frozen=True)
class State:
    """An agent's head or snapshot: what its manifest and pages say."""

    digest: str
    op: str
    model: str
    codec: str
    domain: str | None  # its name
    tokens: list[int]
    cached: int
    turns: list[tuple[str, int, int, str | None]]  # role, start, end, label
    owed: list[int]
    complete: bool
    recomputed: bool
    objects: list[str]  # SHA-256 of its pages, blocks and tail, sorted


@dataclass(frozen=True)
class Said:
    """An answer: its text, how many tokens it has, and whether the agent's cache was computed again."""

    text: str
    generated: int
    recomputed: bool


class Opened(Protocol):
    """A store as one version of the code opens it. What is said to an agent is committed."""

    def refs(self) -> list[str]:
        """All agents, and their snapshots as AGENT@NAME."""

    def state(self, ref: str) -> State:
        """What a ref stands for."""

    def loaded(self, ref: str) -> dict[str, list[bytes]]:
        """The bytes that a cache holds after loading the state: for each block and tail its parts, in file order."""

    def logits(self, ref: str, tokens: Sequence[int], answer: int) -> Array:
        """What the model says of the last `answer` of these tokens, which go on from the state: [answer, vocabulary].

        All before them are fed as a turn feeds them, and they themselves one by one. Nothing is committed.
        """

    def chat(self, agent: str, text: str, tokens: int, temp: float, seed: int) -> Said:
        """Say something to an agent, and let it answer with up to `tokens` tokens."""

    def prefill(self, agent: str, text: str, model: str, most_passes: int | None = None) -> bool:
        """Prefill an agent, and stop after so many passes. Returns whether that finished."""

    def fork(self, ref: str, new: str) -> None:
        """Continue a state under another name."""

    def restore(self, ref: str) -> None:
        """Move an agent's head to a state."""


def look(store: Opened, ref: str) -> Line:
    """What a state is, with digests in the place of what is long."""
    state = store.state(ref)
    found = asdict(state)
    found["tokens"] = len(state.tokens)
    found["tokens_sha256"] = _sha256([np.array(state.tokens, "<i4").tobytes()])
    found["loaded"] = {name: _sha256(parts) for name, parts in store.loaded(ref).items()}
    return found


def answer(store: Opened, ref: str, agent: str, question: str) -> Line:
    """Let `agent` answer a question by its likeliest tokens; it is at the state `ref`, which must stay there.

    Beside the answer: a digest of all of its logits in float32, and by how much the likeliest token led at the least.
    """
    said = store.chat(agent, question, ANSWER, temp=0.0, seed=0)
    tokens = store.state(agent).tokens
    ids = tokens[-said.generated :]
    logits = store.logits(ref, tokens, len(ids))
    assert logits.argmax(axis=-1).tolist() == ids, f"{ref} does not say twice what it says once"
    ordered = np.sort(logits, axis=-1)
    return {
        "question": question,
        "ids": ids,
        "text": said.text,
        "recomputed": said.recomputed,
        "logits": _sha256([logits.tobytes()]),
        "lead": float((ordered[:, -1] - ordered[:, -2]).min()),
    }


def sampled_answer(store: Opened, agent: str, question: str) -> list[int]:
    """The tokens of an answer that is drawn by chance."""
    said = store.chat(agent, question, ANSWER, SAMPLED_TEMP, SAMPLED_SEED)
    return store.state(agent).tokens[-said.generated :]


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a store and its models, modes included, and return the store's folder. Its models are registered there."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", _whole)
        tar.extractall(folder)
    for path in (folder / STORE / MODELS / "names").iterdir():
        record = json.loads(path.read_bytes())
        record["source"] = record["source"].replace(PLACEHOLDER, str(folder / MODELS))
        path.write_bytes(json.dumps(record, sort_keys=True).encode())
    return folder / STORE


def _whole(member: tarfile.TarInfo, _folder: str) -> tarfile.TarInfo:
    """What is unpacked by a Python that has no filters yet."""
    return member


def copy(folder: Path, to: Path) -> Path:
    """Another copy of a store, which uses the same models."""
    return shutil.copytree(folder, to)


class Commands:
    """Runs `python -m amem_cli` on a store, with whatever version is found first; nothing of the user's is read."""

    def __init__(self, store: Path, home: Path) -> None:
        self.store = store
        own = ("AMEM_", "XDG_", "NO_COLOR")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        places = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE", "STATE")}
        self._environment = {**kept, **places, "HOME": str(home), "AMEM_STORE": str(store)}

    def __call__(self, *arguments: str, text: str = "", code: int = 0) -> list[Line]:
        """The lines of a command's JSON, without what differs between runs. It must end with that exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "amem_cli", *arguments, "--json"],
            input=text.encode(),
            capture_output=True,
            env=self._environment,
            cwd=self.store.parent,
            timeout=300,
        )
        assert done.returncode == code, f"{arguments} ended with {done.returncode}: {done.stderr.decode()}"
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return [{key: value for key, value in line.items() if key not in VOLATILE} for line in lines]


# what is asked of a store by commands that change nothing
LOOKS: dict[str, tuple[str, ...]] = {
    "verify": ("verify", "--deep"),
    "gc": ("gc", "--dry-run", "--keep-history", "0"),
    "inspect": ("inspect",),
    "inspect guide": ("inspect", "guide"),
    "inspect windows@read": ("inspect", "windows@read"),
    "inspect both": ("inspect", "both"),
    "inspect gone": ("inspect", "gone"),
    "text of third": ("inspect", "third", "--text"),
    "log": ("log",),
    "log of guide": ("log", "guide"),
    "log of back": ("log", "back"),
    "log of moved": ("log", "moved"),
    "graph": ("log", "guide", "--graph"),
    "journal": ("log", "--head"),
    "diff": ("diff", "guide", "third"),
    "diff of codecs": ("diff", "channels", "gone"),
    "models": ("model", "ls"),
}


def told(run: Commands) -> Iterator[tuple[str, list[Line]]]:
    """What the commands in LOOKS say, each under its name."""
    for name, arguments in LOOKS.items():
        yield name, run(*arguments)


def _sha256(parts: Iterable[bytes]) -> str:
    """One digest over parts, each led by its length."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
