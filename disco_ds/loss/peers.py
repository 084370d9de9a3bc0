"""The losses this project is measured against, for comparison and for teaching.

Both return a scalar whose mean over ranks is the global loss, and both leave the gradient of that loss after the
engine's reduction. As published they do not: what was changed is said in each class. They are written for reading, in
plain autograd, and take the memory they are known for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from disco_ds.loss.agreement import Agreement, agree
from disco_ds.loss.ranks import Ranks, ranks_of


class _Peer(nn.Module):
    """What the two have in common: the options, and a call with autocast off and features in float32 or float64."""

    kind = ""

    def __init__(self, *, group: dist.ProcessGroup | Ranks | None = None, grad_reduction: str = "mean") -> None:
        super().__init__()
        self.group = group
        self.grad_reduction = grad_reduction

    @torch.compiler.disable
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        """The loss of features (b, D) of every rank; see :func:`disco_ds.contrastive_loss` for the arguments."""
        ranks = ranks_of(self.group)
        agreement = agree(
            self.kind, ranks, image_features, text_features, logit_scale, logit_bias, grad_reduction=self.grad_reduction
        )
        dtype = torch.promote_types(image_features.dtype, torch.float32)
        # Engines that average over ranks take 1/N of what each rank hands over, engines that add take all of it.
        scale, bias = logit_scale, 0.0 if logit_bias is None else logit_bias
        with torch.autocast(image_features.device.type, enabled=False):
            return self._loss(image_features.to(dtype), text_features.to(dtype), scale, bias, ranks, agreement)

    def _loss(self, image: Tensor, text: Tensor, scale: Any, bias: Any, ranks: Ranks, agreement: Agreement) -> Tensor:
        raise NotImplementedError


class OriginalClipLoss(_Peer):
    """CLIP as first trained: every rank gathers both towers and computes all B x B logits, every rank the same loss.

    16 B^2 bytes of logits on every rank, and N times the work. A rank's gradient reaches its own rows only, and is
    1/N of what it should be once an engine has averaged it, while that of the scale is right; here the feature
    gradients are multiplied by N.
    """

    kind = "OriginalClipLoss"

    def _loss(self, image: Tensor, text: Tensor, scale: Any, bias: Any, ranks: Ranks, agreement: Agreement) -> Tensor:
        mean = self.grad_reduction == "mean"
        size = float(ranks.size)
        image, text = (_multiply_gradient(x, size if mean else 1.0) for x in (image, text))
        scale, bias = (_multiply_gradient(x, 1.0 if mean else 1 / size) for x in (scale, bias))
        counts = agreement.counts
        before = sum(counts[: ranks.rank])
        everyone = []
        for own in (image, text):
            rows = ranks.gather(own.detach(), counts).wait()
            everyone.append(torch.cat([rows[:before], own, rows[before + counts[ranks.rank] :]]))
        logits = scale * everyone[0] @ everyone[1].T + bias
        labels = torch.arange(agreement.pairs, device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class DiscoLoss(_Peer):
    """The recipe of DisCo-CLIP (arXiv:2304.08480): each rank the logits of its own images and of its own texts.

    Both towers are gathered; backward all-reduces the gradient of all B x D and keeps its own rows. The published code
    averages there, which is 1/N of the gradient once the engine averages, too; here it sums.
    """

    kind = "DiscoLoss"

    def _loss(self, image: Tensor, text: Tensor, scale: Any, bias: Any, ranks: Ranks, agreement: Agreement) -> Tensor:
        size = ranks.size
        factor = 1.0 if self.grad_reduction == "mean" else 1 / size
        image, text, scale, bias = (_multiply_gradient(x, factor) for x in (image, text, scale, bias))
        all_images = _DiscoGather.apply(image, ranks, agreement.counts)
        all_texts = _DiscoGather.apply(text, ranks, agreement.counts)
        before = sum(agreement.counts[: ranks.rank])
        own = slice(before, before + agreement.counts[ranks.rank])
        labels = torch.arange(own.start, own.stop, device=image.device)
        per_image = scale * all_images[own] @ all_texts.T + bias
        per_text = scale * all_texts[own] @ all_images.T + bias
        total = F.cross_entropy(per_image, labels, reduction="sum") + F.cross_entropy(per_text, labels, reduction="sum")
        return total * (size / (2 * agreement.pairs))


class _DiscoGather(torch.autograd.Function):
    """All ranks' rows; backward all-reduces and slices."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, counts: list[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        rows = ranks.gather(own, counts).wait()
        return rows.clone() if rows is own else rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.ranks.all_reduce(gradients[0].clone())
        before = sum(ctx.counts[: ctx.ranks.rank])
        return total[before : before + ctx.counts[ctx.ranks.rank]], None, None


class _MultiplyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _multiply_gradient(value: Any, factor: float) -> Any:
    """``value`` itself, whose gradient will be multiplied by ``factor``; a number that is no tensor has none."""
    return _MultiplyGradient.apply(value, factor) if isinstance(value, Tensor) and factor != 1.0 else value
