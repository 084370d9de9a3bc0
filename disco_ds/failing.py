"""The end of a run that cannot start: one line for each thing that is wrong, on whichever rank it is."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

_KEY = "disco_ds/cannot-start"
_PATIENCE = timedelta(seconds=5)


def fail(error: Exception) -> NoReturn:
    """Say what is wrong with the user's input, without a traceback, and exit with status 2.

    Most mistakes are seen by all ranks alike; rank 0 tells those. A rank that sees another one, since a file is missing
    on its machine alone, say, tells it too. Before the ranks know each other, the first of each machine speaks.
    """
    rank = int(os.environ.get("RANK", "0"))
    if _to_be_told(str(error), rank):
        print(f"[rank {rank}] error: {error}" if rank else f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _to_be_told(message: str, rank: int) -> bool:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    try:
        if rank == 0:
            store.set(_KEY, message)
            if ranks > 1:  # the store may live in this process: it waits until the others have asked
                store.wait([f"{_KEY}/{other}" for other in range(1, ranks)], _PATIENCE)
            return True
        store.wait([_KEY], _PATIENCE)
        told = store.get(_KEY).decode() == message
        store.set(f"{_KEY}/{rank}", "")
        return not told
    except Exception:  # rank 0 is at something else, or gone; or not all have failed
        return True
