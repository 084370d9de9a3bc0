"""The end of a run that cannot start: one line for each thing that is wrong, on whichever rank it is."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

_KEY = "disco_ds/cannot-start"
_PATIENCE = timedelta(seconds=5)


def fail(error: Exception) -> NoReturn:
    """Say what is wrong with the user's input, without a traceback, and exit with status 2.

    Most mistakes are seen by all ranks alike; rank 0 tells those. A rank that sees another one, since a file is missing
    on its machine alone, say, tells it too. Before the ranks know each other, the first of each machine speaks.
    """
    import torch.distributed as dist

    rank, message = int(os.environ.get("RANK", "0")), str(error)
    if not dist.is_available() or not dist.is_initialized():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _say(rank, message)
    elif rank == 0:
        _say(rank, message)  # first of all: the launcher ends this rank as soon as another has exited
        with suppress(Exception):  # not all have failed, or they are slow
            _store().set(_KEY, message)
            # the store may live in this process: it stays until the others have asked
            _store().wait([f"{_KEY}/{other}" for other in range(1, dist.get_world_size())], _PATIENCE)
    elif not _told_by_rank_0(rank, message):
        _say(rank, message)
    raise SystemExit(2)


def _told_by_rank_0(rank: int, message: str) -> bool:
    try:
        _store().wait([_KEY], _PATIENCE)
        told = _store().get(_KEY).decode() == message
        _store().set(f"{_KEY}/{rank}", "")
    except Exception:  # rank 0 is at something else, or gone
        return False
    return told


def _store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def _say(rank: int, message: str) -> None:
    print(f"[rank {rank}] error: {message}" if rank else f"error: {message}", file=sys.stderr, flush=True)
