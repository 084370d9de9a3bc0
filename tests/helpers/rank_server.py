"""The process that ``ranks.py`` has its ranks forked from: everything is imported once.

Each line of standard input is a job, ``[folder, world_size, port]``; the answer is the list of pids. When rank r has
ended, its exit code is in ``rank{r}.exit`` of the folder. The end of the input is the end of this process and of all
ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import resource
import select
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from tests.helpers.ranks import rank_environment

IMPORTED = (
    "disco_ds.run.train",
    "disco_ds.cli.train",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # compiles a function: torch's inductor, three seconds
    "open_clip",
    "matplotlib.pyplot",
    "jinja2",
    "pytest",
)
"""What ranks would import, once for all of them."""


def serve() -> None:
    """Fork ranks until nobody asks any more."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compilers, which its import would start
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # ZeRO 3 collects garbage for each engine: half a second where all modules are looked through
    ranks: dict[int, Path] = {}
    unread = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            received = os.read(0, 65536)
            if not received:
                break
            *jobs, unread = (unread + received).split(b"\n")
            for job in jobs:
                folder, world_size, port = json.loads(job)
                pids = [fork(Path(folder), rank, world_size, port) for rank in range(world_size)]
                ranks.update({pid: Path(folder) / f"rank{rank}.exit" for rank, pid in enumerate(pids)})
                os.write(1, (json.dumps(pids) + "\n").encode())
        reap(ranks)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def fork(work: Path, rank: int, world_size: int, port: int) -> int:
    """Start one rank, with its output in ``rank{r}.log``; it never returns from here."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(rank_environment(rank, world_size, port))
        log = os.open(work / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        random.seed()
        be_rank(work, rank, world_size)
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


def be_rank(work: Path, rank: int, world_size: int) -> None:
    """Call the job's function and write down what it returns."""
    import torch.distributed as dist

    function, args, group_timeout_s = pickle.loads((work / "job.pkl").read_bytes())
    if group_timeout_s is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{work}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )  # fmt: skip
    result = function(*args)
    (work / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
    if group_timeout_s is not None:
        dist.destroy_process_group()


def reap(ranks: dict[int, Path]) -> None:
    """Write down the exit codes of ranks that have ended."""
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        path = ranks.pop(pid)
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):  # nobody waits for it any more
            part.write_text(str(os.waitstatus_to_exitcode(status)))
            part.rename(path)


if __name__ == "__main__":
    serve()
