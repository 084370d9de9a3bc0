"""Run a test function on real gloo ranks, each in a process of its own.

``run_ranks(function, world_size, *args)`` starts ``world_size`` Python processes, initialises ``torch.distributed``
(gloo) in each, calls ``function(*args)`` there and returns the ranks' results in order. The function must live at the
top level of an importable module (``tests.distributed.…``), since it is found again by name. When a rank raises, or
the whole takes longer than ``timeout_s``, every process is killed and one ``AssertionError`` shows what each rank said:
a rank that waits for a dead one is as much part of the story as the one that died.

Ranks are forked from one process that has imported torch, DeepSpeed and open_clip (``rank_server.py`` beside this),
which starts with the first call, so a launch takes a fifth of a second and not six.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
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


@dataclass
class Rank:
    """One forked rank."""

    pid: int
    exit: Path
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, once the rank has ended."""
        if self.returncode is None and self.exit.exists():
            self.returncode = int(self.exit.read_text())
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            assert _server().poll() is None, "the process that ranks are forked from has ended"
            time.sleep(0.01)


def _start(work: Path, world_size: int) -> list[Rank]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([str(work), world_size]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that ranks are forked from has ended; it said why on standard error"
    return [Rank(pid, work / f"rank{rank}.exit") for rank, pid in enumerate(json.loads(answer))]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, patience_s: float = 2.0
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` gloo ranks; return their results, rank 0 first.

    When one fails, the others get ``patience_s`` to end by themselves.

    Raises:
        AssertionError: a rank raised, died or did not end within ``timeout_s``; the message holds every rank's output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = Path(folder)
        job = (function.__module__, function.__qualname__, args, timeout_s)
        (work / "job.pkl").write_bytes(pickle.dumps(job))
        ranks = _start(work, world_size)
        verdict = _wait(ranks, timeout_s, patience_s)
        if verdict is not None:
            raise AssertionError(verdict + "\n" + _stories(work, ranks))
        return [pickle.loads((work / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[Rank], timeout_s: float, patience_s: float) -> str | None:
    """Wait for all ranks; None if all ended well, else one line that says what went wrong (all are dead by then)."""
    deadline = time.monotonic() + timeout_s
    verdict = None
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed:
            patience = time.monotonic() + patience_s  # the others get a moment to say what they saw
            while any(process.poll() is None for process in ranks) and time.monotonic() < patience:
                time.sleep(0.02)
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(ranks) if process.poll() is None]
            verdict = f"ranks {alive} of {len(ranks)} were still running after {timeout_s:.0f} s"
            break
        time.sleep(0.02)
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()
    failed = [rank for rank, process in enumerate(ranks) if (process.returncode or 0) > 0]
    if verdict is None and any(process.returncode for process in ranks):
        verdict = f"ranks {failed} of {len(ranks)} failed"
    return verdict


def _stories(work: Path, ranks: list[Rank]) -> str:
    parts = []
    for rank, process in enumerate(ranks):
        text = (work / f"rank{rank}.log").read_text(errors="replace")
        parts.append(f"----- rank {rank} (exit {process.returncode}) -----\n{text[-6000:]}")
    return "\n".join(parts)


def be_rank(work: Path, rank: int, world_size: int) -> None:
    """Call the job's function and write down what it returns; ends the process."""
    module, name, args, timeout_s = pickle.loads((work / "job.pkl").read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{work}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        result = getattr(importlib.import_module(module), name)(*args)
        (work / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the interpreter's own end now and then aborts in gloo's threads, with the result long written
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            os._exit(error.code)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit may wait for a peer that will never come
