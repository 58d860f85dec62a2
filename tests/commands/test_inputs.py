"""What becomes of messages, files and standard input, in the real command and before any model is loaded."""

import json
import sys
from pathlib import Path

import pytest

from amem_cli.shell import inputs
from kvstore.errors import AmemError
from tests.support.running import children
from tests.support.running.amem import COMMAND, Amem, lines, streams
from tests.support.running.terminal import Terminal


def ask(kind: str, message: str | None, *files: object, stdin: bytes = b"") -> tuple[str | int, str]:
    """The text that a command makes of its arguments, and what it leaves on standard input; or code and message."""
    names = [*map(str, files)]
    with streams(stdin):
        try:
            text = inputs.chat_text(message, names) if kind == "chat" else inputs.prefill_text(names)
        except AmemError as error:
            return error.exit_code, error.message
        return text, sys.stdin.buffer.read().decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.txt"
    path.write_text("from a file\n")
    return path


def test_a_message_leaves_standard_input_alone() -> None:
    assert ask("chat", "hello", stdin=b"for the loop\n") == ("hello", "for the loop\n")


@pytest.mark.parametrize("message", [None, "-"])
def test_standard_input_is_the_message(message: str | None) -> None:
    assert ask("chat", message, stdin=b"two\nlines\n\n") == ("two\nlines\n", "")


def test_files_follow_the_message_after_a_blank_line(file: Path) -> None:
    assert ask("chat", "look:", file)[0] == "look:\n\nfrom a file"
    assert ask("chat", "look:", file, file)[0] == "look:\n\nfrom a file\nfrom a file"
    assert ask("chat", None, file, stdin=b"look:\n")[0] == "look:\n\nfrom a file"
    assert ask("chat", None, file)[0] == "from a file"


def test_files_join_as_cat_joins_them(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "g.txt"
    other.write_bytes("ü without newline".encode())
    assert ask("prefill", None, other, file, "-", stdin=b"in\n")[0] == "ü without newlinefrom a file\nin"
    assert ask("prefill", None, stdin=b"in\n")[0] == "in"
    assert ask("prefill", None, file, stdin=b"untouched") == ("from a file", "untouched")


def test_only_one_final_newline_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\r\n \n\n")
    assert ask("prefill", None, tmp_path / "f")[0] == "\r\n \n"


@pytest.mark.parametrize(
    ("data", "code"), [(b"\xff", 2), (b"ok \xc3", 2), ("ü".encode("utf-16"), 2)], ids=["byte", "cut", "utf-16"]
)
def test_what_is_not_utf8_is_refused_by_name(tmp_path: Path, data: bytes, code: int) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(data)
    got, message = ask("prefill", None, path)
    assert got == code
    assert "latin.txt" in message
    got, message = ask("chat", None, stdin=data)
    assert got == code
    assert "standard input" in message


def test_a_folder_a_missing_file_and_an_unreadable_one(tmp_path: Path) -> None:
    assert ask("prefill", None, tmp_path)[0] == 2
    assert ask("prefill", None, tmp_path / "none")[0] == 4
    assert ask("chat", "hi", tmp_path / "none")[0] == 4
    (tmp_path / "file").touch()
    assert ask("prefill", None, tmp_path / "file" / "below")[0] == 1


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_prompt_is_exit_2(amem: Amem, stdin: bytes) -> None:
    for arguments in (("prefill", "a"), ("prefill", "a", "-"), ("chat", "a"), ("chat", "a", "")):
        done = amem(*arguments, "--json", stdin=stdin)
        assert (done.returncode, lines(done)[-1]["code"]) == (2, "usage"), arguments
        assert "empty" in done.stderr


def test_nothing_is_made_when_the_request_is_wrong(amem: Amem, tmp_path: Path) -> None:
    wrong = [
        ("prefill", "no/name", "-"),
        ("prefill", "a", str(tmp_path / "none")),
        ("prefill", "a", "-", "--codec", "q5"),
        ("prefill", "a", "-", "--domain", ""),
        ("prefill", "a", "-", "--role", "nobody"),
        ("prefill", "a", "-", "--system", "x", "--system-file", "y"),
        ("prefill", "a", "-", "--model", "no-such-model"),
        ("prefill", "a", "-"),  # no model is registered
        ("prefill", "a", "-", "--wait", "nan"),
    ]
    for arguments in wrong:
        done = amem(*arguments, stdin=b"text")
        assert done.returncode in (2, 4), (arguments, done.stderr)
        assert "bug" not in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_message_that_is_not_utf8_is_refused(environment: dict[str, str]) -> None:
    done = children.run(*COMMAND, "chat", "a", b"\xff", env=environment)
    assert done.returncode == 2
    assert "not UTF-8" in done.stderr


def test_a_file_name_that_is_not_utf8_still_makes_json(environment: dict[str, str]) -> None:
    done = children.run(*COMMAND, "--json", "prefill", "a", b"\xff.txt", env=environment)
    assert done.returncode == 4
    assert json.loads(done.stdout)["exit"] == 4


@pytest.mark.usefixtures("store")
def test_a_terminal_without_a_message_and_json_is_refused(environment: dict[str, str]) -> None:
    with Terminal() as terminal:
        done = children.run(*COMMAND, "chat", "a", "--json", env=environment, stdin=terminal.device)
    assert done.returncode == 2
    assert json.loads(done.stdout)["code"] == "usage"


@pytest.mark.usefixtures("store")
def test_only_the_head_can_be_chatted_with(amem: Amem) -> None:
    done = amem("chat", "a~1", "hello")
    assert done.returncode == 2
    assert "amem fork a~1" in done.stderr
