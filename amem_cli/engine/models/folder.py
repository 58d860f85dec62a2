"""The files of a model folder: weights, config, tokenizer settings and chat template. No MLX."""

import json
from pathlib import Path
from typing import Any

from kvstore.errors import ModelMismatchError, NotFoundError


def weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm loads as weights, sorted by name. Raises NotFoundError if there are none."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise NotFoundError(f"no weights in {folder}", "a model folder holds model.safetensors, or model-*.safetensors")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises as `read_config_file`, and NotFoundError without that file."""
    if not (folder / "config.json").is_file():
        raise NotFoundError(f"no config.json in {folder}", "give a folder that holds an MLX or Hugging Face model")
    return read_config_file(folder / "config.json")


def read_config_file(path: Path) -> dict[str, Any]:
    """A model's config. Raises ModelMismatchError unless it is a JSON object in which what amem reads has its type."""
    config = read_json_object(path)
    ids = config.get("eos_token_id")
    if not isinstance(config.get("text_config"), dict | None):
        raise _wrong_type(path, "text_config")
    if not all(type(id_) is int for id_ in (ids if isinstance(ids, list) else [ids])) and ids is not None:
        raise _wrong_type(path, "eos_token_id")
    return config


def _wrong_type(path: Path, key: str) -> ModelMismatchError:
    return ModelMismatchError(f"{path} holds a {key} of a wrong type", "fetch or convert the model again")


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, or an empty one. Raises ModelMismatchError."""
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.is_file() else {}


def chat_template(folder: Path) -> str | None:
    """The text of the default chat template: of its own file, else of the settings. Raises ModelMismatchError."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return _read_text(own)
    in_json = folder / "chat_template.json"
    settings = read_json_object(in_json) if in_json.is_file() else tokenizer_settings(folder)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise _wrong_type(folder, "chat_template")
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelMismatchError(f"{path} cannot be read as text", "fetch or convert the model again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ModelMismatchError, for a file that cannot be read, too."""
    try:
        values = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelMismatchError(f"{path} is not JSON", "fetch or convert the model again") from error
    if not isinstance(values, dict):
        raise ModelMismatchError(f"{path} does not hold a JSON object", "fetch or convert the model again")
    return values
