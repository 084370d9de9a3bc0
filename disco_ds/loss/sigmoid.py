"""The sigmoid loss of SigLIP over the pairs of all ranks, with nothing of size b x B kept.

    L = -1/B * sum_ij log sigmoid(y_ij * (s * u_i . v_j + bias)),   y_ii = 1, else -1        (arXiv:2303.15343)

A logit's share of the gradient needs no other logit, so one pass makes loss and gradients: each tile is computed,
summed, turned into its gradient, multiplied twice, and forgotten. As in ``loss.py`` one tower is gathered and its
gradient reduce-scattered; the positives stay out of the tiles and are taken in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.loss.autograd import Call, LossAndGradients, apply_loss
from disco_ds.loss.memory import default_tile
from disco_ds.loss.products import GradientProducts
from disco_ds.loss.ranks import Ranks
from disco_ds.loss.tiles import LogitTiles, exact_matmuls, row_dots


class SigmoidLoss(nn.Module):
    """SigLIP's loss, exact over all ranks; called like ``open_clip.loss.SigLipLoss``.

    Args:
        group: a process group; None is the default group, or this process alone if there is none.
        tile: columns of logits in memory at a time; None picks it by size.
        grad_reduction: "mean" if the engine averages gradients over ranks, "sum" if it adds them.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Ranks | None = None,
        tile: int | None = None,
        grad_reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.group = group
        self.tile = tile
        self.grad_reduction = grad_reduction

    @torch.compiler.disable
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The scalar whose mean over ranks is the global loss, or ``{"contrastive_loss": it}`` with ``output_dict``.

        Features are (b, D), normalised, of any float dtype; b may differ between ranks and be zero.

        Raises:
            ValueError: on every rank, if ranks differ in width, dtype, scale, bias or options.
            RuntimeError: in backward, if a second derivative is asked for.
        """
        loss = apply_loss(
            _loss_and_gradients, "SigmoidLoss", image_features, text_features, logit_scale, logit_bias, self.group,
            tile=self.tile, grad_reduction=self.grad_reduction,
        )  # fmt: skip
        return {"contrastive_loss": loss} if output_dict else loss


def _loss_and_gradients(own: Tensor, other: Tensor, call: Call) -> LossAndGradients:
    """This rank's share of the loss, and its gradients as far as any rank wants them."""
    ranks, agreement = call.ranks, call.agreement
    counts, B, s, bias = agreement.counts, agreement.pairs, agreement.logit_scale, agreement.logit_bias
    gathered = call.gather(other)
    positive = row_dots(own, other).mul_(s).add_(bias)
    columns = agreement.tile or default_tile(max(counts), B, own.device.type)
    tiles = LogitTiles(own, gathered.wait(), s, call.offset, columns, level=-bias)
    weight = call.weight / B
    need_H = call.own_gradient or agreement.scale_gradient
    products = GradientProducts(tiles, need_H, call.other_gradient, alpha=s * weight)
    loss, bias_gradient = _one_pass(tiles, products)

    loss += torch.logaddexp(-positive, positive.new_zeros(())).sum()
    # One number a rank, so that a rank whose input is not finite is heard of everywhere.
    everyone = ranks.share(loss.unsqueeze(0))
    made = LossAndGradients((loss * (ranks.size / B) + (everyone - everyone).sum()).to(tiles.dtype))
    at_positive = -positive.neg().sigmoid_()  # gradient of the positive logits
    made.bias = (bias_gradient + at_positive.sum()) * weight
    products.add_positives(other, at_positive)
    if products.H is not None:
        made.scale = products.finish_H(balanced=False) * weight
        made.own = products.H.mul_(s * weight) if call.own_gradient else None
    W = products.W
    if W is not None:
        del tiles, gathered, products  # the reduce-scatter needs the room
        made.other = ranks.reduce_scatter(W, counts)
    return made


def _one_pass(tiles: LogitTiles, products: GradientProducts) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all negatives and of their gradients, float64; the products get the gradients."""
    room, scratch = tiles.new_room(), tiles.new_room()
    loss = tiles.other.new_zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(loss)
    zero = loss.new_zeros((), dtype=tiles.dtype)
    with exact_matmuls():
        for tile in tiles:
            S = tiles.logits(tile, room)
            softplus = torch.logaddexp(S, zero, out=tiles.view(scratch, tile))
            loss += softplus.sum(1).sum(dtype=torch.float64)
            G = S.sigmoid_()
            gradient += G.sum(1).sum(dtype=torch.float64)
            products.add(tile, G)
    return loss, gradient
