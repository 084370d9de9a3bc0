"""Bytes alive, op by op: each tensor storage once, from the operation that made it to the moment it is freed.

Works on real and on fake tensors alike, which is what lets a trace without a GPU be checked against a real step. What
a library allocates inside an operation (a convolution's workspace, gloo's and NCCL's buffers) is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_GRANULE = 512
"""CUDA's caching allocator rounds every block up to this many bytes."""


class LiveStorages(TorchDispatchMode):
    """Bytes of live storages, in all and by category.

    Args:
        granule: every storage is rounded up to this many bytes (512 for CUDA's allocator; 1 for none).
        device: only storages on this kind of device are counted ("cuda", "cpu"); None counts all but "meta".
        batch: pairs in the batch, a prime that divides no fixed size. Storages whose bytes are a multiple of it grow
            with the batch, all others do not: one pass then says how many bytes there are for every batch.
    """

    def __init__(self, granule: int = 1, device: str | None = None, batch: int | None = None) -> None:
        super().__init__()
        self.granule = granule
        self.device = device
        self.batch = batch
        self.per_pair: dict[str, int] = {}
        """Of each category, the bytes that grow with the batch, for one pair."""
        self.now = 0
        self.peak = 0
        self.by_category: dict[str, int] = {}
        self.category = "activations"
        """The category of what is born from here on."""
        self._live: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = self.now
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, func)
        if self.now > before:
            self.peak = max(self.peak, self.now)
            self.on_growth(func)
        return result

    def on_growth(self, func: Any) -> None:
        """Called after each operation that made a storage."""

    def born(self, key: int, size: int, func: Any) -> None:
        """Called for each new storage."""

    def count(self, tensor: torch.Tensor, category: str) -> int:
        """Count a tensor that was there before, or move one to another category; returns its bytes."""
        key = tensor.untyped_storage()._cdata
        if key not in self._live:
            self._see(tensor, None)
        if key not in self._live:
            return 0
        size, old = self._live[key]
        if old != category:
            self._live[key] = (size, category)
            self._add(old, -size)
            self._add(category, size)
        self.peak = max(self.peak, self.now)
        return size

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        kind = tensor.device.type
        if kind == "meta" or (self.device is not None and kind != self.device):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        if size == 0:
            return
        if not self._grows(size):
            size = -(-size // self.granule) * self.granule
        self._live[key] = (size, self.category)
        self.now += size
        self._add(self.category, size)
        weakref.finalize(storage, self._drop, key).atexit = False
        self.born(key, size, func)

    def _drop(self, key: int) -> None:
        size, category = self._live.pop(key)
        self.now -= size
        self._add(category, -size)

    def _grows(self, size: int) -> bool:
        return self.batch is not None and size % self.batch == 0

    def _add(self, category: str, size: int) -> None:
        if self.batch is not None and self._grows(size):
            self.per_pair[category] = self.per_pair.get(category, 0) + size // self.batch
        else:
            self.by_category[category] = self.by_category.get(category, 0) + size
