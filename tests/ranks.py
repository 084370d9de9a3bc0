"""Run a test function on real gloo ranks, each in a process of its own.

``run_ranks(function, world_size, *args)`` starts ``world_size`` Python processes, initialises ``torch.distributed``
(gloo) in each, calls ``function(*args)`` there and returns the ranks' results in order. The function must live at the
top level of an importable module (``tests.distributed.…``), since it is found again by name. When a rank raises, or
the whole takes longer than ``timeout_s``, every process is killed and one ``AssertionError`` shows what each rank said:
a rank that waits for a dead one is as much part of the story as the one that died.

Starting Python with torch and DeepSpeed costs seconds, so put many cases into one function.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


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


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    patience_s: float = 2.0,
    env: dict[str, str] | None = None,
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
        ranks = []
        for rank in range(world_size):
            log = (work / f"rank{rank}.log").open("wb")
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks", str(work)],
                    cwd=ROOT,
                    env={**rank_environment(rank, world_size), **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
            log.close()
        verdict = _wait(ranks, timeout_s, patience_s)
        if verdict is not None:
            raise AssertionError(verdict + "\n" + _stories(work, ranks))
        return [pickle.loads((work / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[subprocess.Popen], timeout_s: float, patience_s: float) -> str | None:
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
    failed = [rank for rank, process in enumerate(ranks) if process.returncode > 0]
    if verdict is None and any(process.returncode for process in ranks):
        verdict = f"ranks {failed} of {len(ranks)} failed"
    return verdict


def _stories(work: Path, ranks: list[subprocess.Popen]) -> str:
    parts = []
    for rank, process in enumerate(ranks):
        text = (work / f"rank{rank}.log").read_text(errors="replace")
        parts.append(f"----- rank {rank} (exit {process.returncode}) -----\n{text[-6000:]}")
    return "\n".join(parts)


def _main(folder: str) -> None:
    work = Path(folder)
    rank = int(os.environ["RANK"])
    module, name, args, timeout_s = pickle.loads((work / "job.pkl").read_bytes())
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{work}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        result = getattr(importlib.import_module(module), name)(*args)
        (work / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the interpreter's own end now and then aborts in gloo's threads, with the result long written
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit may wait for a peer that will never come


if __name__ == "__main__":
    _main(sys.argv[1])
