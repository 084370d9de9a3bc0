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

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from disco_ds.planner.tracing.storages import LiveStorages


class LiveBytes(LiveStorages):
    """``now`` and ``peak`` bytes of storages born under the mode; ``sent`` bytes a rank puts on the wire."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.sent = 0
        self.collectives: list[str] = []
        for tensor in known:
            self.leave_out(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self.leave_out(leaf)  # counted already, or there before
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.sent += _sent(func.__name__, args)
            self.collectives.append(func.__name__.split(".")[0].strip("_"))
        return result


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
