"""``model.pretrained``: where initial weights come from, and whether they fit the model, before it is built.

A source is an open_clip tag, a weights file, a folder that open_clip loads as ``local-dir:``, a hub's repository, or
what this project has saved. Weights are compared with the model on the meta device, so what does not fit is told
before any memory is filled. Positional embeddings of another image size or context length are interpolated, as
open_clip does it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.factory import _find_checkpoint_in_dir, load_state_dict
from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed
from open_clip.pretrained import download_pretrained, download_pretrained_from_hf, get_pretrained_cfg
from safetensors import safe_open
from torch import Tensor

from disco_ds.checkpoint.folder import find_all
from disco_ds.checkpoint.saved import SavedModel, find_saved
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import CheckpointError, ConfigError
from disco_ds.model.architecture import HUB, LOCAL, OPEN_CLIP_CONFIG, downloaded, folder_config

log = logging.getLogger("disco_ds")

DESCRIPTION = "disco_ds"
"""Under this name an exported file says which model it holds, see :func:`describe_file`."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Source:
    """Initial weights that have been found and not yet been read."""

    label: str
    """What messages call it."""
    read: Callable[[], Weights | Path]
    """Reads them: a state dict, or the path of big_vision's .npz, which open_clip reads into a model itself."""
    preprocess: dict[str, Any] = field(default_factory=dict)
    """open_clip's preprocessing that belongs to them (mean, std, interpolation, …), as far as it is known."""


def find_source(config: ModelConfig) -> Source | None:
    """What ``model.pretrained`` names, or the weights of a ``local-dir:`` or ``hf-hub:`` model; None: random weights.

    Raises:
        ConfigError: it names nothing; the message lists what could be meant.
        CheckpointError: a run's folder without a checkpoint that verifies.
    """
    if config.pretrained is None:
        return _from_folder(config.name, "model.name") if config.name.startswith((LOCAL, HUB)) else None
    named = config.pretrained
    if named.startswith((LOCAL, HUB)):
        return _from_folder(named, "model.pretrained")
    name = config.name.replace("/", "-")
    tag = get_pretrained_cfg(name, named) if config.config is None else {}
    if tag:
        label = f"{named} of {name}"
        if tag.get("quick_gelu", False) != (open_clip.get_model_config(name) or {}).get("quick_gelu", False):
            log.warning(
                "model.pretrained: %s was trained with quick_gelu %s, %s has the other activation; the -quickgelu twin "
                "of the model is what fits", label, tag.get("quick_gelu", False), name,
            )  # fmt: skip
        return Source(label, lambda: _read_file(downloaded(lambda: download_pretrained(tag), label)), tag)
    path = Path(named).expanduser()
    if find_all(path):
        return source_of_run(find_saved(path))
    if path.is_dir():
        return _from_folder(f"{LOCAL}{path}", "model.pretrained")
    if path.is_file():
        return Source(str(path), lambda: _read_file(path), describe_file(path).get("preprocess_cfg", {}))
    tags = open_clip.list_pretrained_tags_by_model(name) if config.config is None else []
    known = f"open_clip's tags for {name} are {', '.join(tags)}" if tags else f"open_clip has no weights for {name}"
    raise ConfigError(
        f"model.pretrained: {named!r} is no file, no folder and no tag ({known}); give a .pt or .safetensors file, a "
        f"folder with {OPEN_CLIP_CONFIG}, or the folder of a run"
    )


def source_of_run(saved: SavedModel) -> Source:
    """The weights of a run's checkpoint, with the preprocessing that the run had."""
    return Source(str(saved.path), saved.weights, known_preprocess(saved.model))


def known_preprocess(config: ModelConfig) -> dict[str, Any]:
    """The preprocessing that belongs to a model, though its initial weights may have gone since: {} if unknown."""
    where, named = ("model.pretrained", config.pretrained) if config.pretrained else ("model.name", config.name)
    try:
        if named.startswith((LOCAL, HUB)):  # the description beside the weights is enough
            return folder_config(named, where).get("preprocess_cfg", {})
        source = find_source(config)
    except (ConfigError, CheckpointError) as error:
        log.warning("the preprocessing of %s is not known, open_clip's own is assumed: %s", named, error)
        return {}
    return source.preprocess if source is not None else {}


