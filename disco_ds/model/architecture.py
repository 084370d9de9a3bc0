"""Which architecture a run's options name: open_clip's own, one shipped here, a JSON, a folder's, or a hub's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
from open_clip.pretrained import download_pretrained_from_hf

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError, nearest

SHIPPED = Path(__file__).parent / "configs"
LOCAL, HUB = "local-dir:", "hf-hub:"
"""What open_clip writes before a folder or a hub's repository."""
OPEN_CLIP_CONFIG = "open_clip_config.json"
"""The file in such a folder that says which model and which preprocessing."""


def registered_name(config: ModelConfig) -> str:
    """The name under which open_clip knows the model; registers first what is not open_clip's own.

    Raises:
        ConfigError: no such model, or one that this loss cannot train.
    """
    name = _base_name(config)
    if config.image_size is None and config.context_length is None:
        return name
    content = open_clip.get_model_config(name) or {}
    if config.image_size is not None:
        content["vision_cfg"]["image_size"] = config.image_size
        name = f"{name}-{config.image_size}px"
    if config.context_length is not None:
        content["text_cfg"]["context_length"] = config.context_length
        name = f"{name}-{config.context_length}tokens"
    return _register(content, name, "model.config")


def open_clip_config(config: ModelConfig) -> dict[str, Any]:
    """The content of the model's open_clip JSON, with image_size and context_length of the run in it.

    Raises:
        ConfigError: no such model.
    """
    return open_clip.get_model_config(registered_name(config)) or {}


def _base_name(config: ModelConfig) -> str:
    """The registered name of the model at its own image size and context length."""
    if config.config is not None:
        return _register(config.config, f"{config.name}-from-config".replace("/", "-"), "model.config")
    path = SHIPPED / f"{config.name}.json"
    if config.name.endswith(".json") or path.is_file():
        path = path if path.is_file() else Path(config.name)
        return _register(_read_json(path, "model.name"), path.stem, "model.name")
    if config.name.startswith((LOCAL, HUB)):
        content = folder_config(config.name, "model.name")["model_cfg"]
        return _register(content, f"{Path(config.name).name}-from-folder".replace(":", "-"), "model.name")
    name = config.name.replace("/", "-")
    if open_clip.get_model_config(name) is None:
        known = [*open_clip.list_models(), *sorted(path.stem for path in SHIPPED.glob("*.json"))]
        raise ConfigError(f"model.name: open_clip has no model {config.name!r}.{nearest(config.name, known)}")
    return name


def _register(content: dict[str, Any], name: str, field: str) -> str:
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in content]
    if missing:
        raise ConfigError(f"{field}: an open_clip model needs embed_dim, vision_cfg and text_cfg; missing: {missing}")
    if open_clip.get_model_config(name) != content:  # adding one reads all of open_clip's files anew
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(content), encoding="utf-8")
            open_clip.add_model_config(path)
    return name


def _read_json(path: Path, field: str, expected: str = "") -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror}){expected}") from None
    except ValueError as error:
        raise ConfigError(f"{field}: {path} is not valid JSON: {error}") from None


def folder_config(named: str, field: str) -> dict[str, Any]:
    """The open_clip_config.json behind ``local-dir:`` or ``hf-hub:``: ``model_cfg`` and ``preprocess_cfg``.

    Raises:
        ConfigError: it cannot be had, or has no model_cfg; the message begins with ``field``.
    """
    if named.startswith(HUB):
        identifier = named.removeprefix(HUB)
        path = downloaded(lambda: download_pretrained_from_hf(identifier, filename=OPEN_CLIP_CONFIG), named)
    else:
        path = Path(named.removeprefix(LOCAL)).expanduser() / OPEN_CLIP_CONFIG
    content = _read_json(path, field, f"; expected a run's folder, or a folder with {OPEN_CLIP_CONFIG} and weights")
    if not isinstance(content, dict) or not isinstance(content.get("model_cfg"), dict):
        raise ConfigError(f"{field}: {path} has no model_cfg; expected what open_clip writes for its hub models")
    return content


def downloaded(download: Callable[[], str], what: str) -> Path:
    """The file that ``download`` fetches.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        return Path(download())
    except Exception as error:  # of the hub's client: several kinds, by release
        raise ConfigError(
            f"model.pretrained: {what} could not be downloaded ({str(error).splitlines()[0]}); get the file where "
            "there is a network, and name it"
        ) from error
