"""Real gloo ranks, each a process of its own, forked from one that has imported everything (``rank_server.py``).

``run_ranks`` calls a function on each rank of a gloo group and returns the results; ``fork_ranks`` starts processes
with the environment of ranks and leaves the rest to their function, as runs of ``launch/train.py`` do (``runs.py``).
The function must live at the top level of an importable module, since it is found again by name.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent.parent


def rank_environment(rank: int, world_size: int, port: int = 0) -> dict[str, str]:
    """The environment of one CPU rank: one thread, no accelerator, no extension builds."""
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }  # fmt: skip


def user_environment() -> dict[str, str]:
    """The environment of a user's shell on a machine without a GPU, for programs that are no rank (yet)."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in rank_environment(0, 1).items() if key not in ours}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@lru_cache(maxsize=1)
def _context() -> Any:
    """multiprocessing, with the server that ranks are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.rank_server"])
    with mock.patch.dict(os.environ, rank_environment(0, 1)):
        forkserver.ensure_running()
    atexit.register(_kill_all)  # before multiprocessing's own end, which would wait for them
    return context


def _kill_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


class Ranks:
    """Forked ranks; their statuses stay known after they have ended, their output as long as this object lives."""

    def __init__(self, folder: Path, processes: list[Any]) -> None:
        self.folder, self.processes = folder, processes
        self.pids = [process.pid for process in processes]
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def failed(self) -> list[int]:
        """The ranks that have ended with an error or by a signal."""
        return [rank for rank, process in enumerate(self.processes) if process.exitcode]

    def wait(self, timeout_s: float, until_one_fails: bool = False) -> list[int]:
        """Exit statuses by rank, negative for a signal, once all have ended, or one has failed.

        Raises:
            AssertionError: some are still running after ``timeout_s``; they are killed.
        """
        deadline = time.monotonic() + timeout_s
        while (alive := self.alive()) and not (until_one_fails and self.failed()):
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"ranks {alive} were still running after {timeout_s:.0f} s\n{self.output()}")
            time.sleep(0.005)
        return [process.exitcode for process in self.processes]

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL to one rank, or to all of them at once, and wait until these are gone."""
        killed = self.processes if rank is None else [self.processes[rank]]
        for process in killed:
            process.kill()
        for process in killed:
            process.join()

    def output(self) -> str:
        """What the ranks have printed, rank by rank."""
        parts = []
        for rank, process in enumerate(self.processes):
            path = self.folder / f"rank{rank}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            parts.append(f"----- rank {rank} (exit {process.exitcode}) -----\n{text[-20_000:]}")
        return "\n".join(parts)


def fork_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, group_timeout_s: float | None = None
) -> Ranks:
    """Start processes that call ``function(*args)`` with the environment of ranks.

    ``group_timeout_s``: gloo's time limit for the default process group, which they are to have made before; None for
    functions that make their own.
    """
    work, port = Path(tempfile.mkdtemp(prefix="ranks-")), free_port()
    (work / "job.pkl").write_bytes(pickle.dumps((function, args, group_timeout_s)))
    processes = [_context().Process(target=_be_rank, args=(work, rank, world_size, port)) for rank in range(world_size)]
    for process in processes:
        process.start()
    return Ranks(work, processes)


def _be_rank(work: Path, rank: int, world_size: int, port: int) -> None:
    """Call the job's function and write down what it returns; it never returns from here."""
    import torch.distributed as dist

    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # ends with it
    status = 1
    try:
        os.environ.update(rank_environment(rank, world_size, port))
        log = os.open(work / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            os.dup2(log, descriptor)
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        random.seed()
        function, args, group_timeout_s = pickle.loads((work / "job.pkl").read_bytes())
        if group_timeout_s is not None:
            timeout = timedelta(seconds=group_timeout_s)
            dist.init_process_group("gloo", f"file://{work}/store", timeout, world_size, rank)
        result = function(*args)
        (work / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
        if group_timeout_s is not None:
            dist.destroy_process_group()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # the interpreter's own end may wait for a peer that will never come, and now and then aborts in gloo's threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, patience_s: float = 2.0
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` gloo ranks; return their results, rank 0 first.

    When one fails, the others get ``patience_s`` to end by themselves.

    Raises:
        AssertionError: a rank raised, died or did not end within ``timeout_s``; the message holds every rank's output.
    """
    ranks = fork_ranks(function, world_size, *args, group_timeout_s=timeout_s)
    ranks.wait(timeout_s, until_one_fails=True)
    deadline = time.monotonic() + patience_s  # the others get a moment to say what they saw
    while ranks.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    failed = ranks.failed()
    ranks.kill()
    if failed:
        raise AssertionError(f"ranks {failed} of {world_size} failed\n{ranks.output()}")
    return [pickle.loads((ranks.folder / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)]
