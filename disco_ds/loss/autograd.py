"""From features to a loss that autograd knows, for losses that make their gradients in forward.

The upstream gradient of a loss is one number: with loss scaling and accumulation a factor, but the same for every
element. So a loss is computed together with its gradients, and backward multiplies. What is alive in between is the
size of the features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disco_ds.loss.agreement import Agreement, agree
from disco_ds.loss.ahead import GatheredAhead, take_ahead
from disco_ds.loss.ranks import Pending, Ranks, ranks_of


@dataclass
class Call:
    """One call of a loss: who takes part, what they agreed on, and what is wanted of this rank."""

    ranks: Ranks
    agreement: Agreement
    ahead: GatheredAhead | None
    swapped: bool  # whether the images are the gathered tower

    @property
    def offset(self) -> int:
        """The global index of this rank's first pair."""
        return sum(self.agreement.counts[: self.ranks.rank])

    @property
    def weight(self) -> float:
        """What a sum over ranks has to be multiplied by, so that the engine's reduction ends at the sum."""
        return float(self.ranks.size) if self.agreement.grad_reduction == "mean" else 1.0

    @property
    def own_gradient(self) -> bool:
        return self.agreement.text_gradient if self.swapped else self.agreement.image_gradient

    @property
    def other_gradient(self) -> bool:
        return self.agreement.image_gradient if self.swapped else self.agreement.text_gradient

    def gather(self, other: Tensor) -> Pending:
        """The gathered tower, on its way: under way since ``gather_ahead``, or from now on."""
        if self.ahead is None or self.ahead.gathered is None:
            return self.ranks.gather(other, self.agreement.counts)
        gathered, self.ahead.gathered = self.ahead.gathered, None  # lets the loss be the last to hold it
        return gathered


@dataclass
class LossAndGradients:
    """What a loss makes in forward; gradients that nobody wants are None."""

    loss: Tensor
    own: Tensor | None = None
    other: Pending | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


Maker = Callable[[Tensor, Tensor, Call], LossAndGradients]


def apply_loss(
    make: Maker,
    kind: str,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    group: Any,
    **options: Any,
) -> Tensor:
    """Agree on the call with all ranks, let ``make`` compute, and return the loss as a node of the autograd graph.

    Both losses are symmetric in the towers: one stays on its rank, the other is gathered. The gathered one is the one
    whose gather is under way, else a frozen one, which needs no reduce-scatter of gradients, else the texts.
    """
    ranks = ranks_of(group)
    ahead = take_ahead(text_features, group)
    swapped = False
    if ahead is None:
        ahead = take_ahead(image_features, group)
        swapped = ahead is not None
    under_way = 0 if ahead is None else 2 if swapped else 1
    agreement = agree(
        kind, ranks, image_features, text_features, logit_scale, logit_bias, gathered_ahead=under_way, **options
    )
    if ahead is None:
        swapped = agreement.text_gradient and not agreement.image_gradient
    own, other = (text_features, image_features) if swapped else (image_features, text_features)
    scale, bias = (value if isinstance(value, Tensor) else None for value in (logit_scale, logit_bias))
    ticket = None if ahead is None else ahead.take()
    with torch.autocast(own.device.type, enabled=False):
        return _MadeInForward.apply(own, other, scale, bias, ticket, make, Call(ranks, agreement, ahead, swapped))


class _MadeInForward(torch.autograd.Function):
    """Loss and gradients in forward; in backward one multiplication."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        other: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        ticket: Tensor | None,
        make: Maker,
        call: Call,
    ) -> Tensor:
        made = make(own.detach(), other.detach(), call)
        other_gradient = None
        if made.other is not None and ticket is not None and call.ahead is not None:
            call.ahead.gradient.pending = made.other  # waited for by the node that holds the ticket
        elif made.other is not None:
            other_gradient = made.other.wait()
        ctx.save_for_backward(made.own, other_gradient, made.scale, made.bias)
        ctx.inputs = [None if x is None else (x.shape, x.dtype, x.device) for x in (own, other, scale, bias)]
        return made.loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss has no second derivative: its gradient is made in forward and is a constant to autograd. "
                "Leave out create_graph=True, or use a loss written in plain torch operations"
            )
        (factor,) = upstream
        gradients: list[Tensor | None] = []
        for needed, gradient, made_of in zip(ctx.needs_input_grad, ctx.saved_tensors, ctx.inputs, strict=False):
            if needed and gradient is not None:
                shape, dtype, device = made_of
                gradients.append((factor * gradient).to(device=device, dtype=dtype).reshape(shape))
            else:
                gradients.append(None)
        ticket = factor if ctx.needs_input_grad[4] else None
        return *gradients, ticket, None, None
