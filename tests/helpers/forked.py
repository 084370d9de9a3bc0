"""Runs of launch/train.py that start in a second: ranks are forked from a process that has imported everything.

A kill test starts dozens of runs, and importing torch and DeepSpeed takes longer than what is tested. So the test runs
in a process of its own (``python -m tests.faults.…``), which has neither threads nor a process group when it forks.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.ranks import ROOT, rank_environment
from tests.helpers.shards import make_shards
from tests.helpers.tiny import TINY

STARTED_S = 90
"""A run that has not made a step, or not ended after its peers died, by then is taken to hang."""
MODEL = {**TINY, "text_cfg": {**TINY["text_cfg"], "width": 32, "layers": 1}, "embed_dim": 16}


def import_everything() -> None:
    """What a rank would import, once for all of them."""
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(1)
    import deepspeed
    import open_clip

    import disco_ds.run.train

    assert deepspeed, open_clip
    assert disco_ds.run.train


def write_run(folder: Path, **fields: Any) -> Path:
    """A folder with shards, a model and run.yaml, for a run of a tiny model on them; returns the run file."""
    make_shards(folder / "train", [40, 30, 50, 20])
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    run = {
        "name": "run", "runs_dir": str(folder), "steps": 60, "global_batch": 24,
        "model": {"name": str(folder / "tiny.json")},
        "data": {"train": str(folder / "train"), "workers": 0},
        "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": 4, "keep": 2}, "logging": {"every_steps": 1}, "timeout_minutes": 0.25,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **fields}))
    return folder / "run.yaml"


@dataclass
class Job:
    """The forked ranks of one run."""

    pids: list[int]
    log: Path

    def alive(self) -> list[int]:
        """Pids that have not ended; the statuses of those that have are kept."""
        for pid in self.pids:
            if pid not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.statuses]

    def __post_init__(self) -> None:
        self.statuses: dict[int, int] = {}

    def wait(self, timeout_s: float = STARTED_S) -> list[int]:
        """Exit statuses by rank, once all have ended.

        Raises:
            AssertionError: some are still running after ``timeout_s``; they are killed.
        """
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                hanging = [self.pids.index(pid) for pid in self.alive()]
                self.kill()
                raise AssertionError(f"ranks {hanging} were running after {timeout_s} s:\n{self.output()[-4000:]}")
            time.sleep(0.005)
        return [self.statuses[pid] for pid in self.pids]

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL to one rank, or to all of them at once."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self.statuses:
                os.kill(pid, signal.SIGKILL)
        if rank is None:
            self.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def start(config: Path, ranks: int, *arguments: str) -> Job:
    """Start ``launch/train.py --config CONFIG …`` on ``ranks`` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = config.parent / f"output-{time.monotonic_ns()}.log"
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank_environment(rank, ranks, port), config, arguments, log)
        pids.append(pid)
    return Job(pids, log)


def _be_rank(environment: dict[str, str], config: Path, arguments: tuple[str, ...], log: Path) -> None:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.update(environment)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        script = str(ROOT / "launch" / "train.py")
        sys.argv = [script, "--config", str(config), *arguments]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def train(config: Path, ranks: int, *arguments: str, code: int = 0) -> str:
    """A run to its end; returns what it printed."""
    job = start(config, ranks, *arguments)
    statuses = job.wait(timeout_s=240)
    assert statuses == [code] * ranks, f"{statuses}:\n{job.output()}"
    return job.output()


def losses(folder: Path, name: str = "run") -> dict[int, float]:
    """Loss by step of a run's metrics.jsonl, as far as whole lines go."""
    path = folder / name / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def run_script(module: str, folder: Path, *arguments: object, timeout_s: float) -> Any:
    """Run ``python -m MODULE FOLDER …`` (one of the scripts here) and return what its last line says, as JSON.

    Raises:
        AssertionError: it failed or took too long; the message holds what it printed.
    """
    command = [sys.executable, "-m", module, str(folder), *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{module} took more than {timeout_s} s: {process.communicate()[0][-6000:]}") from None
    assert process.returncode == 0, output[-10000:]
    return json.loads(output.splitlines()[-1])
