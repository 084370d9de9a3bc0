"""The ranks that a loss is computed over: three collectives, and the agreement that makes them safe."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# torch 2.14 renamed both; the floor of this project is older than that
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LOSSES = ("contrastive_loss", "SigmoidLoss")
KEEP = (False, True, "auto")
_CALL = ("the loss", "pairs", "width", "dtype", "tile", "keep_logits", "wanted gradients (bits)")


class Ranks:
    """One rank alone, and the interface of many: every rank calls each method with tensors of the same shape."""

    rank: int = 0
    size: int = 1

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows (n, ...), rank 0's first: (size * n, ...)."""
        return rows

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """The sum over ranks of (size * n, ...), of which this rank keeps its own n rows."""
        return rows

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        return values


class ProcessGroupRanks(Ranks):
    """The ranks of a torch.distributed process group (None: the default group).

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} calls the loss with a process group it is not a member of")

    def gather(self, rows: Tensor) -> Tensor:
        out = rows.new_empty((self.size * len(rows), *rows.shape[1:]))
        _all_gather(out, rows.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        out = rows.new_empty((len(rows) // self.size, *rows.shape[1:]))
        _reduce_scatter(out, rows, group=self.group)
        return out

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


def ranks_of(group: dist.ProcessGroup | Ranks | None) -> Ranks:
    """The ranks that a ``group`` argument stands for; without an initialised process group, this one alone."""
    if isinstance(group, Ranks):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    ranks = ProcessGroupRanks(group)
    return Ranks() if ranks.size == 1 else ranks


def agree(
    ranks: Ranks, loss: str, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor,
    *, tile: int | None, keep_logits: bool | str, wanted: tuple[bool, ...],
) -> None:  # fmt: skip
    """Share a header and check that all ranks make the same call: collectives of unequal sizes hang or corrupt memory.

    On a GPU this is the loss's only wait of the host.

    Raises:
        ValueError: on every rank, if the call is wrong on any rank or differs between ranks.
    """
    alike = image.shape == text.shape and image.dtype == text.dtype
    checks = (
        (image.ndim != 2 or text.ndim != 2, "features must have two dimensions, (pairs, width)"),
        (not alike, "image and text features must be alike in rows, width and dtype: row i of both is a pair"),
        (image.dtype not in DTYPES, "features must be float32, bfloat16, float16 or float64"),
        (image.shape[:1] == (0,), "the batch is empty"),
        (tile is not None and (not isinstance(tile, int) or tile < 1), "tile must be None or a positive whole number"),
        (keep_logits not in KEEP, 'keep_logits must be True, False or "auto"'),
    )  # fmt: skip
    fault = next((number for number, (wrong, _) in enumerate(checks, 1) if wrong), 0)
    if ranks.size == 1:
        table = [[fault]]
    else:
        call = [LOSSES.index(loss), *[0] * 6] if fault else [
            LOSSES.index(loss), *image.shape, DTYPES.index(image.dtype), tile or 0, KEEP.index(keep_logits),
            sum(flag << i for i, flag in enumerate(wanted)),
        ]  # fmt: skip
        words = torch.tensor([fault, *call], dtype=torch.float64, device=image.device)
        table = ranks.gather(torch.cat([words, scale.double().view(1), bias.double().view(1)]).unsqueeze(0)).tolist()
        loss = LOSSES[int(table[0][1])]  # in the words of rank 0, so that all say the same
    for rank, row in enumerate(table):
        if row[0]:
            here = f"; here {tuple(image.shape)} {image.dtype} and {tuple(text.shape)} {text.dtype}"
            raise ValueError(
                f"{loss}: on rank {rank} of {len(table)}, {checks[int(row[0]) - 1][1]}" + here * (rank == ranks.rank)
            )
    for rank, row in enumerate(table[1:], 1):
        for what, one, other in zip((*_CALL, "logit_scale", "logit_bias"), table[0][1:], row[1:], strict=True):
            # kernels may differ in the last bits of a scale; one that is not finite is for the loss to show
            finite = math.isfinite(one) and math.isfinite(other)
            if finite and not math.isclose(one, other, rel_tol=1e-5):
                raise ValueError(
                    f"{loss}: all ranks must make the same call, with the same number of pairs, but {what} is "
                    f"{_word(what, one)} on rank 0 and {_word(what, other)} on rank {rank} of {len(table)}"
                )


def _word(what: str, value: float) -> str:
    """A number of the header as the user wrote it."""
    names: dict[str, tuple[Any, ...]] = {"the loss": LOSSES, "dtype": DTYPES, "keep_logits": KEEP, "tile": ()}
    if what == "tile" and not value:
        return "None"
    return str(names[what][int(value)]) if names.get(what) else f"{value:g}"
