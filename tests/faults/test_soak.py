"""Many steps of a tiny model, with saves and evaluations between: memory, files, threads and processes do not grow."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.ranks import Ranks
from tests.helpers.runs import TIMEOUT_S, losses, start, write_run

GROWTH_BYTES = 24 << 20
"""More resident memory than this from then to the end is a leak: at 2,000 steps that would be 16 KB a step, at 320 a
rank's batch."""


@pytest.mark.parametrize("steps", [320, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_grows(tmp_path, steps):
    """Train on two ranks and look at both now and then."""
    config = write_run(
        tmp_path, steps=steps, checkpoint={"every_steps": steps // 20, "keep": 2}, logging={"every_steps": 5},
        evaluation={"every_steps": steps // 8}, timeout_minutes=3,
        data={"train": str(tmp_path / "train"), "val": str(tmp_path / "val"), "workers": 1},
    )  # fmt: skip
    job = start(config, 2)
    seen = watch(job, tmp_path, steps)
    assert job.wait(TIMEOUT_S) == [0, 0], job.output()
    settled = [row for row in seen if row["step"] >= steps / 4]  # caches and allocators have their size by then
    assert len(settled) >= 5, seen
    for rank in (0, 1):
        first, last = settled[0]["ranks"][rank], settled[-1]["ranks"][rank]
        assert last["bytes"] - first["bytes"] < GROWTH_BYTES, seen
        for what in ("files", "threads", "children"):
            rows = [row["ranks"][rank][what] for row in settled]
            # what leaks is there in every look at the end; a file that is open for a moment is not
            assert min(rows[-len(rows) // 4 :]) <= max(rows[: len(rows) // 2]), (what, rows)


def watch(job: Ranks, folder: Path, steps: int) -> list[dict]:
    """What both ranks hold, now and then until one has ended."""
    seen, next_step = [], 0
    while len(job.alive()) == 2:
        step = max(losses(folder), default=0)
        if step >= next_step:
            with contextlib.suppress(psutil.Error):  # it has just ended
                seen.append({"step": step, "ranks": [look(psutil.Process(pid)) for pid in job.pids]})
            next_step = step + steps // 24
        time.sleep(0.05)
    return seen


def look(process: psutil.Process) -> dict[str, int]:
    return {
        "bytes": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }
