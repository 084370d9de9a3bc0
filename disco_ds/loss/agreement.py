"""The one handshake at the start of a loss call: what every rank brings, and whether it fits together.

A collective whose sizes differ between ranks hangs or corrupts memory. So each rank first shares a few numbers, all
ranks judge the same table, and either all go on or all raise the same error. On CUDA reading the table back makes the
host wait until the towers' forward has run; the loss that follows is launched from a standing start, which costs tens
of microseconds a step. Anything that reads the loss value waits at the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disco_ds.loss.ranks import Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("mean", "sum")
KEEP = (False, True, "auto")
# The places of the words on a card. Ranks may differ in the first five, the others must be the same everywhere.
_OWN = ("image rows", "text rows", "image gradient", "text gradient", "scale gradient")
_COMMON = ("kind", "image width", "text width", "image dtype", "text dtype", "tile", "keep_logits", "grad_reduction",
           "gathered ahead")  # fmt: skip
_VALUES = ("logit_scale", "logit_bias")


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on for one call."""

    counts: list[int]  # rows of each rank
    tile: int | None
    keep_logits: bool | str
    grad_reduction: str
    image_gradient: bool  # whether any rank wants it, likewise below
    text_gradient: bool
    scale_gradient: bool
    logit_scale: float  # nan if it is not finite on some rank
    logit_bias: float

    @property
    def pairs(self) -> int:
        return sum(self.counts)

    @property
    def any_gradient(self) -> bool:
        return self.image_gradient or self.text_gradient or self.scale_gradient


def agree(
    kind: str,
    ranks: Ranks,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float = 1.0,
    logit_bias: Tensor | float | None = None,
    *,
    tile: int | None = None,
    keep_logits: bool | str = False,
    grad_reduction: str = "mean",
    gathered_ahead: int = 0,
) -> Agreement:
    """Share this rank's side of a call and return what all agree on.

    Raises:
        ValueError: on every rank and in the same words, if the call is wrong on any rank or differs between ranks.
    """
    device = image_features.device
    grad = torch.is_grad_enabled()
    words: list[float] = [
        _rows(image_features), _rows(text_features),
        grad and image_features.requires_grad, grad and text_features.requires_grad,
        grad and any(isinstance(x, Tensor) and x.requires_grad for x in (logit_scale, logit_bias)),
        _KINDS.index(kind), _width(image_features), _width(text_features),
        _place(DTYPES, image_features.dtype), _place(DTYPES, text_features.dtype),
        0 if tile is None else tile if isinstance(tile, int) and tile > 0 else -1,
        _place(KEEP, keep_logits), _place(REDUCTIONS, grad_reduction), gathered_ahead,
    ]  # fmt: skip
    values = [_scalar(x, device) for x in (logit_scale, 0.0 if logit_bias is None else logit_bias)]
    card = torch.cat([torch.tensor(words, dtype=torch.float64, device=device), *values])
    table = ranks.share(card).tolist()
    _check(table)
    first = table[0]
    wants = [any(card[i] for card in table) for i in (2, 3, 4)]
    scale, bias = (_common_value(name, [card[len(words) + i] for card in table]) for i, name in enumerate(_VALUES))
    return Agreement(
        counts=[int(card[0]) for card in table],
        tile=int(first[10]) or None, keep_logits=KEEP[int(first[11])], grad_reduction=REDUCTIONS[int(first[12])],
        image_gradient=wants[0], text_gradient=wants[1], scale_gradient=wants[2],
        logit_scale=scale, logit_bias=bias,
    )  # fmt: skip


_KINDS = ("contrastive_loss", "SigmoidLoss", "OriginalClipLoss", "DiscoLoss", "gather_ahead")


def _check(table: list[list[float]]) -> None:
    """Raise if any card is wrong in itself or differs from the first where it must not."""
    kind = _KINDS[int(table[0][len(_OWN)])]  # in the words of rank 0, so that all say the same
    for rank, card in enumerate(table):
        fault = _fault(card)
        if fault:
            raise ValueError(f"{kind}: on rank {rank} of {len(table)}, {fault}")
    common = slice(len(_OWN), len(_OWN) + len(_COMMON))
    for rank, card in enumerate(table):
        if card[common] != table[0][common]:
            differing = [
                f"{name} ({_word(name, table[0][i])} on rank 0, {_word(name, card[i])} on rank {rank})"
                for i, name in enumerate(_COMMON, start=len(_OWN))
                if card[i] != table[0][i]
            ]
            raise ValueError(
                f"{kind}: all ranks must call the loss alike, but ranks 0 and {rank} of {len(table)} differ in "
                + ", ".join(differing)
            )
    if not any(card[0] for card in table):
        raise ValueError(f"{kind}: the global batch is empty: none of {len(table)} ranks has a pair")


def _fault(card: list[float]) -> str | None:
    named = dict(zip(_OWN + _COMMON, card, strict=False))
    for tower in ("image", "text"):
        if named[f"{tower} rows"] < 0:
            return f"{tower}_features must have two dimensions, (pairs, width)"
        if named[f"{tower} dtype"] < 0:
            return f"{tower}_features must be float32, bfloat16, float16 or float64"
    for what in ("rows", "width", "dtype"):
        one, two = named[f"image {what}"], named[f"text {what}"]
        if one != two:
            return f"the features differ in {what}: {_word(what, one)} of images, {_word(what, two)} of texts"
    if named["tile"] < 0:
        return "tile must be None or a positive number of columns"
    if named["keep_logits"] < 0:
        return 'keep_logits must be True, False or "auto"'
    if named["grad_reduction"] < 0:
        return 'grad_reduction must be "mean" (the engine averages gradients over ranks) or "sum" (it adds them)'
    return None


def _common_value(name: str, values: list[float]) -> float:
    """The value all ranks use: rank 0's. A rank that is not finite makes it nan: that is a state to report in the loss,
    not a call to refuse. The last bits may differ between ranks, as kernels do."""
    if not all(map(math.isfinite, values)):
        return math.nan
    for rank, value in enumerate(values):
        if not math.isclose(value, values[0], rel_tol=1e-5, abs_tol=1e-30):
            raise ValueError(
                f"{name} must be the same on all ranks, but is {values[0]} on rank 0, {value} on rank {rank}"
            )
    return values[0]


def _rows(features: Tensor) -> int:
    return features.shape[0] if features.ndim == 2 else -1


def _width(features: Tensor) -> int:
    return features.shape[1] if features.ndim == 2 else -1


def _place(options: tuple, value: Any) -> int:
    """Where ``value`` stands among ``options``, 1 and True told apart; -1 if nowhere."""
    return next((i for i, option in enumerate(options) if type(option) is type(value) and option == value), -1)


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """A Python number or a tensor of one element as (1,) float64 on ``device``."""
    if isinstance(value, Tensor):
        return value.detach().reshape(1).to(device=device, dtype=torch.float64)
    return torch.tensor([float(value)], dtype=torch.float64, device=device)


def _word(name: str, value: float) -> str:
    place = int(value)
    if "dtype" in name:
        return str(DTYPES[place]).removeprefix("torch.")
    if name == "keep_logits":
        return repr(KEEP[place])
    if name == "grad_reduction":
        return repr(REDUCTIONS[place])
    if name == "kind":
        return _KINDS[place]
    if name == "tile":
        return str(place or None)
    if name == "gathered ahead":
        return ("no tower", "the text tower", "the image tower")[place]
    return str(place)
