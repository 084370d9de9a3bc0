"""What a run's model does to a pair: its transform, its tokenizer, and how many tokens it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from disco_ds.config.schema import RunConfig

LONG = 8192
"""A context that no caption fills: what is counted is then not cut."""


@dataclass
class Preparation:
    """What a model does to a pair; picklable when transform and tokenizer are."""

    transform: Callable[[Any], Tensor]
    """RGB image to float32 (3, H, W)."""
    tokenizer: Callable[..., Tensor]
    """One of open_clip's; what it gives is padded at the end with one token id."""
    context: int
    """Tokens that a caption is cut to."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text before it is cut, with those that mark its start and end."""
        encode: Any = getattr(self.tokenizer, "encode", None)
        if encode is not None and hasattr(self.tokenizer, "sot_token_id"):
            return len(encode(text)) + 2
        row = self.tokenizer([text], context_length=LONG)[0]
        # The padding's id is that of the last place; a text that ends in it has a token of its own before.
        kept = (row != row[-1]).nonzero()
        return int(kept[-1]) + 1 if len(kept) else 0


def prepare(run: RunConfig, training: bool = True) -> Preparation:
    """The transform and the tokenizer of the run's model, as training has them; it is built without weights.

    Where the transform belongs to weights that cannot be found any more, open_clip's own is taken, with a warning.

    Raises:
        ConfigError: no such model, or its tokenizer cannot be had.
    """
    from disco_ds.model.build import build_empty
    from disco_ds.model.preprocess import build_tokenizer, build_transform, context_length, preprocessing

    model = build_empty(run.model)
    config = preprocessing(model)
    return Preparation(
        transform=build_transform(model, training=training, augment=run.data.augment),
        tokenizer=build_tokenizer(run.model),
        context=context_length(model),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
