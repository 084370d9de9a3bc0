"""What the losses need from a process group: five calls, uneven batches included.

Every rank may bring another number of rows, none at all included. ``counts`` is always the list of those numbers, rank
0 first; it comes from the agreement of ``loss_agreement.py`` and is the same on every rank.

``Ranks`` is the interface and, at the same time, its smallest implementation: one process that talks to nobody.
``ProcessGroupRanks`` speaks ``torch.distributed``. A third one, ranks as threads of one process, lives in
``benchmarks/scale.py``: whatever is handed to a loss as ``group`` and is a ``Ranks`` is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Pending:
    """The result of a collective that may still be under way.

    ``wait()`` returns the tensor and may be called again. On CUDA it makes the current stream wait, not the host.
    ``sent`` is what the collective reads: it is held until then, since the library may still be at it.
    """

    def __init__(
        self,
        result: Tensor,
        works: Sequence[Any] = (),
        sent: Tensor | None = None,
        finish: Callable[[], Tensor] | None = None,
    ) -> None:
        self._result = result
        self._works = works
        self._sent = sent
        self._finish = finish

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._result = self._finish()
        self._works, self._sent, self._finish = (), None, None
        return self._result


class Ranks:
    """The ranks a loss is computed over; as it stands, one rank alone."""

    rank: int = 0
    size: int = 1

    def share(self, words: Tensor) -> Tensor:
        """All ranks' ``words`` (k,) as (size, k)."""
        return words.unsqueeze(0)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """All ranks' ``rows`` (counts[rank], ...) as one (sum(counts), ...), a new tensor. Starts, does not wait."""
        return Pending(rows.clone())

    def transpose(self, parts: Tensor, counts: Sequence[int]) -> Tensor:
        """Rank r's ``parts`` (sum(counts),) hold a value for each row of each rank; returns all that is said of the
        rows of this rank, (size, counts[rank])."""
        return parts.unsqueeze(0)

    def reduce_scatter(self, parts: Tensor, counts: Sequence[int]) -> Pending:
        """Sum ``parts`` (sum(counts), D) over ranks and keep the rows of this rank, (counts[rank], D).

        Starts at once, does not wait; ``parts`` must not be touched any more.
        """
        return Pending(parts)

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over ranks, in place."""
        return values


class ProcessGroupRanks(Ranks):
    """The ranks of a ``torch.distributed`` process group (None: the default group)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} calls the loss with a process group it is not a member of")
        # Gloo's reduce-scatter is an all-reduce, and its all-gather copies twice: there both are made of other calls.
        self._is_gloo = "gloo" in str(dist.get_backend(group))

    def share(self, words: Tensor) -> Tensor:
        out = words.new_empty((self.size, *words.shape))
        _all_gather(out.view(-1), words.view(-1), self.group).wait()
        return out

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        out = rows.new_empty((sum(counts), *rows.shape[1:]))
        if _even(counts) and not self._is_gloo:
            rows = rows.contiguous()
            return Pending(out, [_all_gather(out, rows, self.group)], rows)
        # An all-gather takes equal sizes only. Else each rank's rows are broadcast to where they belong.
        pieces = out.split(list(counts))
        pieces[self.rank].copy_(rows)
        works = [self._broadcast(piece, rank) for rank, piece in enumerate(pieces) if counts[rank]]
        return Pending(out, works)

    def transpose(self, parts: Tensor, counts: Sequence[int]) -> Tensor:
        own = counts[self.rank]
        out = parts.new_empty(self.size * own)
        dist.all_to_all_single(out, parts.contiguous(), [own] * self.size, list(counts), group=self.group)
        return out.view(self.size, own)

    def reduce_scatter(self, parts: Tensor, counts: Sequence[int]) -> Pending:
        own, width = counts[self.rank], parts.shape[1]
        if _even(counts) and not self._is_gloo:
            out = parts.new_empty(own, width)
            return Pending(out, [_reduce_scatter(out, parts, self.group)], parts)
        received = parts.new_empty(self.size * own, width)
        sizes = [own] * self.size, list(counts)
        work = dist.all_to_all_single(received, parts, *sizes, group=self.group, async_op=True)
        return Pending(received, [work], parts, finish=lambda: received.view(self.size, own, width).sum(0))

    def _broadcast(self, values: Tensor, rank: int) -> Any:
        source = rank if self.group is None else dist.get_global_rank(self.group, rank)
        return dist.broadcast(values, source, group=self.group, async_op=True)

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values


def ranks_of(group: dist.ProcessGroup | Ranks | None) -> Ranks:
    """The ranks a ``group`` argument stands for; without an initialised process group, this one alone."""
    if isinstance(group, Ranks):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    ranks = ProcessGroupRanks(group)
    return Ranks() if ranks.size == 1 else ranks


def _even(counts: Sequence[int]) -> bool:
    return min(counts) == max(counts)


def _all_gather(out: Tensor, rows: Tensor, group: dist.ProcessGroup | None) -> Any:
    # torch 2.14 renamed the call; the floor of this project is older than that.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, rows, group=group, async_op=True)


def _reduce_scatter(out: Tensor, parts: Tensor, group: dist.ProcessGroup | None) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, parts, op=dist.ReduceOp.SUM, group=group, async_op=True)
