"""Some thousand steps, with saves and evaluations between: memory, files, threads and processes do not grow.

Prints what was seen along the way, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.helpers.forked import Job, import_everything, losses, start, write_run
from tests.helpers.shards import make_shards

SETTLED = 0.25
"""The share of the run after which nothing grows any more: caches and allocators have settled."""
GROWTH_BYTES = 24 << 20
"""More resident memory than this from then to the end is a leak: at 2,000 steps that would be 16 KB a step."""


def main(folder: Path, steps: int) -> dict:
    """Train on two ranks and look at both now and then.

    Raises:
        AssertionError: something grew.
    """
    import_everything()
    make_shards(folder / "val", [21, 12], start=500)
    config = write_run(
        folder, steps=steps, checkpoint={"every_steps": steps // 20, "keep": 2}, logging={"every_steps": 5},
        evaluation={"every_steps": steps // 8}, timeout_minutes=3,
        data={"train": str(folder / "train"), "val": str(folder / "val"), "workers": 1},
    )  # fmt: skip
    job = start(config, 2)
    seen = watch(job, folder, steps)
    assert job.wait() == [0, 0], job.output()
    settled = [row for row in seen if row["step"] >= SETTLED * steps]
    assert len(settled) >= 5, seen
    for rank in (0, 1):
        first, last = settled[0]["ranks"][rank], settled[-1]["ranks"][rank]
        assert last["bytes"] - first["bytes"] < GROWTH_BYTES, seen
        for what in ("files", "threads", "children"):
            rows = [row["ranks"][rank][what] for row in settled]
            # what leaks is there in every look at the end; a file that is open for a moment is not
            assert min(rows[-len(rows) // 4 :]) <= max(rows[: len(rows) // 2]), (what, rows)
    return {"steps": steps, "seen": [settled[0], settled[-1]]}


def watch(job: Job, folder: Path, steps: int) -> list[dict]:
    seen, next_step = [], 0
    while job.alive() == job.pids:
        step = max(losses(folder), default=0)
        if step >= next_step:
            rows = [look(pid) for pid in job.pids]
            if all(rows):
                seen.append({"step": step, "ranks": rows})
            next_step = step + steps // 24
        time.sleep(0.05)
    return seen


def look(pid: int) -> dict[str, int] | None:
    """What a process holds; None if it has just ended."""
    proc = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
        return {
            "bytes": 1024 * int(status["VmRSS"].split()[0]),
            "files": len(list((proc / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "children": len((proc / "task" / str(pid) / "children").read_text().split()),
        }
    except (OSError, KeyError):
        return None


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
