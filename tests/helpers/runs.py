"""Runs of launch/train.py on a tiny model that start in a second: their ranks are forked (``ranks.py``)."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.ranks import ROOT, Ranks, fork_ranks
from tests.helpers.shards import make_shards
from tests.helpers.tiny import TINY

TIMEOUT_S = 240
"""A run that has not ended by then hangs; on a loaded machine they take tens of seconds."""
MODEL = {
    **TINY,
    "vision_cfg": {**TINY["vision_cfg"], "width": 32, "layers": 1},
    "text_cfg": {**TINY["text_cfg"], "width": 32, "layers": 1},
    "embed_dim": 16,
}


def write_run(folder: Path, **fields: Any) -> Path:
    """A folder with shards, a model and run.yaml, for a run of a tiny model on them; returns the run file."""
    make_shards(folder / "train", [40, 30, 50, 20])
    make_shards(folder / "val", [21, 12], start=500)
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    run = {
        "name": "run", "runs_dir": str(folder), "steps": 60, "global_batch": 24,
        "model": {"name": str(folder / "tiny.json")},
        "data": {"train": str(folder / "train"), "workers": 0},
        "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": 4, "keep": 2}, "logging": {"every_steps": 1}, "timeout_minutes": 2,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **fields}))
    return folder / "run.yaml"


def ds_config(name: str | int) -> list[str]:
    """The flag for one of the shipped ds_configs, or for the one of a stage."""
    return ["--ds_config", f"zero{name}" if isinstance(name, int) else name]


def start(config: Path, ranks: int, *arguments: str, before: tuple[Callable[..., Any], Any] | None = None) -> Ranks:
    """Start ``launch/train.py --config CONFIG …``; ``before``: a function, and its argument, to call in each rank."""
    return fork_ranks(launch, ranks, ["--config", str(config), *arguments], before)


def launch(arguments: list[str], before: tuple[Callable[..., Any], Any] | None) -> None:
    """launch/train.py in this process."""
    if before is not None:
        before[0](before[1])
    script = str(ROOT / "launch" / "train.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def train(config: Path, ranks: int, *arguments: str, code: int = 0, **options: Any) -> str:
    """A run to its end; returns what its ranks printed."""
    job = start(config, ranks, *arguments, **options)
    statuses = job.wait(TIMEOUT_S)
    assert statuses == [code] * ranks, f"{statuses}:\n{job.output()}"
    return job.output()


def refused(config: Path, ranks: int, *arguments: str) -> str:
    """The one error that a run is refused with."""
    output = train(config, ranks, *arguments, code=2)
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert "Traceback" not in output, output
    return errors[0]


def wait_until(job: Ranks, happened: Callable[[], Any], pause_s: float = 0.01) -> bool:
    """Wait for something; False if the run has ended before."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        if not job.alive():
            return False
        assert time.monotonic() < deadline, job.output()
        time.sleep(pause_s)
    return True


def losses(folder: Path, name: str = "run") -> dict[int, float]:
    """Loss by step of a run's metrics.jsonl, as far as whole lines go."""
    path = folder / name / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}
