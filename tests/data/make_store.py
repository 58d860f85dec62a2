"""Makes `store-0.1.0.tar.xz` and `expected-0.1.0.json`: a store of version 0.1.0, and what that version says of it.

It was run with the code of 0.1.0 as it stood at commit 9323e91, on Linux with MLX's CPU backend:

    PYTHONPATH=CHECKOUT unshare --uts sh -c 'hostname testhost; CHECKOUT/.venv/bin/python tests/data/make_store.py OUT'

CHECKOUT holds that version and its environment; the host's name stands in the store's journal. OUT gets the two files,
and a folder `made` with what they were made of. Ids and times are new in each run, so another run's store is another
one: make it anew only together with what is expected of it. A later version's store takes files of its own.

All agents are made by commands of that version, in processes of their own, but for one whose prefill is to be cut
short at a certain pass.
"""

import json
import lzma
import platform
import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.data.version_0_1_0 import Version010
    from tests.support.recording import Commands, Line

COMMIT = "9323e91"
LEAD = 0.05  # logits by which the likeliest token must lead in all that is compared between machines
VARIETY = 6  # different tokens that such an answer has at least
PROSE = (
    "The lighthouse on Gannet Point was built in 1871, of grey stone that was brought by sea. Its lamp shows two "
    "flashes every ten seconds, and on clear nights they are seen from the islands. The keeper, Marta Quill, came in "
    "1902 with a clock, a cat and eleven books. She wrote down the wind each morning and the ships each evening. In "
    "the winter of 1911 a storm broke the great lens; it was mended with lead, and one of the two flashes has been a "
    "little shorter ever since. Pilots who know the coast count on it. The harbour below has room for nine boats, and "
    "a bell that is rung in fog. When the line to the mainland was laid, the bell was hung in the school instead. "
)
QUESTIONS = [
    *("Who keeps it?", "And the bell?", "What year was that?", " She said", " The keeper", " In fog", " Nine boats"),
    *("Why?", "Tell me of the lens.", " On clear nights", " The cat", "How many ships?", " It was", "And then?"),
    *(" At noon", "Is it far?", " Below,", "Who came?", " Lead", " A storm", "Which wind?", " Eleven", " Two", "So?"),
]
# name → tokens that are prefilled, and tokens that it then answers; each is called like its model
AGENTS = {
    "ragged": (530, 9),
    "arrays": (519, 9),
    "windows": (640, 21),
    "sinks": (850, 9),
    "states": (4300, 12),
    "convolutions": (330, 9),
    "both": (300, 30),
    "gates": (600, 9),
    "latents": (540, 20),
    "expanded": (270, 12),
    "indexed": (515, 9),
}
CODECS = {"eighths": "q8-channel", "by-token": "q4-token", "eighths-by-token": "q8-token"}


def main(out: Path) -> None:
    """Make both files in `out`, which must not be there yet."""
    import_module("amem_cli.engine")  # the version that PYTHONPATH leads to: the code beside this file comes behind it
    import_module("kvstore")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.data import store_models
    from tests.data.version_0_1_0 import Version010
    from tests.support import recording

    made = (out / "made").resolve()
    made.mkdir(parents=True)
    store_models.write_models(made / recording.MODELS)
    home = made / "home"
    run = recording.Commands(made / recording.STORE, home)
    for name in store_models.MODELS:
        run("model", "add", name, str(made / recording.MODELS / name))
    evict(run)
    share(run)
    serve_every_kind(run)
    use_every_codec(run)
    leave(run)
    bring(run, recording.Commands(made / "elsewhere", home), str(made / recording.MODELS / "full"))
    assert not Version010(run.store, home).prefill("cut", prose(700, 3), "full", most_passes=1)
    expected = {
        "version": "0.1.0",
        "commit": COMMIT,
        "machine": f"{platform.system()} {platform.machine()}, mlx {version_of('mlx')}, mlx-lm {version_of('mlx-lm')}",
        "commands": dict(recording.told(run)),
        "states": record(run.store, made, Version010),
    }
    (out / "expected-0.1.0.json").write_text(laid_out(expected) + "\n")
    pack(made, out / "store-0.1.0.tar.xz")


