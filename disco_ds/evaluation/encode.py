"""Held-out batches through the engine: each rank encodes its own samples, all ranks call the engine equally often.

Under ZeRO-3 every forward gathers parameters from all ranks, so a rank that stops earlier leaves the others waiting for
ever (microsoft/DeepSpeed#7998). Before each round the ranks therefore agree on what comes: as long as one of them has a
batch, all encode, and those with nothing left encode a dummy and drop it. Nothing need be known of lengths beforehand.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.data.heldout import HeldoutBatch
from disco_ds.evaluation.collectives import gather_objects

LONGEST_SIDE = 128
"""Of a thumbnail, in pixels."""


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
        self.captions += batch.captions
        self.keys += batch.keys
        self.labels += batch.labels


class Thumbnails:
    """The same few samples whatever the ranks and batches, made small: those of smallest hash of (seed, index)."""

    def __init__(self, seed: int, count: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.seed, self.count = seed, count
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self._kept: dict[tuple[bytes, int], np.ndarray] = {}

    def offer(self, index: int, image: Tensor) -> None:
        """Keep this rank's ``count`` first samples; ``image`` (3, H, W) is normalised by mean and std."""
        place = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest(), index
        if len(self._kept) == self.count and place > max(self._kept, default=place):
            return
        self._kept[place] = self.pixels(image)
        if len(self._kept) > self.count:
            del self._kept[max(self._kept)]

    def pixels(self, image: Tensor) -> np.ndarray:
        """(h, w, 3) uint8, neither side above LONGEST_SIDE."""
        image = image.detach().float().cpu() * self.std + self.mean
        shrink = max(image.shape[-2:]) / LONGEST_SIDE
        if shrink > 1:
            size = [max(1, round(side / shrink)) for side in image.shape[-2:]]
            image = F.interpolate(image[None], size=size, mode="area")[0]
        return (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()

    def gathered(self) -> dict[int, np.ndarray]:
        """Index → pixels of the samples chosen over all ranks, in the order of the indices. A collective."""
        offers = {place: pixels for part in gather_objects(self._kept) for place, pixels in part.items()}
        chosen = sorted(offers)[: self.count]
        return {index: offers[digest, index] for digest, index in sorted(chosen, key=lambda place: place[1])}


def encode_all(
    engine: Callable[..., Any], batches: Iterable[HeldoutBatch], tokenizer: Callable[[list[str]], Tensor],
    *, chunk: int, device: torch.device, thumbnails: Thumbnails, texts: bool = True,
) -> Encoded | None:  # fmt: skip
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
        batch, error, tokens = None, None, torch.zeros(0, 1, dtype=torch.int64)
        try:
            for batch in iterator:
                encoded.faults.update(batch.faults)
                if len(batch.index):
                    tokens = _tokens(batch, tokenizer) if texts else tokens
                    break
            else:
                batch = None
        except Exception as raised:  # told to the other ranks first: they would wait in the next collective
            batch, error = None, raised
        # what a rank without a batch must know: more, failed, C, H, W, context, text chunks
        header = [0, int(error is not None), 0, 0, 0, 0, 0]
        if batch is not None:
            header = [1, 0, *batch.images.shape[1:], tokens.shape[1], -(-len(tokens) // chunk)]
        more, failed, *image_shape, context, chunks = (max(each) for each in zip(*gather_objects(header), strict=True))
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("evaluation stopped: another rank could not read its held-out samples; see its message")
        if not more:
            break
        images = torch.zeros(1, *image_shape) if batch is None else batch.images
        features = engine(images.to(device), None).image_features
        image_parts.append(features[: 0 if batch is None else None].detach())
        for number in range(chunks):
            part = tokens[number * chunk : (number + 1) * chunk]
            dummy = torch.zeros(1, context, dtype=torch.int64) if len(part) == 0 else part
            text_parts.append(engine(None, dummy.to(device)).text_features[: len(part)].detach())
        if batch is not None:
            encoded.add(batch, tokens)
            for index, image in zip(batch.index, batch.images, strict=True):
                thumbnails.offer(int(index), image)
    if not image_parts:
        return None
    encoded.image_features = torch.cat(image_parts)
    encoded.text_features = torch.cat(text_parts) if text_parts else encoded.image_features[:0]
    return encoded


def _tokens(batch: HeldoutBatch, tokenizer: Callable[[list[str]], Tensor]) -> Tensor:
    """Those of all captions of a batch."""
    if all(len(captions) == 1 for captions in batch.captions):
        return batch.texts
    for key, captions in zip(batch.keys, batch.captions, strict=True):
        if not captions:
            raise ValueError(f"held-out sample {key} has no caption")
    return tokenizer([caption for captions in batch.captions for caption in captions])