def _from_folder(named: str, where: str) -> Source:
    """A ``local-dir:`` folder or a ``hf-hub:`` repository, as open_clip loads them."""
    preprocess = folder_config(named, where).get("preprocess_cfg", {})
    if named.startswith(HUB):
        download = functools.partial(download_pretrained_from_hf, named.removeprefix(HUB))
        return Source(named, lambda: _read_file(downloaded(download, named)), preprocess)
    folder = Path(named.removeprefix(LOCAL)).expanduser()
    path = _find_checkpoint_in_dir(folder)
    if path is None:
        raise ConfigError(f"{where}: {folder} holds no weights (*.safetensors, *.bin, *.pth) beside {OPEN_CLIP_CONFIG}")
    return Source(path, lambda: _read_file(Path(path)), preprocess)


def describe_file(path: Path) -> dict[str, Any]:
    """What an exported file says of itself: ``model_cfg``, ``preprocess_cfg`` and more; {} for other files."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                return json.loads((opened.metadata() or {}).get(DESCRIPTION, "{}"))
        # state dicts carry attributes (torch keeps its _metadata so), and weights_only reads them
        return json.loads(
            getattr(torch.load(path, map_location="cpu", mmap=True, weights_only=True), DESCRIPTION, "{}")
        )
    except Exception:  # not readable: whoever reads the weights next says so
        return {}


def _read_file(path: Path) -> Weights | Path:
    if path.suffix in (".npz", ".npy"):
        return path
    try:
        state = load_state_dict(str(path), device="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"model.pretrained: {path} cannot be read as weights ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    if not isinstance(state, dict) or not all(torch.is_tensor(value) for value in state.values()):
        raise ConfigError(f"model.pretrained: {path} holds no state dict (names to tensors)")
    return dict(state)


def fitted(state: Weights, model: Any, label: str, *, bias: float = 0.0) -> Weights:
    """The weights under this model's names and with its shapes, ready for a strict ``load_state_dict``.

    Args:
        state: from a :class:`Source`.
        model: an open_clip model, on the meta device or any other.
        label: what messages call the weights.
        bias: logit_bias of a model that has one, where the weights have none (CLIP's for SigLIP).

    Raises:
        ConfigError: names are missing or too many, or shapes differ; the message names the first of each.
    """
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    state = convert_state_dict(model, state)
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    expected = model.state_dict()
    for name in ("logit_scale", "logit_bias"):  # saved as (1,) by some trainers
        if name in state and name in expected and state[name].numel() == 1:
            state[name] = state[name].reshape(expected[name].shape)
    if "logit_bias" in expected and "logit_bias" not in state:
        state["logit_bias"] = torch.full_like(expected["logit_bias"], bias, device="cpu")
    position_ids = "text.transformer.embeddings.position_ids"  # no buffer any more since transformers 4.31
    if position_ids not in expected:
        state.pop(position_ids, None)
    with contextlib.suppress(AssertionError, RuntimeError, AttributeError):  # the shapes below say what is wrong
        resize_pos_embed(state, model)
        resize_text_pos_embed(state, model)
        _resize_trunk(state, model)
    _compare(state, expected, label)
    return state


def _resize_trunk(state: Weights, model: Any) -> None:
    """A timm ViT's absolute positional embedding, as timm itself resamples it; open_clip knows its own ViTs only."""
    name = "visual.trunk.pos_embed"
    trunk = getattr(model.visual, "trunk", None)
    if name not in state or trunk is None or state[name].shape == trunk.pos_embed.shape:
        return
    from timm.layers import resample_abs_pos_embed

    prefix = 0 if getattr(trunk, "no_embed_class", False) else trunk.num_prefix_tokens
    state[name] = resample_abs_pos_embed(state[name], list(trunk.patch_embed.grid_size), num_prefix_tokens=prefix)


def _compare(state: Weights, expected: Weights, label: str) -> None:
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    other = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    parts = []
    if other:
        there, here = tuple(state[other[0]].shape), tuple(expected[other[0]].shape)
        parts.append(f"{len(other)} have other shapes, the first is {other[0]}: {there} there, {here} in the model")
    if missing:
        parts.append(f"{len(missing)} of the model's {len(expected)} are missing, {missing[0]} first")
    if unknown:
        parts.append(f"{len(unknown)} are none of the model's, {unknown[0]} first")
    if parts:
        raise ConfigError(
            f"model.pretrained: the weights in {label} do not fit the model: {'; '.join(parts)}. Give the model that "
            "they were trained as (model.name, or model.config)"
        )
