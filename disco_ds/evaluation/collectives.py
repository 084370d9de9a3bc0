"""What an evaluation adds up and gathers over ranks with unequal shares; one process needs no process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.distributed import everyones


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(tensor: Tensor) -> Tensor:
    """The sum over the ranks of an integer tensor of the same shape on each. A collective."""
    if rank_and_size()[1] == 1:
        return tensor
    summed = tensor.to(_wire(), copy=True)
    dist.all_reduce(summed)
    return summed.to(tensor.device)


def gather_rows(tensor: Tensor) -> Tensor:
    """All ranks' rows (n_r, …), rank 0's first, as one (sum of n_r, …); the n_r may differ and be 0. A collective."""
    rank, world_size = rank_and_size()
    if world_size == 1:
        return tensor
    counts = torch.zeros(world_size, dtype=torch.int64)
    counts[rank] = len(tensor)
    sizes = total(counts).tolist()
    padded = torch.zeros((max(sizes), *tensor.shape[1:]), dtype=tensor.dtype, device=_wire())
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable value, rank 0's first. For small things. A collective."""
    return [value] if rank_and_size()[1] == 1 else everyones(value)


def _wire() -> torch.device:
    """Where the process group's backend takes its tensors."""
    return torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")