def laid_out(value: Any, folded: int = 3) -> str:
    """JSON in which the values at that depth take a line each, so that a change of one is a change of one line."""
    if not folded or not value or not isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list):
        return "[\n" + ",\n".join(laid_out(each, 0) for each in value) + "\n]"
    rows = (f"{json.dumps(key)}: {laid_out(value[key], folded - 1)}" for key in sorted(value))
    return "{\n" + ",\n".join(rows) + "\n}"


def prose(length: int, start: int = 0) -> str:
    """So many bytes of text, each a token of the models; texts of one `start` begin alike."""
    begin = 97 * start % len(PROSE)
    return (PROSE * (2 + length // len(PROSE)))[begin : begin + length]


def chat(run: "Commands", agent: str, text: str, tokens: int, *more: str) -> None:
    run("chat", agent, text, "--max-tokens", str(tokens), *(more or ("--temp", "0", "--seed", "0")))


def prefill(run: "Commands", agent: str, length: int, start: int, *more: str) -> None:
    run("prefill", agent, *more, text=prose(length, start))


def evict(run: "Commands") -> None:
    """Agents whose blocks have gone: one of each kind of layers; one with a snapshot, whose blocks stay; and one that
    has computed its own again."""
    prefill(run, "gone", 540, 1, "--model", "full")
    chat(run, "gone", "Who was it?", 12)
    prefill(run, "gone-windows", 420, 2, "--model", "windows")
    prefill(run, "gone-states", 300, 3, "--model", "convolutions")
    prefill(run, "gone-named", 400, 4, "--model", "sinks")
    run("snapshot", "gone-named", "before", "--note", "its blocks stay")
    chat(run, "gone-named", " And", 7)
    prefill(run, "again", 321, 5, "--model", "full")
    run("gc", "--older-than", "0s")
    chat(run, "again", "Once more.", 7)


def share(run: "Commands") -> None:
    """Agents of a named domain that have blocks in common: by forks of a head and a snapshot, and by an equal text.
    Beside them one whose text took the place of another, and one that went back.
    """
    system = ("--system", "You know the coast.", "--domain", "team", "--model", "full")
    prefill(run, "guide", 470, 0, *system)
    run("snapshot", "guide", "first", "--note", "before the first question")
    chat(run, "guide", "Who keeps the lamp?", 20)
    run("extend", "guide", "--phase", "storm", text=" A storm broke the lamp.")
    run("fork", "guide", "second")
    chat(run, "second", "What then?", 16, "--temp", "0.7", "--seed", "11", "--top-p", "0.9")
    run("fork", "guide@first", "third", "--note", "another way")
    run("extend", "third", "--phase", "calm", text=prose(40, 6))
    prefill(run, "peer", 560, 0, *system)
    prefill(run, "anew", 400, 2, "--model", "full")
    run("prefill", "anew", "--replace", text=prose(310, 2) + prose(60, 5))
    prefill(run, "back", 300, 2, "--model", "full")
    run("snapshot", "back", "start")
    chat(run, "back", "One.", 8)
    chat(run, "back", "Two.", 8)
    run("restore", "back~1", "--note", "the second answer was not wanted")


def serve_every_kind(run: "Commands") -> None:
    """An agent of each other model, and for some a snapshot of it, and a fork of that."""
    for start, (name, (length, answer)) in enumerate(AGENTS.items()):
        domain = ("--domain", "mixed") if name in ("windows", "latents") else ()
        prefill(run, name, length, start, "--model", name, *domain)
        if name in ("windows", "states", "gates", "indexed"):
            run("snapshot", name, "read")
        chat(run, name, "What of it?", answer)
    run("fork", "windows@read", "windows-too")
    chat(run, "windows-too", " Elsewhere", 9)


def use_every_codec(run: "Commands") -> None:
    """Agents of codecs besides the default one: q4-channel for each kind of attention, the others for one."""
    prefill(run, "channels", 590, 4, "--model", "full", "--codec", "q4-channel")
    chat(run, "channels", "Where?", 9)
    prefill(run, "channels-windows", 520, 5, "--model", "windows", "--codec", "q4-channel")
    prefill(run, "channels-latents", 261, 6, "--model", "latents", "--codec", "q4-channel")
    for name, codec in CODECS.items():
        prefill(run, name, 269, 1, "--model", "full", "--codec", codec)


def leave(run: "Commands") -> None:
    """Agents and a snapshot that were removed; what they had is still there, but for one that was erased."""
    prefill(run, "removed", 300, 6, "--model", "full")
    run("snapshot", "removed", "once")
    chat(run, "removed", "Still there?", 5)
    run("fork", "guide", "lost")
    run("extend", "lost", text=prose(30, 1))
    run("snapshot", "back", "brief")
    prefill(run, "erased", 280, 5, "--model", "full")
    run("rm", "removed", "lost", "back@brief")
    run("rm", "--erase", "erased")


def bring(run: "Commands", elsewhere: "Commands", model: str) -> None:
    """An agent that was imported, with its domain, from another store."""
    elsewhere("model", "add", "full", model)
    prefill(elsewhere, "moved", 290, 2, "--model", "full")
    chat(elsewhere, "moved", "Who goes?", 6)
    file = run.store.parent / "moved.amem"
    elsewhere("export", "moved", "--lineage", "-o", str(file))
    run("import", str(file))


def record(store: Path, made: Path, version: "type[Version010]") -> "dict[str, Line]":
    """What the version says of each state: what it is, what is loaded, and how it goes on, on copies of the store."""
    from tests.support import recording

    opened = version(store, made / "home")
    found = {ref: recording.look(opened, ref) for ref in opened.refs()}
    asked = version(recording.copy(store, made / "asked"), made / "home")
    assert asked.prefill("cut", prose(700, 3), "full")
    for ref, line in found.items():
        if line["complete"]:
            line["answer"], line["sampled"] = surest(asked, ref)
    head = f"cut@sha256:{asked.state('cut').digest}"
    found["cut"]["text"] = prose(700, 3)
    found["cut"]["finished"] = recording.look(asked, "cut")["loaded"]
    found["cut"]["answer"], found["cut"]["sampled"] = surest(asked, head)
    return found


def surest(asked: "Version010", ref: str) -> tuple[Any, list[int]]:
    """The answer to the first question that is answered by tokens that all lead by enough, and one drawn by chance."""
    from tests.support import recording

    tries: Iterator[str] = iter(QUESTIONS)
    for number, question in enumerate(tries):
        name = f"{ref.replace('@', '-').replace(':', '-')[:40]}-{number}"
        asked.fork(ref, name)
        answer = recording.answer(asked, ref, name, question)
        if answer["lead"] >= LEAD and len(set(answer["ids"])) >= VARIETY:
            asked.fork(ref, f"{name}-drawn")
            return answer, recording.sampled_answer(asked, f"{name}-drawn", question)
    raise AssertionError(f"{ref} answers no question surely")


def pack(made: Path, archive: Path) -> None:
    """Put the store and the models into one file that names no place and no owner, modes kept."""
    from tests.support import recording

    models = str(made / recording.MODELS)
    packed = made / "packed"
    recording.copy(made / recording.STORE, packed / recording.STORE)
    shutil.copytree(made / recording.MODELS, packed / recording.MODELS)
    for path in (packed / recording.STORE / "models" / "names").iterdir():
        path.write_bytes(path.read_bytes().replace(models.encode(), recording.PLACEHOLDER.encode()))
    for path in packed.rglob("*"):
        assert path.is_dir() or str(made.parent).encode() not in path.read_bytes(), f"{path} names a place"

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        return member

    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in (recording.STORE, recording.MODELS):
            tar.add(packed / name, name, filter=plain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
