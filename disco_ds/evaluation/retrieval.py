"""Image–text retrieval: R@k, median and mean rank, exact on any device, in any block size, on any number of ranks.

A rank is decided by comparing similarities, and floating point gives the same pair another last bit in another block or
on another rank; equal captions then beat each other by rounding. Here similarities have no rounding: features are
normalised and put on a grid of 2^-26 (:func:`to_grid`), so that their products are integers. By Cauchy-Schwarz every
partial sum of a dot product of two such vectors is below 2^53, which float64 holds exactly in any order of summation.
The grid moves a similarity by about 1e-8, less than a float32 matrix product does.

Several captions an image are handled as the benchmarks do (Karpathy & Fei-Fei 2015, section 4.1; clip-benchmark's
``recall_at_k > 0``): image→text counts the best ranked of an image's captions, text→image the one right image.

Ties count against the model: a wrong candidate with the same similarity as the right one is ranked before it.
Constant features thus have the last rank, not the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RECALLS = (1, 5, 10)
"""The k of R@k."""

GRID = 2.0**26
"""Grid points per unit of a feature's coordinate; 26 bits twice is what float64's 53 can sum without rounding."""

_BLOCK_ELEMENTS = 1 << 24  # of similarities at a time: 128 MiB of float64


class NonFiniteFeatures(ValueError):
    """Features hold NaN or infinity: a rank made from them would mean nothing."""


def to_grid(features: Tensor) -> Tensor:
    """L2-normalise (n, D) features of any float dtype and round them to multiples of 2^-26, as int32 (n, D).

    A vector of zeros stays zero: it is equally similar to everything, which ranks last.

    Raises:
        NonFiniteFeatures: NaN or infinity among them.
    """
    if features.ndim != 2:
        raise ValueError(f"features must have shape (n, D), found {tuple(features.shape)}")
    bad = count_non_finite(features)
    if bad:
        raise NonFiniteFeatures(f"{bad} of {len(features)} feature vectors hold NaN or infinity")
    unit = torch.nn.functional.normalize(features.double(), dim=-1, eps=1e-300)
    return unit.mul_(GRID).round_().to(torch.int32)


def count_non_finite(features: Tensor) -> int:
    """Vectors among (n, D) that hold NaN or infinity."""
    return int((~features.isfinite()).any(dim=-1).sum())


def count_ahead(
    image_grid: Tensor, text_grid: Tensor, image_of_text: Tensor, *, rows: range | None = None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rank the images of ``rows`` against all texts, and all texts against those images; memory O(block x T).

    Args:
        image_grid, text_grid: (N, D) and (T, D) from :func:`to_grid`, on one device.
        image_of_text: (T,) int64, the image that each text belongs to; every image has at least one.
        rows: consecutive images to do here; all by default.
        block: images at a time; by default as many as give 128 MiB of similarities.

    Returns:
        how many wrong candidates are ranked before the right one: for the images in ``rows`` (rows,) int64, and for
        each text (T,) int64 over those images only; over disjoint rows that cover all images the latter add up.
    """
    rows = range(len(image_grid)) if rows is None else rows
    block = block or max(1, _BLOCK_ELEMENTS // max(1, len(text_grid)))
    own = zip(image_of_text.split(block), text_grid.split(block), strict=True)
    right_t = torch.cat([(image_grid[images].double() * texts.double()).sum(1) for images, texts in own])
    best_n = right_t.new_full((len(image_grid),), -torch.inf)
    best_n.scatter_reduce_(0, image_of_text, right_t, "amax")
    # an image's own captions are among the candidates counted below; those that reach its best are taken off again
    own_best = image_of_text[right_t == best_n[image_of_text]]
    of_images = -torch.bincount(own_best, minlength=len(image_grid))[rows.start : rows.stop]
    own_image = (image_of_text >= rows.start) & (image_of_text < rows.stop)
    of_texts = -own_image.long()
    text_dt = text_grid.double().T
    for start in range(rows.start, rows.stop, block):
        stop = min(start + block, rows.stop)
        similarity = image_grid[start:stop].double() @ text_dt
        of_images[start - rows.start : stop - rows.start] += (similarity >= best_n[start:stop, None]).sum(1)
        of_texts += (similarity >= right_t).sum(0)
    return of_images, of_texts


def retrieval_metrics(
    image_features: Tensor, text_features: Tensor,
    *, image_of_text: Tensor | Sequence[int] | None = None, block: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """R@1/5/10, mean and median rank in both directions, with R@k's chance levels.

    Args:
        image_features: (N, D), any float dtype; normalised here.
        text_features: (T, D).
        image_of_text: T image numbers. None: text i belongs to image i, and T = N.
        block: images ranked at a time; memory is O(block x T), the result does not depend on it.

    Returns:
        ``image_to_text_R@k``, ``…_R@k_chance``, ``…_mean_rank``, ``…_median_rank`` and the same for ``text_to_image``,
        and ``images`` and ``pairs`` (N and T). Ranks count from 1; the median is rounded down, as open_clip's is.

    Raises:
        NonFiniteFeatures: NaN or infinity in the features.
        ValueError: shapes that do not fit, an image without a text.
    """
    owner = _owners(image_of_text, len(image_features), len(text_features)).to(image_features.device)
    return summarise(*count_ahead(to_grid(image_features), to_grid(text_features), owner, block=block), owner)


def _owners(image_of_text: Tensor | Sequence[int] | None, images: int, texts: int) -> Tensor:
    """``image_of_text`` as an int64 tensor (T,), known to name existing images and all of them."""
    if images == 0:
        raise ValueError("there are no images to rank")
    if image_of_text is None:
        if images != texts:
            raise ValueError(f"{images} images and {texts} texts: image_of_text must say which image each belongs to")
        return torch.arange(texts)
    owner = torch.as_tensor(image_of_text, dtype=torch.int64)
    if owner.shape != (texts,):
        raise ValueError(f"image_of_text has shape {tuple(owner.shape)}, expected ({texts},): one image number a text")
    low, high = (int(owner.min()), int(owner.max())) if texts else (0, 0)
    if low < 0 or high >= images:
        raise ValueError(f"image_of_text names images from {low} to {high}, there are {images}")
    without = images - len(owner.unique())
    if without:
        raise ValueError(f"{without} of {images} images have no text; leave them out")
    return owner


def summarise(image_ahead: Tensor, text_ahead: Tensor, image_of_text: Tensor) -> dict[str, float]:
    """The metrics of :func:`retrieval_metrics` from the complete counts (N,) and (T,) of candidates ranked before."""
    texts_of_image = torch.bincount(image_of_text, minlength=len(image_ahead))
    metrics: dict[str, float] = {"images": len(image_ahead), "pairs": len(text_ahead)}
    directions = (
        ("image_to_text", image_ahead, texts_of_image, len(text_ahead)),
        ("text_to_image", text_ahead, torch.ones_like(image_of_text), len(image_ahead)),
    )
    for name, ahead, right, candidates in directions:
        for k in RECALLS:
            metrics[f"{name}_R@{k}"] = int((ahead < k).sum()) / len(ahead)
            metrics[f"{name}_R@{k}_chance"] = _recall_chance(right, candidates, k)
        metrics[f"{name}_mean_rank"] = int((ahead + 1).sum()) / len(ahead)
        middle = ahead.sort().values
        metrics[f"{name}_median_rank"] = int(middle[(len(ahead) - 1) // 2] + middle[len(ahead) // 2]) // 2 + 1
    return metrics


def _recall_chance(right: Tensor, candidates: int, k: int) -> float:
    """R@k of a random order: the mean over queries of 1 - C(n - r, k) / C(n, k), with r right among n candidates."""
    n, r = candidates, right.double()
    miss = torch.ones_like(r)
    for i in range(min(k, n)):
        miss *= ((n - i - r) / (n - i)).clamp_min(0)
    return float(1 - miss.mean())


def top_texts(image_grid: Tensor, text_grid: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most similar texts of each image, equal ones in the order given.

    Returns:
        indices (N, k) int64 and cosine similarities (N, k) float64; k is at most the number of texts.
    """
    similarity = image_grid.double() @ text_grid.double().T
    # a stable sort of everything: topk orders ties as it likes, and differently on another device
    values, indices = similarity.sort(dim=1, descending=True, stable=True)
    return indices[:, :k], values[:, :k] / GRID**2
