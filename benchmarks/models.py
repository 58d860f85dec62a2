"""The model, the text and the stores that benchmarks run on."""

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_path

from amem_cli import __version__
from amem_cli.demo.handbook import handbook
from amem_cli.engine.models.load import LoadedModel, load
from amem_cli.engine.models.registry import DEMO, find
from kvstore.commit.journal import Actor
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup, block_parts, tail_parts
from kvstore.format.layout import StoreLayout
from kvstore.format.parts import BLOCK_TOKENS
from kvstore.store import Store


def add_text(parser: ArgumentParser) -> None:
    """The option --text."""
    parser.add_argument("--text", type=Path, metavar="FILE", help="what is prefilled (default: the demo's text)")


def add_model(parser: ArgumentParser) -> None:
    """The option --model."""
    parser.add_argument("--model", default=DEMO, help=f"a model folder, a .gguf file or {DEMO} (the default)")


def open_model(name: str) -> LoadedModel:
    """Load a model by path or hub id, or the demo's by name."""
    cache = user_cache_path("amem")
    return load(find(StoreLayout(cache), name), cache)


def opening_text(model: LoadedModel, file: Path | None, tokens: int) -> str:
    """A text that makes a prompt of `tokens` tokens, or nearly. One that is too short is repeated, and that is said."""
    text = file.read_text("utf-8") if file else handbook(2 * tokens)
    encoding = model.tokenizer.encode(text, add_special_tokens=False)
    length = tokens - len(model.prompt.opening())
    if len(encoding.ids) < length:
        times = -(-length // len(encoding.ids))
        print(f"the text has {len(encoding.ids)} tokens: it is read {times} times for {tokens}")
        encoding = model.tokenizer.encode(text * times, add_special_tokens=False)
        text *= times
    return text[: encoding.offsets[length - 1][1]]


def opening_tokens(model: LoadedModel, file: Path | None, tokens: int) -> list[int]:
    """The first `tokens` token ids of a prompt."""
    ids = [*model.prompt.opening(), *model.prompt.encode(opening_text(model, file, tokens + 8))]
    return ids[:tokens]


@contextmanager
def new_store(folder: Path | None = None) -> Iterator[Store]:
    """A store in a temporary folder, which is removed at the end."""
    with TemporaryDirectory(dir=folder) as root:
        yield Store.open_or_create(Path(root, "store"), Actor.here("benchmark", __version__))


def drop_from_page_cache(store: Store) -> None:
    """Make the next reader of a store's files read the disk. Only where the system has `posix_fadvise`."""
    for path in store.layout.root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def disk_bytes(folder: Path) -> int:
    """What the files under a folder take on disk, rounded up to whole blocks of the file system."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def owed_bytes(groups: tuple[LayerGroup, ...], codec: Codec, before: int, after: int) -> int:
    """The least that a turn from `before` to `after` cached tokens has to write: full blocks, and the tail."""
    start, end = (position // BLOCK_TOKENS * BLOCK_TOKENS for position in (before, after))
    blocks = range(start, end, BLOCK_TOKENS)
    parts = [part for group in groups for at in blocks for part in block_parts(group, codec, at)[1:]]
    return sum(part.nbytes for part in (*parts, *tail_parts(groups, codec, after)))
