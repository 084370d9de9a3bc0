"""Inputs for tests of the losses, and what the losses have to equal: one process, float64, plain autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("random", "trained", "converged", "anisotropic", "mixed", "identical", "duplicated")


def make_features(pairs: int, width: int, kind: str, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Unit features (pairs, width) of images and texts; "mixed" ones differ in length by orders of magnitude.

    ``trained``: a loss of 0.01 to 1 at scale 100. ``converged``: below 1e-3, the negatives alike. ``anisotropic``: all
    features in a narrow cone.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(rows: int = pairs) -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) / width**0.5

    unit = F.normalize
    if kind in ("trained", "anisotropic"):
        spread = max(width**0.5 / 4.2 - 1.0, 0.3) ** 0.5  # so that the loss is neither nothing nor that of chance
        shared = unit(noise()) + (2.0 * unit(noise(1)) if kind == "anisotropic" else 0.0)
        u, v = unit(shared + spread * noise()), unit(shared + spread * noise())
    elif kind == "converged":
        shared = unit(2.0 * unit(noise(1)) + unit(noise()))  # negatives at a cosine of 0.8, positives near 1
        u, v = unit(shared + 0.03 * noise()), unit(shared + 0.03 * noise())
    elif kind == "identical":
        u = v = unit(noise(1)).expand(pairs, width)
    else:
        u, v = unit(noise()), unit(noise())
    if kind == "mixed":
        lengths = torch.tensor([1e-2, 1.0, 2.5])
        u, v = (x * lengths[torch.randint(0, 3, (pairs, 1), generator=g)] for x in (u, v))
    elif kind == "duplicated":
        half = pairs // 2
        u[half : 2 * half], v[half : 2 * half] = u[:half], v[:half]
    return [x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in (u, v)]  # never one tensor twice


def leaves(
    pairs: int = 37, width: int = 24, kind: str = "trained", seed: int = 0, dtype: torch.dtype = torch.float32,
    scale: float = 100.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Features as ``make_features`` makes them and a scale, all three leaves of a graph."""
    image, text = make_features(pairs, width, kind, seed, dtype)
    return image.requires_grad_(), text.requires_grad_(), torch.tensor(scale, requires_grad=True)


def clip_reference(u: Tensor, v: Tensor, scale: float) -> dict[str, Tensor]:
    """Loss and gradients of CLIP's loss over all pairs, float64.

    As softplus of the negatives over the positive, not as cross-entropy: below a loss of 1e-9 the latter has lost its
    digits even in float64.
    """
    u, v, s = _leaves(u, v, scale)
    logits = s * u @ v.T
    negatives = logits.masked_fill(torch.eye(len(u), dtype=torch.bool), float("-inf"))
    loss = sum(_softplus(negatives.logsumexp(dim) - logits.diagonal()).mean() for dim in (0, 1)) / 2
    loss = loss if len(u) > 1 else 0.0 * logits.sum()
    loss.backward()
    return {"loss": loss.detach(), "image": u.grad, "text": v.grad, "scale": s.grad}


def sigmoid_reference(u: Tensor, v: Tensor, scale: float, bias: float) -> dict[str, Tensor]:
    """Loss and gradients of SigLIP's loss over all pairs, float64."""
    u, v, s, b = _leaves(u, v, scale, bias)
    logits = s * u @ v.T + b
    loss = -F.logsigmoid((2 * torch.eye(len(u), dtype=torch.float64) - 1) * logits).sum() / len(u)
    loss.backward()
    return {"loss": loss.detach(), "image": u.grad, "text": v.grad, "scale": s.grad, "bias": b.grad}


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))  # F.softplus drops e**-x from x = 20 on


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; the difference itself where nothing is."""
    difference = (value.detach().double() - expected).norm().item()
    norm = expected.norm().item()
    return difference / norm if norm > 0 else difference


def _leaves(*values: Any) -> list[Tensor]:
    return [torch.as_tensor(x, dtype=torch.float64).detach().clone().requires_grad_() for x in values]


def streamed_reference(
    u: Tensor, v: Tensor, scale: float, rows: Tensor | None = None, chunk: int = 1024
) -> dict[str, Tensor]:
    """``clip_reference`` without ever holding the logits: for unit features and scales up to 300.

    One exponential of one shift, ``exp(S - scale)``, serves everything, since in float64 nothing underflows. The
    gradients of features are those of the pairs ``rows`` (None: all).
    """
    u, v, pairs = u.double(), v.double(), len(u)
    row, row_cosine, column, column_cosine = (torch.zeros(pairs, dtype=torch.float64) for _ in range(4))
    for i in range(0, pairs, chunk):
        cosines = u[i : i + chunk] @ v.T
        weights = cosines.sub(1.0).mul_(scale).exp_()
        weights[:, i : i + chunk].diagonal().zero_()
        row[i : i + chunk], column = weights.sum(1), column + weights.sum(0)
        weights.mul_(cosines)
        row_cosine[i : i + chunk], column_cosine = weights.sum(1), column_cosine + weights.sum(0)
    positive = (u * v).sum(1)
    at_positive = (scale * (positive - 1)).exp()
    loss = sum(_softplus(sums.log() - scale * (positive - 1)).sum() for sums in (row, column)) / (2 * pairs)
    of_scale = sum(
        ((cosines - sums * positive) / (sums + at_positive)).sum()
        for sums, cosines in ((row, row_cosine), (column, column_cosine))
    ) / (2 * pairs)
    rows = torch.arange(pairs) if rows is None else rows
    gradients = []
    for own, other, negative, other_negative in ((u, v, row, column), (v, u, column, row)):
        own_sum, other_sum = negative + at_positive, other_negative + at_positive
        parts = []
        for piece in rows.split(chunk):
            weights = (own[piece] @ other.T).sub_(1.0).mul_(scale).exp_()
            weights = weights.mul_(1 / own_sum[piece, None] + 1 / other_sum)
            weights[torch.arange(len(piece)), piece] = 0.0
            # 1 - p of the positive, from the sum of the negatives: it may be far below 1e-16
            share = negative[piece] / own_sum[piece] + other_negative[piece] / other_sum[piece]
            parts.append((weights @ other - share[:, None] * other[piece]) * (scale / (2 * pairs)))
        gradients.append(torch.cat(parts))
    return {"loss": loss, "image": gradients[0], "text": gradients[1], "scale": of_scale}
