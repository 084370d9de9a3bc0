"""Real gloo ranks, each a process of its own, forked from one that has imported everything (``rank_server.py``).

``run_ranks(function, world_size, *args)`` initialises ``torch.distributed`` (gloo) in each rank, calls
``function(*args)`` there and returns the ranks' results in order. The function must live at the top level of an
importable module (``tests.engine.…``), since it is found again by name. When a rank raises, or the whole takes longer
than ``timeout_s``, every process is killed and one ``AssertionError`` shows what each rank said, those too that only
waited for a dead one.

``fork_ranks`` starts processes with the environment of ranks and leaves the rest to their function; the runs of
``launch/train.py`` (``runs.py`` beside this) are started so.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def rank_environment(rank: int, world_size: int, port: int | None = None) -> dict[str, str]:
    """The environment of one CPU rank: one thread, no accelerator, no extension builds."""
    env = dict(os.environ)
    env.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    )  # fmt: skip
    if port is not None:
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return env


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
def _server() -> subprocess.Popen:
    """The process that ranks are forked from; it ends with this one, and its ranks with it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.rank_server"],
        cwd=ROOT, env=rank_environment(0, 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return server


class Ranks:
    """Forked ranks; their statuses stay known after they have ended, their output as long as this object lives."""

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.folder, self.pids = folder, pids
        self.statuses: dict[int, int] = {}
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        for rank in range(len(self.pids)):
            path = self.folder / f"rank{rank}.exit"
            if rank not in self.statuses and path.exists():
                self.statuses[rank] = int(path.read_text())
        assert _server().poll() is None, "the process that ranks are forked from has ended"
        return [rank for rank in range(len(self.pids)) if rank not in self.statuses]

    def failed(self) -> list[int]:
        """The ranks that have ended with an error or by a signal."""
        self.alive()
        return sorted(rank for rank, status in self.statuses.items() if status)

    def wait(self, timeout_s: float, until_one_fails: bool = False) -> list[int]:
        """Exit statuses by rank, negative for a signal, once all have ended, or one has failed.

        Raises:
            AssertionError: some are still running after ``timeout_s``; they are killed.
        """
        deadline = time.monotonic() + timeout_s
        while (alive := self.alive()) and not (until_one_fails and self.failed()):
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"ranks {alive} of {len(self.pids)} were still running after {timeout_s:.0f} s\n{self.output()}"
                )
            time.sleep(0.005)
        return [self.statuses[rank] for rank in sorted(self.statuses)]

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL to one rank, or to all of them at once, and wait until these are gone."""
        alive = self.alive()
        killed = alive if rank is None else [rank] if rank in alive else []
        for each in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[each], signal.SIGKILL)
        while set(killed) & set(self.alive()):
            time.sleep(0.005)

    def output(self) -> str:
        """What the ranks have printed, rank by rank."""
        parts = []
        for rank in range(len(self.pids)):
            path = self.folder / f"rank{rank}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            parts.append(f"----- rank {rank} (exit {self.statuses.get(rank)}) -----\n{text[-20_000:]}")
        return "\n".join(parts)


def fork_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, group_timeout_s: float | None = None
) -> Ranks:
    """Start processes that call ``function(*args)`` with the environment of ranks.

    ``group_timeout_s``: gloo's time limit for the default process group, which they are to have made before; None for
    functions that make their own.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    work = Path(tempfile.mkdtemp(prefix="ranks-"))
    (work / "job.pkl").write_bytes(pickle.dumps((function, args, group_timeout_s)))
    server.stdin.write(json.dumps([str(work), world_size, free_port()]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that ranks are forked from has ended; it said why on standard error"
    return Ranks(work, json.loads(answer))


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
