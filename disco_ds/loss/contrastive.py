"""The softmax loss of CLIP, exact over the pairs of all ranks, one (b, B) block of logits a rank.

B pairs over N ranks, b on each, unit features u (images) and v (texts), scale s, S = s * u @ v.T:

    L = 1/(2B) * sum_i [ logsumexp_j S_ij - S_ii  +  logsumexp_j S_ji - S_ii ]                (CLIP, arXiv:2103.00020)
      = 1/(2B) * sum_i [ softplus(row_i - S_ii) + softplus(column_i - S_ii) ]

with row and column the log-sum-exps over the negatives alone. A rank gathers the texts and computes the block of its
own images: that yields whole rows, and partial columns that the ranks complete for each other by adding B numbers. With
G = exp(S - row') + exp(S - column') off the diagonal, row' and column' the pairs included,

    du = s/(2B) * G @ v        dv = s/(2B) * G.T @ u, summed over ranks        ds = <u, du> / s

so image gradients need no communication and text gradients one reduce-scatter. ``docs/loss.md`` has the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from disco_ds.loss.block import Block, Gradients, Made, apply_loss
from disco_ds.loss.ranks import Ranks


def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    group: dist.ProcessGroup | Ranks | None = None,
    tile: int | None = None,
    keep_logits: bool | str = "auto",
) -> Tensor:
    """The symmetric cross-entropy of CLIP over the pairs of all ranks. A collective: every rank brings b pairs.

    Gradients are exact after the engine has averaged them over ranks (DDP, FSDP, DeepSpeed); where an engine adds them,
    divide the loss by the number of ranks.

    Args:
        image_features: (b, D), normalised; float32, bfloat16, float16 or float64. A second text tower will do as well.
        text_features: (b, D), likewise; row i belongs to image row i.
        logit_scale: the factor of the cosines (not its logarithm): a number, or a tensor of one element. The same on
            all ranks.
        logit_bias: accepted for the sake of models that have one; a softmax does not see it, its gradient is zero.
        group: a process group; None is the default group, or this process alone if there is none.
        tile: columns of logits in memory at a time; None picks it by size.
        keep_logits: keep the b x B logits from the first pass to the second (inside this call) rather than compute them
            twice; "auto" does if they take at most 256 MiB.

    Returns:
        A scalar, float32 (float64 for float64 features): this rank's share, whose mean over ranks is the global loss.
        If any rank's input is not finite, every rank's loss is not finite.

    Raises:
        ValueError: on every rank, if ranks differ in pairs, width, dtype, scale or options, or features are not pairs.
        RuntimeError: in backward, if a second derivative is asked for (``create_graph=True``).
    """
    return apply_loss(
        _softmax, "contrastive_loss", image_features, text_features, logit_scale, logit_bias, group, tile, keep_logits
    )


class ContrastiveLoss(nn.Module):
    """:func:`contrastive_loss` as a module; the options are those of the function."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Ranks | None = None,
        tile: int | None = None,
        keep_logits: bool | str = "auto",
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"group": group, "tile": tile, "keep_logits": keep_logits}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        return contrastive_loss(image_features, text_features, logit_scale, logit_bias, **self.options)


def build_loss(kind: str = "one_block", **options: Any) -> nn.Module:
    """The loss that a run names, "one_block" or "sigmoid", called as ``loss(images, texts, scale, bias)``.

    Raises:
        ValueError: an unknown kind.
        TypeError: an option that the kind does not have.
    """
    from disco_ds.loss.sigmoid import SigmoidLoss

    kinds = {"one_block": ContrastiveLoss, "sigmoid": SigmoidLoss}
    if kind not in kinds:
        raise ValueError(f"unknown loss {kind!r}; there are {', '.join(map(repr, kinds))}")
    return kinds[kind](**options)


def _softmax(block: Block, _: Tensor) -> Made:
    """This rank's share of the loss, and its gradients."""
    own = slice(block.first, block.first + len(block.own))
    pair = block.pairs()
    row, column, kept = _log_sums(block)
    whole_row = torch.logaddexp(row, pair)
    # a row that is not finite makes the rank's columns so, and they the loss of every rank
    column = _over_ranks(column + (whole_row - whole_row).sum(), block.ranks)

    z_row, z_column = row - pair, column[own] - pair
    weight = 1 / (2 * len(pair))  # N/(2B): the mean over ranks is the loss
    loss = (F.softplus(z_row) + F.softplus(z_column)).sum().mul(weight).to(block.scaled.dtype)
    if not any(block.wanted):
        return loss, None, None, None, None

    row = whole_row.to(block.scaled.dtype).unsqueeze(1)
    column = torch.logaddexp(column, block.ranks.gather(pair)).to(block.scaled.dtype)
    gradients = Gradients(block)
    for columns, logits in zip(block.tiles, kept, strict=True):
        S = block.negatives(columns) if logits is None else logits
        G = torch.sub(S, row, out=block.buffer(columns)).exp_()
        gradients.add(columns, G.add_(S.sub_(column[columns]).exp_()))
    of_own, of_other, of_scale = gradients.finish(-(z_row.sigmoid() + z_column.sigmoid()), weight)
    return loss, of_own, of_other, of_scale, torch.zeros_like(loss)


def _log_sums(block: Block) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Log-sum-exps over the negatives: whole rows (b,), columns (B,) as far as this rank's rows go; and kept tiles."""
    row = block.scaled.new_full((len(block.own),), float("-inf"), dtype=torch.float64)
    column = block.scaled.new_empty(len(block.gathered), dtype=torch.float64)
    kept: list[Tensor | None] = []
    for columns in block.tiles:
        S = block.negatives(columns)
        row = torch.logaddexp(row, _logsumexp(S, 1, block.buffer(columns)))
        column[columns] = _logsumexp(S, 0, block.buffer(columns))
        kept.append(S if block.keep else None)
    return row, column, kept


def _logsumexp(S: Tensor, dim: int, buffer: Tensor) -> Tensor:
    """``S.logsumexp(dim)``, in a buffer of the shape of S."""
    top = S.amax(dim, keepdim=True).clamp_(min=torch.finfo(S.dtype).min)  # where all are -inf, so is the result
    return torch.sub(S, top, out=buffer).exp_().sum(dim).double().log_().add_(top.squeeze(dim))


def _over_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """Log-sum-exp over ranks, element by element."""
    if ranks.size == 1:
        return values
    peak = ranks.max(values.clone())
    return ranks.sum((values - peak).exp_()).log_().add_(peak)
