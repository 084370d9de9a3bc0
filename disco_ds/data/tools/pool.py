"""Work on many shards at once, one process a core: what the ``disco-data`` commands share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from disco_ds.data.workers import end_with_parent, start_method
from disco_ds.errors import DataError

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 2
"""Jobs handed out for each process: enough to keep it busy, few enough that their data fits into memory."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(function: Callable[[Job], Result], jobs: Iterable[Job], workers: int, bar: tqdm[Any]) -> Iterator[Result]:
    """``function(job)`` of every job, in the order in which they end; ``bar`` moves by one for each.

    Args:
        function: at the top level of a module; it and what it takes and gives must be picklable.
        jobs: taken as they are needed.
        workers: processes; 1: in this process.
        bar: see :func:`progress`.

    Raises:
        DataError: a process died.
    """
    if workers <= 1:
        for job in jobs:
            yield function(job)
            bar.update()
        return
    context = multiprocessing.get_context(start_method())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare)
    try:
        for result in _results(pool, function, iter(jobs), AHEAD * workers):
            yield result
            bar.update()
    except BrokenProcessPool as error:
        raise DataError(
            "a process died while it read shards. If it was out of memory, use fewer (--workers)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(
    pool: ProcessPoolExecutor, function: Callable[[Job], Result], jobs: Iterator[Job], ahead: int
) -> Iterator[Result]:
    running: set[Future[Result]] = set()
    ended: deque[Future[Result]] = deque()
    while True:
        for job in jobs:
            running.add(pool.submit(function, job))
            if len(running) >= ahead:
                break
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        ended.extend(done)
        while ended:
            yield ended.popleft().result()


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the first one answers
    end_with_parent()
    torch.set_num_threads(1)


def progress(total: int | None, what: str, unit: str = "shard") -> tqdm[Any]:
    """A line of progress on stderr, where that is a terminal; nothing elsewhere."""
    return tqdm(total=total, desc=what, unit=unit, disable=not sys.stderr.isatty(), file=sys.stderr, leave=False)
