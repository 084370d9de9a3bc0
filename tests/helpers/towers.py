"""A two-tower module small enough for any test, held-out batches for it, and a slow, plain reference of its evaluation.

Weights and pixels are small integers, so that float32 gives the same features in any batch: what then differs between
two evaluations is the evaluation's doing, not that of a matrix product.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.data.heldout import HeldoutBatch
from disco_ds.evaluation.retrieval import to_grid
from disco_ds.model.towers import Features

CONTEXT, VOCABULARY, SIDE, WIDTH = 6, 97, 8, 16


class TinyTowers(nn.Module):
    """Linear image tower, embedding-sum text tower, dropout in both (so that evaluation mode shows)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.visual = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, WIDTH), nn.Dropout(0.5))
            self.text = nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum"), nn.Linear(WIDTH, WIDTH))
            self.drop = nn.Dropout(0.5)
            self.logit_scale = nn.Parameter(torch.ones(1))
            for parameter in (*self.visual.parameters(), *self.text.parameters()):
                parameter.data = torch.randint(-3, 4, parameter.shape).float()

    def forward(self, images: Tensor | None = None, texts: Tensor | None = None) -> Features:
        image_features = text_features = None
        if images is not None:
            image_features = F.normalize(self.visual(images.to(self.logit_scale.dtype)).double(), dim=-1)
        if texts is not None:
            text_features = F.normalize(self.drop(self.text(texts)).double(), dim=-1)
        return Features(image_features, text_features, self.logit_scale.exp(), None)


def tokenize(texts: list[str]) -> Tensor:
    """(n, CONTEXT) int64: a hash of each word, 0 where there is none."""
    rows = [[1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text.split()[:CONTEXT]] for text in texts]
    return torch.tensor([row + [0] * (CONTEXT - len(row)) for row in rows], dtype=torch.int64).reshape(-1, CONTEXT)


class Sample(NamedTuple):
    index: int
    image: Tensor
    captions: list[str]
    label: str | None


def make_samples(count: int, seed: int, *, captions: int = 1, labels: tuple[str | None, ...] = (None,)) -> list[Sample]:
    """Samples with gaps in their numbers, one to ``captions`` captions each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    return [
        Sample(
            index=3 * number + 1,
            image=torch.randint(-8, 9, (3, SIDE, SIDE), generator=generator).float(),
            captions=[f"thing {draw(50)} of {draw(50)}" for _ in range(1 + draw(captions))],
            label=labels[draw(len(labels))],
        )
        for number in range(count)
    ]


def batched(samples: list[Sample], size: int) -> Iterator[HeldoutBatch]:
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        yield HeldoutBatch(
            images=torch.stack([sample.image for sample in part]),
            texts=tokenize([sample.captions[0] for sample in part]),
            captions=[sample.captions for sample in part],
            keys=[f"shard.tar#{sample.index}" for sample in part],
            labels=[sample.label for sample in part],
            index=torch.tensor([sample.index for sample in part]),
        )


def slow_ranks(similarity: list[list[float]], right: list[list[int]]) -> list[int]:
    """The rank of the best right candidate of each query, by a loop: 1 + the wrong ones at least as similar."""
    ranks = []
    for row, own in zip(similarity, right, strict=True):
        best = max(row[candidate] for candidate in own)
        ranks.append(1 + sum(value >= best for candidate, value in enumerate(row) if candidate not in own))
    return ranks


def slow_retrieval(similarity: list[list[float]], owner: list[int]) -> dict[str, float]:
    """Retrieval metrics by plain loops over the full matrix (images x texts), chance by counting."""
    images, texts = len(similarity), len(owner)
    own_texts = [[text for text in range(texts) if owner[text] == image] for image in range(images)]
    columns = [[similarity[image][text] for image in range(images)] for text in range(texts)]
    metrics: dict[str, float] = {"images": images, "pairs": texts}
    for name, matrix, right in (
        ("image_to_text", similarity, own_texts),
        ("text_to_image", columns, [[image] for image in owner]),
    ):
        ranks = sorted(slow_ranks(matrix, right))
        for k in (1, 5, 10):
            metrics[f"{name}_R@{k}"] = sum(rank <= k for rank in ranks) / len(ranks)
        metrics[f"{name}_mean_rank"] = sum(ranks) / len(ranks)
        metrics[f"{name}_median_rank"] = (ranks[(len(ranks) - 1) // 2] + ranks[len(ranks) // 2]) // 2
    return metrics


def exact_similarity(image, text) -> list[list[float]]:
    """Integer dot products on the grid, as Python integers."""
    rows, columns = to_grid(image).tolist(), to_grid(text).tolist()
    return [[sum(a * b for a, b in zip(x, y, strict=True)) for y in columns] for x in rows]
