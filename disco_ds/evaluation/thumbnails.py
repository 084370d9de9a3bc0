"""A few held-out images, small enough for the report."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from disco_ds.evaluation.collectives import gather_objects

LONGEST_SIDE = 128
"""In pixels."""


class Thumbnails:
    """The same few samples whatever the ranks and batches: those whose hash of (seed, index) is smallest."""

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
