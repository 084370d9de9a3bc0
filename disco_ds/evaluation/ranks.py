"""The few collectives that an evaluation needs, the same for one process and for many."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The ranks of ``group``; one process needs no process group at all.

    Args:
        rank, world_size: this process's place in ``group``.
        group: a ``torch.distributed`` group; None for the default one.
        device: where this rank computes; collectives run there unless the group's backend is of the CPU.
    """

    def __init__(self, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        self.rank, self.world_size, self.group, self.compute = rank, world_size, group, device
        self.wire = device
        if world_size > 1 and dist.get_backend(group) == "gloo":
            self.wire = torch.device("cpu")

    def maximum(self, values: list[int]) -> list[int]:
        """The largest of each number over the ranks."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.wire)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of an integer tensor of the same shape on each."""
        if self.world_size == 1:
            return tensor
        summed = tensor.to(self.wire, copy=True)
        dist.all_reduce(summed, group=self.group)
        return summed.to(tensor.device)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """All ranks' rows (n_r, …), rank 0's first, as one (sum of n_r, …); the n_r may differ and be 0."""
        if self.world_size == 1:
            return tensor
        counts = torch.zeros(self.world_size, dtype=torch.int64, device=tensor.device)
        counts[self.rank] = len(tensor)
        sizes = self.total(counts).tolist()
        padded = torch.zeros((max(sizes), *tensor.shape[1:]), dtype=tensor.dtype, device=self.wire)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, rank 0's first. For small things."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
