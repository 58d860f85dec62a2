import errno
import os
from pathlib import Path

import pytest

from kvstore.disk import files
from kvstore.errors import AmemError, NoSpaceError


def failing(at: str, code: int) -> None:
    def fault(step: str, _: Path) -> None:
        if step == at:
            raise OSError(code, os.strerror(code))

    files.fault = fault


def test_many_buffers_become_one_file(tmp_path: Path, steps: list[str]) -> None:
    buffers = [os.urandom(n % 7) for n in range(3000)]
    files.write_new(tmp_path / "f", buffers)
    assert (tmp_path / "f").read_bytes() == b"".join(buffers)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert steps == ["write", "write", "flush"]


@pytest.mark.parametrize("step", ["write", "flush"])
def test_a_failed_write_leaves_no_file(tmp_path: Path, steps: list[str], step: str) -> None:
    failing(step, errno.EIO)
    with pytest.raises(AmemError, match="could not write"):
        files.write_new(tmp_path / "f", [b"abc"])
    assert list(tmp_path.iterdir()) == []
    assert steps == []


def test_a_failed_append_changes_nothing(tmp_path: Path, steps: list[str]) -> None:
    files.append(tmp_path / "f", b"one\n")
    steps.clear()
    failing("write", errno.ENOSPC)
    with pytest.raises(NoSpaceError, match="no space left"):
        files.append(tmp_path / "f", b"two\n")
    assert (tmp_path / "f").read_bytes() == b"one\n"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, NoSpaceError, "no space left"),
        (errno.EDQUOT, NoSpaceError, "no space left"),
        (errno.EROFS, AmemError, "not allowed"),
        (errno.EACCES, AmemError, "not allowed"),
    ],
)
def test_errors_say_what_happened(
    tmp_path: Path, steps: list[str], code: int, kind: type[AmemError], words: str
) -> None:
    failing("make", code)
    with pytest.raises(kind, match=words) as caught:
        files.make_dir(tmp_path / "d")
    assert str(tmp_path / "d") in caught.value.message
    assert caught.value.hint
    assert steps == []


def test_publish_replaces_in_one_step(tmp_path: Path) -> None:
    files.write_new(tmp_path / "t", [b"left by a crash"])
    for content in (b"one", b"two"):
        files.publish(tmp_path / "f", content, tmp_path / "t")
        assert (tmp_path / "f").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(AmemError, match="could not make"):
        files.make_dirs(tmp_path / "f")


def test_folders_are_private(tmp_path: Path) -> None:
    files.make_dirs(tmp_path / "a" / "b")
    files.make_dirs(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
