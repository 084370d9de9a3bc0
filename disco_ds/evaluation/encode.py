"""Held-out batches through the engine: each rank encodes its own samples, all ranks call the engine equally often.

Under ZeRO-3 every forward gathers parameters from all ranks, so a rank that stops earlier leaves the others waiting for
ever (microsoft/DeepSpeed#7998). Before each round the ranks therefore agree on what comes: as long as one of them has a
batch, all encode, and those with nothing left encode a dummy and drop it. Nothing need be known of lengths beforehand.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.evaluation.ranks import Ranks

THUMBNAIL = 128
"""Longest side of a sample image in pixels, as the report shows it."""


class HeldoutBatch(Protocol):
    """What the held-out loader yields: b samples, each with one caption or several.

    ``images`` (b, 3, H, W) float; ``texts`` (b, context) int64, the tokens of each first caption; ``captions`` the
    captions of each sample; ``keys`` their names in the shards; ``labels`` the class of each, or None; ``index`` (list
    or int64 tensor) the number of each in the whole held-out set, the same on any number of ranks; ``faults`` what the
    reader met since the batch before, by reason.
    """

    images: Tensor
    texts: Tensor
    captions: list[list[str]]
    keys: list[str]
    labels: list[str | None]
    index: Any
    faults: dict[str, int]


class Thumbnails:
    """The same few samples whatever the ranks and batches: those whose hash of (seed, index) is smallest."""

    def __init__(self, seed: int, count: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.seed, self.count = seed, count
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self._heap: list[tuple[int, int, np.ndarray]] = []

    def offer(self, index: int, image: Tensor) -> None:
        """Keep this rank's ``count`` first samples; ``image`` (3, H, W) is normalised by mean and std."""
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        place = -int.from_bytes(digest, "big")  # heapq keeps the smallest on top: the one to drop
        if any(kept == index for _, kept, _ in self._heap):
            return
        if len(self._heap) < self.count:
            heapq.heappush(self._heap, (place, index, self._pixels(image)))
        elif self.count and place > self._heap[0][0]:
            heapq.heapreplace(self._heap, (place, index, self._pixels(image)))

    def _pixels(self, image: Tensor) -> np.ndarray:
        """(h, w, 3) uint8, neither side above THUMBNAIL."""
        image = image.detach().float().cpu() * self.std + self.mean
        shrink = max(image.shape[-2:]) / THUMBNAIL
        if shrink > 1:
            size = [max(1, round(side / shrink)) for side in image.shape[-2:]]
            image = F.interpolate(image[None], size=size, mode="area")[0]
        return (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()

    def gathered(self, ranks: Ranks) -> dict[int, np.ndarray]:
        """Sample index → pixels of the samples chosen over all ranks."""
        offers = {entry[1]: entry for entries in ranks.gather_objects(self._heap) for entry in entries}
        chosen = sorted(offers.values(), key=lambda entry: (-entry[0], entry[1]))[: self.count]
        return {index: pixels for _, index, pixels in chosen}


@dataclass
class Encoded:
    """One rank's samples, encoded: n images and m >= n texts; features are on its device, as the model made them."""

    image_features: Tensor
    text_features: Tensor
    index: list[int] = field(default_factory=list)
    row_of_text: list[int] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    wordings: list[int] = field(default_factory=list)
    """For each text a hash of its tokens: texts with the same tokens are one text."""

    def add(self, batch: HeldoutBatch, tokens: Tensor) -> None:
        """Note whose features the next rows are; without ``tokens`` no texts were encoded."""
        for row, captions in enumerate(batch.captions, start=len(self.index)):
            self.row_of_text += [row] * len(captions) if len(tokens) else []
        for row in tokens.numpy():
            digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
            self.wordings.append(int.from_bytes(digest, "big", signed=True))
        self.index += [int(number) for number in batch.index]
        self.faults.update(batch.faults)
        self.captions += batch.captions
        self.keys += batch.keys
        self.labels += batch.labels

    def keep(self, rows: list[int]) -> Encoded:
        """The samples of these rows only, with their texts."""
        new_row = {row: number for number, row in enumerate(rows)}
        texts = [text for text, row in enumerate(self.row_of_text) if row in new_row]
        return Encoded(
            self.image_features[rows],
            self.text_features[texts],
            [self.index[row] for row in rows],
            [new_row[self.row_of_text[text]] for text in texts],
            [self.captions[row] for row in rows],
            [self.keys[row] for row in rows],
            [self.labels[row] for row in rows],
            self.faults,
            [self.wordings[text] for text in texts],
        )


@dataclass
class _Next:
    """What one rank brings to a round: a batch with the tokens of all its captions, nothing, or an error."""

    batch: HeldoutBatch | None = None
    tokens: Tensor | None = None
    error: Exception | None = None

    def header(self, chunk: int) -> list[int]:
        """More, failed, C, H, W, context, text chunks: whatever a rank without a batch must know."""
        if self.batch is None or self.tokens is None:
            return [0, int(self.error is not None), 0, 0, 0, 0, 0]
        return [1, 0, *self.batch.images.shape[1:], self.tokens.shape[1], -(-len(self.tokens) // chunk)]


def encode_all(
    engine: Callable[..., Any],
    batches: Iterable[HeldoutBatch],
    tokenizer: Callable[[list[str]], Tensor],
    *,
    chunk: int,
    ranks: Ranks,
    thumbnails: Thumbnails,
    texts: bool = True,
) -> Encoded | None:
    """Encode every sample of every rank; ``chunk`` is the most texts in one call. None if no rank had a sample.

    Without ``texts`` captions are left alone, and ``text_features`` is empty.

    Raises:
        Exception: whatever reading a batch raised on this rank.
        RuntimeError: reading failed on another rank; all ranks stop together.
    """
    iterator = iter(batches)
    image_parts, text_parts = [], []
    encoded = Encoded(torch.empty(0), torch.empty(0))
    while True:
        own = _next(iterator, tokenizer, texts)
        more, failed, *image_shape, context, chunks = ranks.maximum(own.header(chunk))
        if own.error is not None:
            raise own.error
        if failed:
            raise RuntimeError("evaluation stopped: another rank could not read its held-out samples; see its message")
        if not more:
            break
        batch, tokens = own.batch, own.tokens
        images = torch.zeros(1, *image_shape) if batch is None else batch.images
        features = engine(images.to(ranks.compute), None).image_features
        image_parts.append(features[: 0 if batch is None else None].detach())
        for number in range(chunks):
            part = torch.zeros(0, context, dtype=torch.int64)
            if tokens is not None:
                part = tokens[number * chunk : (number + 1) * chunk]
            dummy = torch.zeros(1, context, dtype=torch.int64) if len(part) == 0 else part
            text_parts.append(engine(None, dummy.to(ranks.compute)).text_features[: len(part)].detach())
        if batch is not None and tokens is not None:
            encoded.add(batch, tokens)
            for index, image in zip(batch.index, batch.images, strict=True):
                thumbnails.offer(int(index), image)
    if not image_parts:
        return None
    encoded.image_features = torch.cat(image_parts)
    encoded.text_features = torch.cat(text_parts) if text_parts else encoded.image_features[:0]
    return encoded


def _next(iterator: Iterator[HeldoutBatch], tokenizer: Callable[[list[str]], Tensor], texts: bool) -> _Next:
    try:
        batch = next(iterator, None)
        while batch is not None and len(batch.index) == 0:
            batch = next(iterator, None)
        if batch is None:
            return _Next()
        if not texts:
            return _Next(batch, batch.texts[:0])
        if all(len(captions) == 1 for captions in batch.captions):
            return _Next(batch, batch.texts)
        without = [key for key, captions in zip(batch.keys, batch.captions, strict=True) if not captions]
        if without:
            raise ValueError(f"held-out sample {without[0]} has no caption")
        return _Next(batch, tokenizer([caption for captions in batch.captions for caption in captions]))
    except Exception as error:  # told to the other ranks first: they would wait for this one in the next collective
        return _Next(error=error)
