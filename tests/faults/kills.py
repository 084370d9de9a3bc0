"""SIGKILL at random moments: of one rank or of all, while starting, stepping and saving. Prints figures as JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from disco_ds.checkpoint import folder as files
from tests.helpers.forked import Job, import_everything, losses, start, train, write_run
from tests.helpers.ranks import ROOT

EVERY, STEPS = 4, 60


def main(folder: Path, moments: int, seed: int) -> dict:
    """Kill a run ``moments`` times, let it end, and compare with an unbroken one.

    Raises:
        AssertionError: a checkpoint does not verify, more than an interval was lost, a rank hung, or the losses differ.
    """
    import_everything()
    rng = random.Random(seed)
    config = write_run(folder, steps=STEPS)
    zero = rng.choice([1, 2, 3])
    arguments = ["--ds_config", str(ROOT / "ds_configs" / f"zero{zero}.json")]
    train(config, 2, *arguments, "--name", "unbroken")
    expected = losses(folder, "unbroken")
    assert list(expected) == list(range(1, STEPS + 1))
    counts: Counter[str] = Counter()
    lost = []
    for number in range(moments):
        kind = ("starting", "stepping", "stepping", "saving")[number % 4]
        whom = rng.choice([None, 0, 1])
        job = start(config, 2, *arguments)
        wait_for(job, kind, folder, rng)
        if not job.alive():  # it came to its end first: once more from the start
            assert job.wait() == [0, 0], job.output()
            counts["ended first"] += 1
            start_over(folder, counts)
            continue
        job.kill(whom)
        statuses = job.wait()
        assert whom is None or all(statuses), f"a peer ended well though rank {whom} was killed: {statuses}"
        if whom is not None and kind != "starting":
            assert f"rank {whom} is gone" in job.output(), f"rank {whom} was killed:\n{job.output()[-4000:]}"
        counts[f"{kind}, {'all ranks' if whom is None else 'one rank'}"] += 1
        lost.append(check(folder, expected))
    train(config, 2, *arguments)
    found = losses(folder)
    assert found == expected, {
        step: (found.get(step), loss) for step, loss in expected.items() if found.get(step) != loss
    }
    return {
        "moments": moments,
        "seed": seed,
        "zero_stage": zero,
        "kinds": counts,
        "steps_lost_each": lost,
        "every_steps": EVERY,
    }


def wait_for(job: Job, kind: str, folder: Path, rng: random.Random) -> None:
    """Until the run is at a random moment of this kind, or has ended."""
    deadline = time.monotonic() + 90
    checkpoints = folder / "run" / "checkpoints"
    if kind == "starting":
        pause(job, rng.uniform(0, 2.0))
        return
    begin = max(losses(folder), default=0)
    steps = rng.randint(1, 3 * EVERY)
    while job.alive() and time.monotonic() < deadline:
        reached = max(losses(folder), default=0)
        if kind == "stepping" and reached >= begin + steps:
            pause(job, rng.uniform(0, 0.1))
            return
        if kind == "saving" and reached > begin and files.find_unfinished(checkpoints):
            pause(job, rng.choice([0, 0, rng.uniform(0, 0.05)]))
            return
        time.sleep(0.0005 if kind == "saving" else 0.005)
    assert not job.alive(), f"{kind}: nothing happened for 90 s:\n{job.output()}"


def pause(job: Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while job.alive() and time.monotonic() < deadline:
        time.sleep(0.002)


def check(folder: Path, expected: dict[int, float]) -> int:
    """The steps lost by a kill; every checkpoint verifies, and what was logged is as in the unbroken run."""
    checkpoints = files.find_checkpoints(folder / "run" / "checkpoints")
    faults = {path.name: files.faults(path) for path in checkpoints if files.faults(path)}
    assert not faults, faults
    newest = files.step_of(checkpoints[0]) if checkpoints else 0
    done = losses(folder)
    assert all(expected[step] == loss for step, loss in done.items())
    reached = max(done, default=0)
    assert reached - newest <= EVERY, f"step {reached} was made, the newest checkpoint is of step {newest}"
    return max(reached - newest, 0)


def start_over(folder: Path, counts: Counter[str]) -> None:
    (folder / "run").rename(folder / f"ended-{counts['ended first']}")


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
