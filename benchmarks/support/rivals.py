"""The losses that ours is measured against, as their projects have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _OfficialGather(torch.autograd.Function):
    """The gather of the official recipe, to the letter: a list of buffers, joined; backward averages and slices."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())  # ReduceOp.AVG, which gloo does not have
        b = len(gradient) // dist.get_world_size()
        return gradient[dist.get_rank() * b : (dist.get_rank() + 1) * b]


def official_disco(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The loss of https://github.com/IDEA-Research/DisCo-CLIP; its tower gradients are 1/N of the truth."""
    b, rank = len(image), dist.get_rank()
    images, texts = _OfficialGather.apply(image), _OfficialGather.apply(text)
    own = slice(rank * b, (rank + 1) * b)
    per_image, per_text = scale * images[own] @ texts.T, scale * texts[own] @ images.T
    labels = torch.arange(own.start, own.stop)
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def original_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP as first trained (arXiv:2103.00020, section 2.4): all B x B logits on every rank.

    A rank's gradient reaches its own rows only, and is 1/N of the truth once an engine averages, while that of the
    scale is right.
    """
    b, rank, size = len(image), dist.get_rank(), dist.get_world_size()
    everyone = []
    for own in (image, text):
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.detach())
        parts[rank] = own
        everyone.append(torch.cat(parts))
    logits = scale * everyone[0] @ everyone[1].T
    labels = torch.arange(b * size)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
