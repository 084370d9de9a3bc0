"""The distributed contrastive loss: exact over all pairs of all ranks, one block of logits a rank.

B pairs over N ranks, b on this one, unit features u (images) and v (texts), scale s, S = s * u @ v.T:

    L = 1/(2B) * sum_i [ logsumexp_j S_ij - S_ii  +  logsumexp_j S_ji - S_ii ]                (CLIP, arXiv:2103.00020)

The rows of S belong to images, the columns to texts. A rank gathers the texts and computes the b x B block of its own
images, never the other one: that block yields whole row sums, and partial column sums that the ranks complete for each
other by exchanging B numbers. From both, the block's share of every gradient follows, with G = dL/dS * 2B off the
diagonal:

    G = exp(S - row) + exp(S - column),   du = s/(2B) * G @ v,   dv = s/(2B) * G.T @ u summed over ranks

so image gradients need no communication and text gradients one reduce-scatter. The upstream gradient of a loss is one
number, the same on every rank; the gradients are therefore made in forward, tile by tile, and backward only multiplies:
nothing of size b x B lives on.

With the loss of a row written as softplus(z), z = logsumexp over the negatives - positive, the positives never enter a
tile. They are taken in float64, together with everything of size b or B; that keeps the gradient right near
convergence, where the positive dwarfs the rest.

Read on: ``loss_tiles.py`` (the block), ``loss_collectives.py`` and ``loss_agreement.py`` (the ranks), ``loss_ahead.py``
(overlap), ``loss_memory.py`` (tile sizes and bytes). ``docs/loss.md`` has the algebra and the measurements.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.loss.ahead import gather_ahead
from disco_ds.loss.autograd import Call, LossAndGradients, apply_loss
from disco_ds.loss.memory import default_tile, keeps_logits, loss_bytes
from disco_ds.loss.passes import first_pass, second_pass
from disco_ds.loss.products import GradientProducts
from disco_ds.loss.ranks import Ranks
from disco_ds.loss.tiles import LogitTiles, exact_matmuls, row_dots

__all__ = ["ContrastiveLoss", "build_loss", "contrastive_loss", "gather_ahead", "loss_bytes"]


@torch.compiler.disable
def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    group: dist.ProcessGroup | Ranks | None = None,
    tile: int | None = None,
    keep_logits: bool | str = "auto",
    grad_reduction: str = "mean",
) -> Tensor:
    """The symmetric cross-entropy of CLIP over the pairs of all ranks.

    Every rank of ``group`` calls this with its own pairs. Ranks may bring different numbers of pairs, none included.

    Args:
        image_features: (b, D), normalised; float32, bfloat16, float16 or float64. A second text tower will do as well.
        text_features: (b, D), likewise; row i belongs to image row i.
        logit_scale: the factor of the cosines (not its logarithm): a number, or a tensor of one element. The same on
            all ranks.
        logit_bias: accepted for the sake of models that have one; a softmax does not see it, its gradient is zero.
        group: a process group; None is the default group, or this process alone if there is none.
        tile: columns of logits in memory at a time; None picks it by size (``loss_memory.default_tile``).
        keep_logits: keep the b x B logits from the first pass to the second (inside this call) rather than compute them
            twice; "auto" does if they take at most 256 MiB.
        grad_reduction: what the engine does with the ranks' parameter gradients, so that its result is the gradient of
            the global loss: "mean" for DDP, FSDP and DeepSpeed, "sum" for engines that add.

    Returns:
        A scalar, float32 (float64 for float64 features): this rank's share, whose mean over ranks is the global loss.
        If any rank's input is not finite, every rank's loss is not finite.

    Raises:
        ValueError: on every rank, if ranks differ in width, dtype, scale or options, or if features are not pairs.
        RuntimeError: in backward, if a second derivative is asked for (``create_graph=True``).
    """
    return apply_loss(
        _loss_and_gradients, "contrastive_loss", image_features, text_features, logit_scale, logit_bias, group,
        tile=tile, keep_logits=keep_logits, grad_reduction=grad_reduction,
    )  # fmt: skip


class ContrastiveLoss(nn.Module):
    """:func:`contrastive_loss` as a module; the options are those of the function."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Ranks | None = None,
        tile: int | None = None,
        keep_logits: bool | str = "auto",
        grad_reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.group = group
        self.tile = tile
        self.keep_logits = keep_logits
        self.grad_reduction = grad_reduction

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        return contrastive_loss(
            image_features, text_features, logit_scale, logit_bias,
            group=self.group, tile=self.tile, keep_logits=self.keep_logits, grad_reduction=self.grad_reduction,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"tile={self.tile}, keep_logits={self.keep_logits!r}, grad_reduction={self.grad_reduction!r}"


def build_loss(kind: str = "one_block", **options: Any) -> nn.Module:
    """The loss a run names: "one_block", or for comparison "disco", "clip" or "sigmoid".

    All are called as ``loss(image_features, text_features, logit_scale, logit_bias=None)``, return a scalar whose mean
    over ranks is the global loss, and leave exact gradients after the engine's reduction. Options: ``group`` and
    ``grad_reduction`` for all, ``tile`` for the two that work in tiles, ``keep_logits`` for "one_block".

    Raises:
        ValueError: an unknown kind.
        TypeError: an option that the kind does not have.
    """
    from disco_ds.loss.peers import DiscoLoss, OriginalClipLoss
    from disco_ds.loss.sigmoid import SigmoidLoss

    kinds = {"one_block": ContrastiveLoss, "disco": DiscoLoss, "clip": OriginalClipLoss, "sigmoid": SigmoidLoss}
    if kind not in kinds:
        raise ValueError(f"unknown loss {kind!r}; there are {', '.join(map(repr, kinds))}")
    return kinds[kind](**options)


def _loss_and_gradients(own: Tensor, other: Tensor, call: Call) -> LossAndGradients:
    """This rank's share of the loss, and its gradients as far as any rank wants them."""
    ranks, agreement = call.ranks, call.agreement
    counts, B, most = agreement.counts, agreement.pairs, max(agreement.counts)
    s = agreement.logit_scale + 0.0 * agreement.logit_bias  # a bias has no part in this, unless it is not a number
    gathered = call.gather(other)
    positive = row_dots(own, other).mul_(s)
    columns = agreement.tile or default_tile(most, B, own.device.type)
    tiles = LogitTiles(own, gathered.wait(), s, call.offset, columns)
    keep = keeps_logits(most, B, tiles.dtype.itemsize) if agreement.keep_logits == "auto" else agreement.keep_logits

    with exact_matmuls():
        # 1. Over the negatives: log-sum-exps of whole rows, and of columns as far as this rank's rows go.
        sums = first_pass(tiles, keep=bool(keep) and agreement.any_gradient)
        # 2. Each rank completes its own columns and tells all. A row that is not finite makes its rank's columns so,
        #    and they the loss of every rank.
        own_row, own_column = sums.rows + tiles.level, ranks.transpose(sums.columns + tiles.level, counts).logsumexp(0)
        row = torch.logaddexp(own_row, positive)
        column = ranks.gather(torch.logaddexp(own_column, positive) + (row - row).sum(), counts).wait()
        # 3. The loss: softplus(z) for each row and column.
        z_row, z_column = own_row - positive, own_column - positive
        zero = positive.new_zeros(())
        softplus = torch.logaddexp(z_row, zero) + torch.logaddexp(z_column, zero)  # F.softplus is inexact past 20
        loss = softplus.sum() * (ranks.size / (2 * B)) + (column - column).sum()
        made = LossAndGradients(loss.to(tiles.dtype), bias=zero)
        if not agreement.any_gradient:
            return made
        # 4. The gradient of the logits, of negatives tile by tile, of positives row by row, multiplied as it comes.
        weight = call.weight / (2 * B)
        need_H = call.own_gradient or agreement.scale_gradient
        products = GradientProducts(tiles, need_H, call.other_gradient, alpha=s * weight)
        second_pass(tiles, sums, row - tiles.level, column - tiles.level, products)
        products.add_positives(other, -(z_row.sigmoid() + z_column.sigmoid()))
    if products.H is not None:
        made.scale = products.finish_H(balanced=True) * weight
        made.own = products.H.mul_(s * weight) if call.own_gradient else None
    W = products.W
    if W is not None:
        del tiles, sums, gathered, products  # the reduce-scatter needs the room
        made.other = ranks.reduce_scatter(W, counts)
    return made
