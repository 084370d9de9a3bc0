"""Ranks that act as one: rank 0 does and tells, all agree, all fail together.

Torch is imported when a process group is asked for, so that a command line can be refused before that takes seconds.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from disco_ds.errors import CheckpointError, ConfigError, DataError

Result = TypeVar("Result")

_KEY = "disco_ds/cannot-start"
_PATIENCE = timedelta(seconds=5)


def rank() -> int:
    """This process's rank, known before the process group is."""
    return int(os.environ.get("RANK", "0"))


def prepare_environment() -> None:
    """Set what a launcher would have set: without one, a process is the only rank. Call before deepspeed is imported,
    which otherwise looks for an accelerator where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def everyones(value: Result, group: Any = None) -> list[Result]:
    """The (picklable) values of all ranks, rank 0's first, on every rank. A collective."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_rank_0(action: Callable[[], Result], *, failure: str | None = None) -> Result:
    """Run ``action`` on rank 0 only; every rank gets its result, or raises its error. A collective.

    Args:
        failure: what it means when the disk refuses: an OSError becomes the CheckpointError "FAILURE: …".
    """
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (ConfigError, DataError, CheckpointError, OSError) as error:
            disk = failure is not None and isinstance(error, OSError)
            outcome[1] = CheckpointError(f"{failure}: {error}") if disk else error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def any_rank(*wishes: bool, group: Any = None) -> list[bool]:
    """What any rank wishes, all ranks get: a signal or a clock may reach one a step before another. A collective."""
    import torch
    import torch.distributed as dist

    flags = torch.tensor(wishes, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags]


def mean_over_ranks(value: Any) -> float:
    """Mean of a 0-dim tensor over ranks. A collective, and it waits for the device."""
    import torch.distributed as dist

    total = value.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def fail(error: Exception) -> NoReturn:
    """Say what is wrong with the user's input, without a traceback, and exit with status 2.

    Most mistakes are seen by all ranks alike; rank 0 tells those. A rank that sees another one, since a file is missing
    on its machine alone, say, tells it too. Before the ranks know each other, the first of each machine speaks.
    """
    message, at = str(error), f"[rank {rank()}] " if rank() else ""
    dist = sys.modules.get("torch.distributed")  # not imported: the command line was refused before that
    together = dist is not None and dist.is_initialized()
    if not (_told_by_rank_0(message) if together else os.environ.get("LOCAL_RANK", "0") != "0"):
        # rank 0 first of all: the launcher ends it as soon as another has exited
        print(f"{at}error: {message}", file=sys.stderr, flush=True)
    if dist is not None and together and rank() == 0:
        with suppress(Exception):  # not all have failed, or they are slow
            _store().set(_KEY, message)
            # the store may live in this process: it stays until the others have asked
            _store().wait([f"{_KEY}/{other}" for other in range(1, dist.get_world_size())], _PATIENCE)
    raise SystemExit(2)


def _told_by_rank_0(message: str) -> bool:
    if rank() == 0:
        return False
    try:
        _store().wait([_KEY], _PATIENCE)
        told = _store().get(_KEY).decode() == message
        _store().set(f"{_KEY}/{rank()}", "")
    except Exception:  # rank 0 is at something else, or gone
        return False
    return told


def _store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()
