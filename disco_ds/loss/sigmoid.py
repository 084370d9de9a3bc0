"""The sigmoid loss of SigLIP over the pairs of all ranks, with nothing of size b x B kept.

    L = -1/B * sum_ij log sigmoid(y_ij * (s * u_i . v_j + bias)),   y_ii = 1, else -1        (arXiv:2303.15343)

A logit's share of the gradient needs no other logit, so one pass makes loss and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from disco_ds.loss.block import Block, Gradients, Made, apply_loss
from disco_ds.loss.ranks import Ranks


class SigmoidLoss(nn.Module):
    """SigLIP's loss, exact over all ranks; called like ``open_clip.loss.SigLipLoss``.

    Args:
        group: a process group; None is the default group, or this process alone if there is none.
        tile: columns of logits in memory at a time; None picks it by size.
    """

    def __init__(self, *, group: dist.ProcessGroup | Ranks | None = None, tile: int | None = None) -> None:
        super().__init__()
        self.group, self.tile = group, tile

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The scalar whose mean over ranks is the global loss, or ``{"contrastive_loss": it}`` with ``output_dict``.

        Arguments and errors are those of :func:`disco_ds.contrastive_loss`.
        """
        loss = apply_loss(
            _sigmoid, "SigmoidLoss", image_features, text_features, logit_scale, logit_bias, self.group, self.tile
        )
        return {"contrastive_loss": loss} if output_dict else loss


def _sigmoid(block: Block, bias: Tensor) -> Made:
    """This rank's share of the loss, and its gradients."""
    pair = block.pairs() + bias.double()
    loss, of_bias = F.softplus(-pair).sum(), pair.new_zeros(())
    gradients, zero = Gradients(block), block.scaled.new_zeros(())
    for columns in block.tiles:
        S = block.negatives(columns).add_(bias)
        loss += torch.logaddexp(S, zero, out=block.buffer(columns)).sum(1).sum(dtype=torch.float64)
        G = S.sigmoid_()
        of_bias += G.sum(1).sum(dtype=torch.float64)
        gradients.add(columns, G)
    weight = 1 / len(pair)  # N/B: the mean over ranks is the loss
    everyone = block.ranks.sum(loss.clone())  # a rank whose input is not finite is heard of everywhere
    loss = (loss * weight + (everyone - everyone)).to(block.scaled.dtype)
    of_pairs = -torch.sigmoid(-pair)
    return loss, *gradients.finish(of_pairs, weight), (of_bias + of_pairs.sum()) * weight
