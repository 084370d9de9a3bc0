"""Overlap: gather one tower's features while the other tower runs, wait for their gradient as late as possible.

    text_features = gather_ahead(text_tower(texts))      # the gather starts here ...
    image_features = image_tower(images)                 # ... travels while this runs ...
    loss = contrastive_loss(image_features, text_features, logit_scale)   # ... and is waited for here
    loss.backward()   # the text gradient travels while the image tower's backward runs

``gather_ahead`` returns its features through an autograd node of two outputs: the features, and a scalar ticket. The
loss that takes the ticket up sends no gradient to the features and the upstream gradient to the ticket. Autograd runs
nodes latest first, so the node's backward comes after that of the tower that ran second: there the reduced gradient is
waited for, multiplied by what came to the ticket, and handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.loss.agreement import agree
from disco_ds.loss.ranks import Pending, Ranks, ranks_of

_ATTRIBUTE = "_disco_gathered_ahead"


class LateGradient:
    """Where the loss leaves the gradient that is still on its way."""

    pending: Pending | None = None


@dataclass
class GatheredAhead:
    """A gather under way, attached to the features it is of."""

    group: Any
    gathered: Pending | None
    counts: list[int]
    ticket: Tensor | None  # None where the features need no gradient
    gradient: LateGradient
    version: int
    taken: bool = False

    def take(self) -> Tensor | None:
        """Use the gather up, and get the ticket for it."""
        self.taken = True
        return self.ticket


class _Hold(torch.autograd.Function):
    """The identity, with a ticket; its backward waits for the late gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, gradient: LateGradient) -> tuple[Tensor, Tensor]:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        ticket_dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        return features.view_as(features), features.new_zeros((), dtype=ticket_dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        direct, upstream = gradients
        if upstream is None or ctx.gradient.pending is None:
            return direct, None
        late = upstream * ctx.gradient.pending.wait()
        return late if direct is None else late.to(direct.dtype).add_(direct), None


def gather_ahead(features: Tensor, group: dist.ProcessGroup | Ranks | None = None) -> Tensor:
    """Start to gather ``features`` (b, D) from all ranks and return them, ready for :func:`contrastive_loss`.

    Hand the returned tensor itself to the loss, under the same ``group``; a tensor computed from it is an ordinary one
    and is gathered again. Every rank must call this at the same place. The first loss that is given the features uses
    the gather, further ones gather for themselves. Without process group, the features come back as they are.

    The price is memory: the gathered features live while the second tower runs forward, and the gradient of all
    B x D while it runs backward.

    Raises:
        ValueError: on every rank, if features differ between ranks in width or dtype.
    """
    ranks = ranks_of(group)
    if ranks.size == 1:
        return features
    agreement = agree("gather_ahead", ranks, features, features)
    gradient, ticket = LateGradient(), None
    if torch.is_grad_enabled() and features.requires_grad:
        held, ticket = _Hold.apply(features, gradient)
    else:
        held = features.view_as(features)
    gathered = ranks.gather(features.detach(), agreement.counts)
    ahead = GatheredAhead(group, gathered, agreement.counts, ticket, gradient, held._version)
    setattr(held, _ATTRIBUTE, ahead)
    return held


def take_ahead(features: Tensor, group: Any) -> GatheredAhead | None:
    """The gather that travels with ``features``, if it is of this group, of these values, and not used up."""
    ahead = getattr(features, _ATTRIBUTE, None)
    if ahead is None or ahead.taken or ahead.group is not group or ahead.version != features._version:
        return None
    return ahead
