"""SIGKILL at random moments: of one rank or of all, while starting, stepping and saving.

What is kept, what is lost, and that the run ends as if it had never been broken.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from disco_ds.checkpoint import folder as files
from tests.helpers.ranks import Ranks
from tests.helpers.runs import TIMEOUT_S, ds_config, losses, start, train, wait_until, write_run

EVERY, STEPS = 4, 60


@pytest.mark.parametrize("moments", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_is_lost_by_kills(tmp_path, seed, moments):
    """Kill a run again and again, let it end, and compare with an unbroken one."""
    rng = random.Random(seed)
    # a peer that waits for a rank that never came to the store gives up after twice this, or a little later
    config = write_run(tmp_path, steps=STEPS, timeout_minutes=0.5)
    arguments = ds_config(rng.choice([1, 2, 3]))
    train(config, 2, *arguments, "--name", "unbroken")
    expected = losses(tmp_path, "unbroken")
    assert list(expected) == list(range(1, STEPS + 1))
    for number in range(moments):
        kind = ("starting", "stepping", "stepping", "saving")[number % 4]
        whom = rng.choice([None, 0, 1])
        job = start(config, 2, *arguments)
        wait_for(job, kind, tmp_path, rng)
        if not job.alive():  # it came to its end first: once more from the start
            assert job.wait(0) == [0, 0], job.output()
            (tmp_path / "run").rename(tmp_path / f"ended-{number}")
            continue
        job.kill(whom)
        statuses = job.wait(TIMEOUT_S)
        assert whom is None or all(statuses), f"a peer ended well though rank {whom} was killed: {statuses}"
        if whom is not None and kind != "starting":
            assert f"rank {whom} is gone" in job.output(), f"rank {whom} was killed:\n{job.output()}"
        check(tmp_path, expected)
    train(config, 2, *arguments)
    assert losses(tmp_path) == expected


def wait_for(job: Ranks, kind: str, folder: Path, rng: random.Random) -> None:
    """Until the run is at a random moment of this kind, or has ended."""
    begin, steps = max(losses(folder), default=0), rng.randint(1, 3 * EVERY)

    def reached(step: int) -> bool:
        return max(losses(folder), default=0) >= step

    if kind == "stepping":
        wait_until(job, lambda: reached(begin + steps), 0.005)
    elif kind == "saving":
        checkpoints = folder / "run" / "checkpoints"
        wait_until(job, lambda: reached(begin + 1) and files.find_unfinished(checkpoints), 0.0005)
    longest = {"starting": 2.0, "stepping": 0.1, "saving": rng.choice([0, 0, 0.05])}[kind]
    time.sleep(rng.uniform(0, longest))


def check(folder: Path, expected: dict[int, float]) -> None:
    """No more than an interval is lost; every checkpoint verifies, and what was logged is as in the unbroken run."""
    checkpoints = files.find_checkpoints(folder / "run" / "checkpoints")
    faults = {path.name: files.faults(path) for path in checkpoints if files.faults(path)}
    assert not faults, faults
    newest = files.step_of(checkpoints[0]) if checkpoints else 0
    done = losses(folder)
    assert all(expected[step] == loss for step, loss in done.items())
    reached = max(done, default=0)
    assert reached - newest <= EVERY, f"step {reached} was made, the newest checkpoint is of step {newest}"
