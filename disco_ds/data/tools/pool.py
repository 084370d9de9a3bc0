"""Work on many shards at once, one process a core: what the ``disco-data`` commands share."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

import torch

from disco_ds.data.loader import START_METHOD, end_with_parent, warm_up
from disco_ds.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 2
"""Jobs handed out for each process: enough to keep it busy, few enough that their data fits into memory."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(function: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """``function(job)`` of every job, in the order in which they end.

    Args:
        function: at the top level of a module; it and what it takes and gives must be picklable.
        jobs: taken as they are needed.
        workers: processes; 1: in this process.

    Raises:
        DataError: a process died.
    """
    if workers <= 1:
        yield from map(function, jobs)
        return
    jobs = iter(jobs)
    warm_up(function)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(START_METHOD), initializer=_prepare)
    try:
        running = {pool.submit(function, job) for job in islice(jobs, AHEAD * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(function, job) for job in islice(jobs, len(done))}
            for future in done:
                yield future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process died while it read shards. If it was out of memory, use fewer (--workers)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the first one answers
    end_with_parent()
    torch.set_num_threads(1)
