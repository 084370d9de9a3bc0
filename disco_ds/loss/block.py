"""One rank's block of logits, in tiles of columns, and the gradients that are made of it.

Both losses work alike: one tower is gathered, a rank computes the (b, B) block of its own rows against all B, and from
G, the gradient of the logits, come those of the features. The pairs themselves stay out of the tiles: they are b
numbers, kept in float64. All else is computed in float32 (float64 for float64 features), at the process's own matmul
precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.loss.memory import default_tile, keeps_logits
from disco_ds.loss.ranks import Ranks, agree, ranks_of


class Block:
    """The logits of own rows (b, D) and the gathered rows (B, D) of the other tower.

    Args:
        own, other: the rank's rows of both towers; ``other`` is gathered.
        scale: 0-dim, the factor of the cosines.
        tile: columns at a time; None picks it by size.
        keep_logits: True, False or "auto": whether all tiles should be kept from a first pass to a second one.
        wanted: whether gradients of own, other, scale and bias are wanted.
    """

    def __init__(
        self, own: Tensor, other: Tensor, scale: Tensor, ranks: Ranks, tile: int | None, keep_logits: bool | str,
        wanted: tuple[bool, ...],
    ) -> None:  # fmt: skip
        self.ranks, self.scale, self.own, self.other = ranks, scale, own, other
        self.wanted = wanted
        wide = torch.promote_types(own.dtype, torch.float32)
        self.gathered = ranks.gather(other).to(wide)
        self.scaled = own.to(wide) * scale.to(wide)
        b, B = len(own), len(self.gathered)
        self.first = ranks.rank * b
        tile = min(B, tile or default_tile(b, B, own.device.type))
        self.tiles = [slice(j, min(j + tile, B)) for j in range(0, B, tile)]
        keep = keeps_logits(b, B, wide.itemsize) if keep_logits == "auto" else bool(keep_logits)
        self.keep = keep and any(wanted)
        self.buffers = [self.scaled.new_empty(b * tile) for _ in range(1 if self.keep else 2)]

    def buffer(self, columns: slice, number: int = 0) -> Tensor:
        """A (b, columns) buffer; 0 is scratch, 1 holds logits where they are not kept."""
        b = len(self.own)
        n = columns.stop - columns.start
        return self.buffers[number][: b * n].view(b, n) if number < len(self.buffers) else self.scaled.new_empty(b, n)

    def negatives(self, columns: slice) -> Tensor:
        """Logits (b, columns) of own rows, those of the pairs themselves at -inf."""
        S = torch.mm(self.scaled, self.gathered[columns].T, out=self.buffer(columns, 1))
        first, last = max(columns.start, self.first), min(columns.stop, self.first + len(self.own))
        if first < last:
            S[first - self.first :, first - columns.start :].diagonal()[: last - first].fill_(float("-inf"))
        return S

    def pairs(self) -> Tensor:
        """Logits of the pairs, (b,) float64."""
        return torch.einsum("bd,bd->b", self.own.double(), self.other.double()) * self.scale.double()


class Gradients:
    """Sums up what tiles of G, the gradient of the logits, give to the features."""

    def __init__(self, block: Block) -> None:
        own, other, scale, _ = block.wanted
        self.block = block
        self.own = torch.zeros_like(block.scaled) if own or scale else None  # G @ other, without the scale
        self.other = torch.empty_like(block.gathered) if other else None  # G.T @ own, with it

    def add(self, columns: slice, G: Tensor) -> None:
        """Take the gradient (b, columns) of one tile of logits."""
        if self.own is not None:
            self.own.addmm_(G, self.block.gathered[columns])
        if self.other is not None:
            torch.mm(G.T, self.block.scaled, out=self.other[columns])

    def finish(self, of_pairs: Tensor, weight: float) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of own rows, other rows and scale, once all tiles have been added.

        Args:
            of_pairs: (b,) float64, the gradient of the pairs' logits.
            weight: what all gradients are multiplied by.
        """
        block, of_scale = self.block, None
        factor = of_pairs.to(block.scaled.dtype).unsqueeze(1)
        if self.own is not None:
            self.own.addcmul_(factor, block.other.to(factor.dtype))
            of_scale = torch.einsum("bd,bd->b", self.own.double(), block.own.double()).sum() * weight
            self.own.mul_(block.scale.to(factor.dtype) * weight)
        if self.other is not None:
            self.other[block.first : block.first + len(factor)].addcmul_(factor, block.scaled)
            self.other = block.ranks.reduce_scatter(self.other).mul_(weight)
        return self.own, self.other, of_scale


Made = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""What a loss makes of a block: its value, and the gradients of own rows, other rows, scale and bias."""


@torch.compiler.disable
def apply_loss(
    make: Callable[[Block, Tensor], Made], name: str, image: Tensor, text: Tensor, scale: Tensor | float,
    bias: Tensor | float | None, group: dist.ProcessGroup | Ranks | None, tile: int | None,
    keep_logits: bool | str = False,
) -> Tensor:  # fmt: skip
    """Let ``make`` compute loss and gradients, and return the loss as a node of autograd's graph.

    The upstream gradient of a loss is one number, the same on every rank. So gradients are made together with the loss,
    tile by tile, and backward multiplies them: nothing of size b x B lives on.
    """
    ranks, inputs = ranks_of(group), (image, text, scale, bias)
    wanted = tuple(torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in inputs)
    with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        s, beta = (_number(x, image.device) for x in (scale, 0.0 if bias is None else bias))
        agree(ranks, name, image, text, s, beta, tile=tile, keep_logits=keep_logits, wanted=wanted)
        # both losses are symmetric in the towers: a frozen one is gathered, which needs no gradient sent back
        order = (1, 0, 2, 3) if wanted[1] and not wanted[0] else (0, 1, 2, 3)
        own, other = (image, text)[order[0]], (image, text)[order[1]]
        loss, *gradients = make(Block(own, other, s, ranks, tile, keep_logits, tuple(wanted[i] for i in order)), beta)
    if not any(wanted):
        return loss
    leaves = [x if flag else None for x, flag in zip(inputs, wanted, strict=True)]
    return _FinishedGradients.apply(loss, [gradients[i] for i in order], *leaves)


def _number(value: Tensor | float, device: torch.device) -> Tensor:
    """A number, or a tensor of one element, as a 0-dim tensor."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device)
    return torch.tensor(float(value), dtype=torch.float64, device=device)


class _FinishedGradients(torch.autograd.Function):
    """A loss whose gradients are known; backward multiplies."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.inputs = [None if x is None else (x.shape, x.dtype, x.device) for x in inputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss has no second derivative: its gradient is made in forward and is a constant to autograd. "
                "Leave out create_graph=True, or use a loss written in plain torch operations"
            )
        passed = [
            None if of is None else (upstream[0] * gradient).to(of[2], of[1]).reshape(of[0])
            for gradient, of in zip(ctx.saved_tensors, ctx.inputs, strict=True)
        ]
        return None, None, *passed
