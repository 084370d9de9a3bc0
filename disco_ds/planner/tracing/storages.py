"""Bytes alive, op by op: each tensor storage once, from the operation that made it to the moment it is freed.

Works on real and on fake tensors alike, which is what lets a trace without a GPU be checked against a real step. What
a library allocates inside an operation (a convolution's workspace, gloo's and NCCL's buffers) is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_GRANULE = 512
"""CUDA's caching allocator rounds every block up to this many bytes."""


class LiveStorages(TorchDispatchMode):
    """Bytes of live storages: ``now``, ``peak``, and by category; what an operation makes are "activations".

    Args:
        granule: every storage is rounded up to this many bytes (512 for CUDA's allocator; 1 for none).
        device: only storages on this kind of device are counted ("cuda", "cpu"); None counts all but "meta".
        batch: pairs in the batch, a prime that divides no fixed size. Storages whose bytes are a multiple of it grow
            with the batch, all others do not: one pass then says how many bytes there are for every batch.
    """

    def __init__(self, granule: int = 1, device: str | None = None, batch: int | None = None) -> None:
        super().__init__()
        self.granule, self.device, self.batch = granule, device, batch
        self.now = self.peak = 0
        self.fixed: Counter[str] = Counter()
        """Of each category, the bytes that do not grow with the batch."""
        self.per_pair: Counter[str] = Counter()
        """Of each category, the bytes that grow with the batch, for one pair."""
        self._live: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = self.now
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, "activations")
        if self.now > before:
            self.peak = max(self.peak, self.now)
            self.on_growth()
        return result

    def on_growth(self) -> None:
        """Called after each operation that made a storage."""

    def count(self, tensor: torch.Tensor, category: str) -> None:
        """Count a tensor that was there before, or move one to another category."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            size, old = self._live[key]
            self._live[key] = (size, category)
            self._add(old, size, -1)
            self._add(category, size)
        else:
            self._see(tensor, category)
        self.peak = max(self.peak, self.now)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count neither a tensor nor views of it, unless it is counted already."""
        self._see(tensor, "left out", counted=False)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        if parameter.grad is not None:
            self.count(parameter.grad, "gradients")

    @contextmanager
    def gradients_of(self, model: torch.nn.Module) -> Iterator[None]:
        """Call :meth:`on_gradient` as backward completes the gradients of a model's parameters."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(self.on_gradient) for parameter in trained]
        yield
        for hook in hooks:
            hook.remove()

    def _see(self, tensor: torch.Tensor, category: str, counted: bool = True) -> None:
        kind, storage = tensor.device.type, tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if kind == "meta" or (self.device is not None and kind != self.device) or key in self._live or size == 0:
            return
        if not counted:
            size = 0
        elif self.batch is None or size % self.batch:
            size = -(-size // self.granule) * self.granule
        self._live[key] = (size, category)
        self._add(category, size)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        size, category = self._live.pop(key)
        self._add(category, size, -1)

    def _add(self, category: str, size: int, sign: int = 1) -> None:
        self.now += sign * size
        if self.batch is not None and size % self.batch == 0:
            self.per_pair[category] += sign * size // self.batch
        else:
            self.fixed[category] += sign * size
