"""What becomes of a pair before it reaches the towers: the model's transform of images, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import open_clip
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.architecture import HUB, LOCAL, registered_name
from disco_ds.model.towers import TwoTowers


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
