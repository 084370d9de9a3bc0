"""Build the model of a run: open_clip's, by name, JSON or folder, with initial weights and checkpointing."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from disco_ds.checkpoint.saved import open_clip_state_dict as open_clip_state_dict
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError, nearest
from disco_ds.model.activations import apply_policy
from disco_ds.model.pretrained import HUB, LOCAL, Source, find_source, fitted, known_preprocess, schema_config
from disco_ds.model.towers import TwoTowers, trained_towers

MODEL_CONFIGS = Path(__file__).parent / "configs"


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
    return _register_content(content, name, "model.config")


def _base_name(config: ModelConfig) -> str:
    if config.config is not None:
        return _register_content(config.config, f"{config.name}-from-config".replace("/", "-"), "model.config")
    if config.name.endswith(".json"):
        return _register_json(Path(config.name), "model.name")
    shipped = MODEL_CONFIGS / f"{config.name}.json"
    if shipped.is_file():
        return _register_json(shipped, "model.name")
    if config.name.startswith((LOCAL, HUB)):
        content = schema_config(config.name, "model.name")["model_cfg"]
        return _register_content(content, f"{Path(config.name).name}-from-folder".replace(":", "-"), "model.name")
    if open_clip.get_model_config(config.name.replace("/", "-")) is None:
        names = [*open_clip.list_models(), *sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))]
        raise ConfigError(f"model.name: open_clip has no model {config.name!r}.{nearest(config.name, names)}")
    return config.name.replace("/", "-")


def _register_content(content: dict[str, Any], name: str, field: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(content))
        return _register_json(path, field)


def _register_json(path: Path, field: str) -> str:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{field}: {path} is not valid JSON: {error}") from None
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in content]
    if missing:
        raise ConfigError(f"{field}: an open_clip model needs embed_dim, vision_cfg and text_cfg; missing: {missing}")
    if open_clip.get_model_config(path.stem) != content:  # adding one reads all of open_clip's files anew
        open_clip.add_model_config(path)
    return path.stem


def open_clip_config(config: ModelConfig) -> dict[str, Any]:
    """The content of the model's open_clip JSON, with image_size and context_length of the run in it.

    Raises:
        ConfigError: no such model.
    """
    return open_clip.get_model_config(registered_name(config)) or {}


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
            empty = _create(config, name, device="meta")
            weights = fitted(weights, empty, source.label, bias=content.get("init_logit_bias") or 0.0)
    torch.manual_seed(seed)
    clip = _create(config, name, quiet=weights is not None, **options)
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
    name = registered_name(config)
    return TwoTowers(_create(config, name, device="meta", force_preprocess_cfg=_but_size(known_preprocess(config))))


def _but_size(preprocess: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in preprocess.items() if key != "size"}  # the size is the model's


def _create(config: ModelConfig, name: str, *, device: str = "cpu", quiet: bool = False, **options: Any) -> Any:
    """open_clip's model without weights, a timm trunk at the configuration's image size.

    Raises:
        ConfigError: open_clip refuses.
    """
    before = logging.root.level
    if quiet or device == "meta":  # open_clip warns that the model has no weights; they are on their way
        logging.root.setLevel(logging.ERROR)
    try:
        clip = open_clip.create_model(name, device=device, pretrained=None, pretrained_text=False, **options)
        size = getattr(clip.visual, "image_size", None)
        patches = getattr(getattr(clip.visual, "trunk", None), "patch_embed", None)
        if size is not None and getattr(patches, "img_size", None) not in (None, open_clip.utils.to_2tuple(size)):
            clip.visual.set_input_size(size)  # open_clip builds timm's models at the size in their name
    except Exception as error:
        raise ConfigError(
            f"model.name: open_clip could not build {config.name!r}: {type(error).__name__}: {error}"
        ) from error
    finally:
        logging.root.setLevel(before)
    return clip


def _load_big_vision(clip: Any, path: Path) -> None:
    try:
        open_clip.factory.load_checkpoint(clip, str(path))
    except Exception as error:
        raise ConfigError(
            f"model.pretrained: {path} does not fit the model ({type(error).__name__}: {error})"
        ) from error


def build_tokenizer(config: ModelConfig) -> Callable[[list[str]], Tensor]:
    """The model's tokenizer: list of n strings → (n, context) int64.

    Raises:
        ConfigError: the tokenizer's files have to come from a hub that cannot be reached.
    """
    # a folder's or a hub's model brings the tokenizer's files with it, if it needs any
    name = config.name if config.name.startswith((LOCAL, HUB)) else registered_name(config)
    try:
        return open_clip.get_tokenizer(name, context_length=config.context_length)
    except Exception as error:
        raise ConfigError(
            f"model.name: the tokenizer of {config.name!r} could not be loaded; it comes from the Hugging Face hub "
            f"(download it once with the network on, or choose a model with open_clip's own tokenizer): {error}"
        ) from error


def build_transform(model: TwoTowers, *, training: bool, augment: str = "crop") -> Callable[[Any], Tensor]:
    """PIL RGB image → float32 tensor (3, H, W), with the model's size, mean and standard deviation."""
    return image_transform_v2(PreprocessCfg(**preprocessing(model)), is_train=training and augment == "crop")


def preprocessing(model: TwoTowers) -> dict[str, Any]:
    """open_clip's preprocessing of the model's images: size, mean, std, interpolation, resize_mode, fill_color."""
    return open_clip.model.get_model_preprocess_cfg(model.clip)


def context_length(model: TwoTowers) -> int:
    """Tokens a caption is cut or padded to."""
    return int(model.clip.context_length)
