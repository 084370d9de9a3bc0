"""The model of a run, with initial weights and activation checkpointing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import open_clip
import torch

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.activations import apply_policy
from disco_ds.model.architecture import open_clip_config, registered_name
from disco_ds.model.pretrained import Source, find_source, fitted, known_preprocess
from disco_ds.model.towers import TwoTowers, trained_towers


def build_model(
    config: ModelConfig, seed: int, *, deepspeed_checkpointing: bool = False, source: Source | None = None
) -> TwoTowers:
    """The model of a run on the CPU in fp32, with the same initial weights on every rank.

    Args:
        deepspeed_checkpointing: recompute blocks through DeepSpeed's activation_checkpointing, not torch's.
        source: initial weights in place of ``config.pretrained``.

    Raises:
        ConfigError: unknown or unsuitable model, a config that open_clip refuses, weights that cannot be had or do not
            fit; weights are compared before the model is built.
        CheckpointError: ``config.pretrained`` is a run's folder without a checkpoint that verifies.
    """
    name, content = registered_name(config), open_clip_config(config)
    if "multimodal_cfg" in content:
        raise ConfigError(f"model.name: {config.name} is a CoCa model; its captioning loss is not part of this project")
    options: dict[str, Any] = {}
    if config.patch_dropout is not None:
        if "timm_model_name" in content.get("vision_cfg", {}):
            raise ConfigError("model.patch_dropout: only open_clip's own ViTs drop patches, this image tower is timm's")
        options["force_patch_dropout"] = config.patch_dropout
    source = source or find_source(config)
    weights: Any = None
    if source is not None:
        options["force_preprocess_cfg"] = _but_size(source.preprocess)
        weights = source.read()
        if not isinstance(weights, Path):
            bias = content.get("init_logit_bias") or 0.0
            weights = fitted(weights, create_clip(name, device="meta"), source.label, bias=bias)
    torch.manual_seed(seed)
    clip = create_clip(name, quiet=weights is not None, **options)
    if isinstance(weights, Path):
        _load_big_vision(clip, weights)
    elif weights is not None:
        clip.load_state_dict(weights)
    model = TwoTowers(clip, config.freeze)
    apply_policy(trained_towers(model), config.checkpointing, by_deepspeed=deepspeed_checkpointing)
    return model


def build_empty(config: ModelConfig) -> TwoTowers:
    """The model of a run without weights, on the meta device: with the preprocessing that :func:`build_model` gives it.

    No weights are read or downloaded. Where the preprocessing belongs to weights that cannot be found, open_clip's own
    is assumed, with a warning.

    Raises:
        ConfigError: unknown model, or a config that open_clip refuses.
    """
    name, preprocess = registered_name(config), _but_size(known_preprocess(config))
    return TwoTowers(create_clip(name, device="meta", force_preprocess_cfg=preprocess))


def _but_size(preprocess: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in preprocess.items() if key != "size"}  # the size is the model's


def create_clip(
    name: str, *, device: str = "cpu", quiet: bool = False, resize_trunk: bool = True, **options: Any
) -> Any:
    """open_clip's model of a registered name, without weights.

    Args:
        device: "meta" for names and shapes alone.
        quiet: open_clip does not warn that the model has no weights; never on the meta device.
        resize_trunk: a timm trunk gets the configuration's image size; open_clip's own has the size in timm's name.
        options: further ones of ``open_clip.create_model``.

    Raises:
        ConfigError: open_clip refuses.
    """
    before = logging.root.level
    if quiet or device == "meta":
        logging.root.setLevel(logging.ERROR)
    try:
        clip = open_clip.create_model(name, device=device, pretrained=None, pretrained_text=False, **options)
        size = getattr(clip.visual, "image_size", None)
        patches = getattr(getattr(clip.visual, "trunk", None), "patch_embed", None)
        other_size = getattr(patches, "img_size", None) not in (None, open_clip.utils.to_2tuple(size))
        if resize_trunk and size is not None and other_size:
            clip.visual.set_input_size(size)
        return clip
    except Exception as error:
        raise ConfigError(f"model.name: open_clip could not build {name!r}: {type(error).__name__}: {error}") from error
    finally:
        logging.root.setLevel(before)


def _load_big_vision(clip: Any, path: Path) -> None:
    try:
        open_clip.factory.load_checkpoint(clip, str(path))
    except Exception as error:
        words = f"model.pretrained: {path} does not fit the model ({type(error).__name__}: {error})"
        raise ConfigError(words) from error
