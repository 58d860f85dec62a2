import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open

from kvstore.disk import files
from kvstore.errors import DamageError
from kvstore.format.block import (
    ALIGNMENT,
    SLICE,
    BlockHeader,
    FileDigest,
    digest,
    encode_header,
    is_intact,
    read_metadata,
    read_parts,
)
from kvstore.format.codecs import CODECS
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.parts import BLOCK_TOKENS, Part
from tests.support.making import CODEC, FULL, GROUPS, buffers_for, content

HEADER = BlockHeader("d" * 32, "f" * 64, CODEC.name, FULL.id, 256, "b" * 64, "a" * 64)
PARTS = block_parts(FULL, CODEC, 0)
BUFFERS = content("block", PARTS)


def write(path: Path, parts: list[Part], buffers: list[memoryview]) -> FileDigest:
    whole: list[files.Buffer] = [encode_header(HEADER.metadata(), parts), *buffers]
    files.write_new(path, whole, mode=0o400)
    return digest(whole)


@pytest.fixture
def block(tmp_path: Path) -> tuple[Path, FileDigest]:
    path = tmp_path / "blocks" / "ab" / "abcd.safetensors"
    files.make_dirs(path.parent)
    return path, write(path, PARTS, BUFFERS)


def read(block: tuple[Path, FileDigest]) -> list[memoryview]:
    path, found = block
    buffers = buffers_for(PARTS)
    assert read_parts(path, found.bytes, found.xxh3, PARTS, buffers) == HEADER.metadata()
    return buffers


def test_a_block_reads_back(block: tuple[Path, FileDigest]) -> None:
    assert read(block) == BUFFERS
    assert read_metadata(block[0])["position"] == "256"


def test_digests_are_those_of_the_file(block: tuple[Path, FileDigest]) -> None:
    path, found = block
    data = path.read_bytes()
    assert found == FileDigest(hashlib.sha256(data).hexdigest(), xxhash.xxh3_64_hexdigest(data), len(data))
    assert path.stat().st_mode & 0o777 == 0o400


def test_data_start_on_a_page(block: tuple[Path, FileDigest]) -> None:
    path, found = block
    assert (found.bytes - sum(part.nbytes for part in PARTS)) % ALIGNMENT == 0
    assert path.read_bytes().endswith(b"".join(BUFFERS))


@pytest.mark.parametrize("tokens", [1, 63, 64, 255])
def test_safetensors_opens_a_tail(tmp_path: Path, tokens: int) -> None:
    parts = tail_parts(GROUPS, CODEC, tokens)
    write(tmp_path / "tail", parts, content("tail", parts))
    with safe_open(tmp_path / "tail", framework="mlx") as opened:
        assert set(opened.keys()) == {part.name for part in parts}


def test_safetensors_opens_a_block(block: tuple[Path, FileDigest]) -> None:
    with safe_open(block[0], framework="numpy") as opened:
        assert opened.metadata() == HEADER.metadata()
        for part, buffer in zip(PARTS, BUFFERS, strict=True):
            piece = opened.get_slice(part.name)
            assert (piece.get_dtype(), tuple(piece.get_shape())) == (part.dtype, part.shape)
            if part.dtype != "BF16":  # NumPy has no such type
                assert opened.get_tensor(part.name).tobytes() == bytes(buffer)


def test_parts_larger_than_a_slice(tmp_path: Path) -> None:
    """Slices must neither lose nor repeat a byte where they cut through a part."""
    parts = block_parts(LayerGroup("full-0", "full", tuple(range(19)), 2, 256, 128), CODECS["q8-channel"], 0)
    assert sum(part.nbytes for part in parts) > 2 * SLICE
    buffers = content("large", parts)
    found = write(tmp_path / "block", parts, buffers)
    got = buffers_for(parts)
    read_parts(tmp_path / "block", found.bytes, found.xxh3, parts, got)
    assert got == buffers


def test_every_flipped_bit_is_found(block: tuple[Path, FileDigest]) -> None:
    path, found = block
    path.chmod(0o600)
    for at in (0, 9, 300, ALIGNMENT - 1, ALIGNMENT, found.bytes // 2, found.bytes - 1):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamageError, match="sha256:abcd"):
            read(block)
        assert not is_intact(path, found)
        data[at] ^= 1
        path.write_bytes(data)
    assert read(block) == BUFFERS
    assert is_intact(path, found)


@pytest.mark.parametrize("size", [0, 7, 4000, ALIGNMENT, -1, 1])
def test_another_size_is_damage(block: tuple[Path, FileDigest], size: int) -> None:
    path, found = block
    path.chmod(0o600)
    os.truncate(path, size if size > 1 or size == 0 else found.bytes + size)
    with pytest.raises(DamageError, match="bytes instead of"):
        read(block)
    assert not is_intact(path, found)


@pytest.mark.parametrize("size", [0, 7, 100])
def test_metadata_of_a_truncated_file(block: tuple[Path, FileDigest], size: int) -> None:
    block[0].chmod(0o600)
    os.truncate(block[0], size)
    with pytest.raises(DamageError, match="no readable header"):
        read_metadata(block[0])


def test_what_is_no_regular_file_is_damage(block: tuple[Path, FileDigest]) -> None:
    path, found = block
    aside = path.with_name("aside")
    path.rename(aside)
    with pytest.raises(DamageError, match="is missing"):
        read(block)
    makers: list[Callable[[], None]] = [lambda: os.mkfifo(path), lambda: path.symlink_to(aside), path.mkdir]
    for make in makers:
        make()
        with pytest.raises(DamageError, match="not a regular file"):
            read(block)
        with pytest.raises(DamageError, match="not a regular file"):
            read_metadata(path)
        assert not is_intact(path, found)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_other_parts_than_expected(block: tuple[Path, FileDigest]) -> None:
    path, found = block
    swapped = [PARTS[0], PARTS[2], PARTS[1], *PARTS[3:]]
    for parts in (swapped, PARTS[:-1], [*PARTS, Part("x", "U32", (found.bytes,))]):
        with pytest.raises(DamageError, match=r"other parts|no readable header"):
            read_parts(path, found.bytes, found.xxh3, parts, buffers_for(parts))


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="buffers and parts"):
        read_parts(Path("none"), 1, "", PARTS, buffers_for(PARTS)[1:])
    assert PARTS[0].shape == (BLOCK_TOKENS,)
