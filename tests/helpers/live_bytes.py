"""Bytes of tensors alive, counted op by op, and bytes that collectives send.

    with LiveBytes() as live:
        loss = contrastive_loss(images, texts, scale)
        loss.backward()
    live.peak, live.now

Counted is every storage that an operation returns while the mode is on, from then until it is freed, once, whatever
views there are of it. Not counted: what exists before (inputs, parameters) and what libraries allocate inside an
operation (gloo's and NCCL's own buffers, a BLAS workspace).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``now`` and ``peak`` bytes of storages born under the mode; ``sent`` bytes a rank puts on the wire."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.peak_op = ""
        self.sent = 0
        self.collectives: list[str] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), before, func)
        if func.namespace == "c10d":
            self.sent += _sent(func.__name__, args)
            self.collectives.append(func.__name__.split(".")[0].strip("_"))
        return result

    def _see(self, storage: torch.UntypedStorage, before: set[int], func: Any) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known or key in before:
            return  # a view of, or a write to, something that is counted or was there before
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._drop, key).atexit = False
        if self.now > self.peak:
            self.peak, self.peak_op = self.now, str(func)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _sent(name: str, args: tuple) -> int:
    """Bytes a rank sends in a collective: of a ring for gathers and reductions, to all others in an all-to-all."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    size = torch.distributed.get_world_size()
    others = (size - 1) / size
    largest = max((x.numel() * x.element_size() for x in tensors), default=0)
    total = sum(x.numel() * x.element_size() for x in tensors)
    if "allreduce" in name:
        return int(2 * others * total)
    if "broadcast" in name:  # one of as many as there are ranks, which together are a gather
        return int(others * total)
    if "alltoall" in name or "reduce_scatter" in name or "allgather_base" in name or "_allgather_base" in name:
        return int(others * largest)
    if "allgather" in name:
        return int(others * (total - total // (size + 1)))  # a list of outputs beside the input
    return 0
