"""Resuming after what goes wrong with a disk, and on other ranks; each scenario in a folder of its own.

Prints the names of the scenarios and what is worth noting of each, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import yaml

from disco_ds.checkpoint import folder as files
from tests.helpers.forked import import_everything, losses, start, train, write_run
from tests.helpers.ranks import ROOT


def stage(number: int) -> list[str]:
    return ["--ds_config", str(ROOT / "ds_configs" / f"zero{number}.json")]


def close(found: dict[int, float], expected: dict[int, float]) -> float:
    """The largest relative difference of two loss curves over the same steps."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return max(abs(found[step] / expected[step] - 1) for step in expected)


def other_ranks(folder: Path) -> dict:
    """World 4 → 2 → 4, and from ZeRO 2 to 3 to 1 on the way, against a run that was never broken."""
    config = write_run(folder, steps=12)
    train(config, 4, *stage(2), "--name", "unbroken")
    expected = losses(folder, "unbroken")
    train(config, 4, *stage(2), "--steps", "4")
    output = train(config, 2, *stage(3), "--steps", "8")
    assert "going on from step-00000004" in output, output
    train(config, 4, *stage(1))
    worst = close(losses(folder), expected)
    assert worst < 1e-5, worst
    return {"worst relative difference of a loss": worst}


def damage(folder: Path) -> dict:
    """The newest checkpoint is damaged: the one before it is taken, with the reason; none whole: an error."""
    config = write_run(folder, steps=12, checkpoint={"every_steps": 4, "keep": 3})
    train(config, 2)
    expected = losses(folder)
    checkpoints = folder / "run" / "checkpoints"
    newest = files.find_checkpoints(checkpoints)[0]
    flip_a_bit(next((newest / "engine").glob("*rank_1*optim_states.pt")))
    (folder / "run" / "result.json").unlink()
    output = train(config, 2)
    assert "going on from step-00000008" in output, output
    assert "passed over: step-00000012 (engine/" in output, output
    assert "other content than was saved" in output, output
    assert losses(folder) == expected
    assert not files.faults(newest)  # written anew
    (newest / files.MANIFEST).unlink()
    truncated = next((checkpoints / "step-00000008" / "engine").glob("*model_states.pt"))
    truncated.write_bytes(truncated.read_bytes()[:-10])
    assert "going on from step-00000004" in train(config, 2, "--steps", "5")
    for path in files.find_checkpoints(checkpoints):
        (path / "random-rank0.pt").unlink()
    before = sorted(path.name for path in checkpoints.iterdir())
    output = train(config, 2, code=2)
    assert "error: none of the 2 checkpoints in" in output, output
    assert sorted(path.name for path in checkpoints.iterdir()) == before
    return {}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_run(folder: Path) -> dict:
    """A changed model or optimizer is refused; changed hyperparameters take effect."""
    config = write_run(folder, steps=4)
    train(config, 2)
    for words, said in {
        ("--model.freeze", "image"): "holds another model",
        ("--optimizer.name", "lion"): "was saved with optimizer.name adamw, this run has lion",
        ("--resume", str(folder / "nowhere")): "is no checkpoint",
        ("--seed", "5"): "seed was 0",
        ("--global_batch", "12"): "was saved with a global batch of 24, this run has 12",
        ("--data.lanes", "3"): "data.lanes 3 is not a multiple of the 2 ranks",
        ("--runs_dir", "/proc/nowhere"): "runs_dir: nothing can be written to /proc/nowhere/run",
    }.items():
        output = train(config, 2, *words, code=2)
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, output
        assert said in errors[0], output
    train(config, 2, "--steps", "8", "--optimizer.weight_decay", "0.9", "--optimizer.lr", "2e-3")
    line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["lr"]) == (8, 2e-3)
    return {}


def own_config(folder: Path) -> dict:
    """A run's config.yaml says what it ran with, the ds_config's part too, and starts it again."""
    config = write_run(folder, global_batch=None, steps=4)
    ds_config = folder / "ds_config.json"
    batch = {"train_batch_size": 24, "gradient_accumulation_steps": 2}
    ds_config.write_text(json.dumps({**batch, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    train(config, 2, "--ds_config", str(ds_config))
    saved = folder / "run" / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    found = content["global_batch"], content["precision"], content["optimizer"]["clip_norm"], content["micro_batch"]
    assert found == (24, "fp32", 0.5, None)
    assert "going on from step-00000004" in train(saved, 2, "--ds_config", str(ds_config), "--steps", "6")
    assert "going on from step-00000006" in train(saved, 1, *stage(1), "--micro_batch", "6", "--steps", "8")
    assert max(losses(folder)) == 8
    return {}


def going_back(folder: Path) -> dict:
    """--resume CHECKPOINT of the run's own takes another way from there; what was saved after it is moved aside."""
    config = write_run(folder, steps=16, checkpoint={"every_steps": 4, "keep": 3})
    train(config, 2)
    expected, checkpoints = losses(folder), folder / "run" / "checkpoints"
    back = checkpoints / "step-00000008"
    output = train(config, 2, "--resume", str(back), "--steps", "10", "--optimizer.lr", "2e-3")
    assert "going on from step-00000008" in output, output
    assert f"another way from step 8: the checkpoints that this run leaves behind are now in {checkpoints}" in output
    assert sorted(path.name for path in (checkpoints / "aside-1").iterdir()) == ["step-00000012", "step-00000016"]
    assert not any(map(files.faults, (checkpoints / "aside-1").iterdir()))
    output = train(config, 2, "--optimizer.lr", "2e-3")  # goes on along the new way
    assert "going on from step-00000010" in output, output
    assert [path.name for path in files.find_checkpoints(checkpoints)][:2] == ["step-00000016", "step-00000012"]
    found = losses(folder)
    assert {k: v for k, v in found.items() if k <= 9} == {k: v for k, v in expected.items() if k <= 9}
    assert found[16] != expected[16]
    elsewhere = checkpoints / "aside-1" / "step-00000012"
    output = train(config, 2, "--resume", str(elsewhere), "--steps", "13")  # back to the way that was left
    assert f"are now in {checkpoints / 'aside-2'}" in output, output
    assert [path.name for path in files.find_checkpoints(checkpoints)] == ["step-00000013"]
    assert len(files.find_checkpoints(checkpoints / "aside-2")) == 3
    assert losses(folder)[13] == expected[13]
    return {}


def signals(folder: Path) -> dict:
    """SIGUSR1 to one rank saves and goes on; SIGTERM saves and ends; every N-th checkpoint is kept."""
    config = write_run(folder, steps=100_000, checkpoint={"keep": 1, "keep_every_steps": 5, "every_steps": None})
    job = start(config, 2)
    checkpoints = folder / "run" / "checkpoints"
    for count in range(1, 4):
        wait_until(job, lambda: len(losses(folder)) > 3)
        os.kill(job.pids[count % 2], signal.SIGUSR1)
        seen = files.find_checkpoints(checkpoints)[:1]
        wait_until(job, lambda seen=seen: files.find_checkpoints(checkpoints)[:1] != seen)
    os.kill(job.pids[1], signal.SIGTERM)
    statuses = job.wait()
    assert statuses == [0, 0], job.output()
    assert "stopped by SIGTERM at step" in job.output(), job.output()
    train(
        config,
        2,
        "--steps",
        str(files.step_of(files.find_checkpoints(checkpoints)[0]) + 12),
        "--checkpoint.every_steps",
        "1",
    )
    steps = [files.step_of(path) for path in files.find_checkpoints(checkpoints)]
    assert all(step % 5 == 0 for step in steps[1:]), steps
    assert len(steps) >= 3, steps
    return {}


def wait_until(job, happened) -> None:
    deadline = time.monotonic() + 90
    while not happened():
        assert job.alive(), job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.01)


def full_disk(folder: Path) -> dict:
    """A disk with room for two checkpoints and a half: the third fails, training goes on, then there is room again."""
    probe = write_run(folder, steps=2)
    train(probe, 1, "--name", "probe")
    size = sum(f.stat().st_size for f in (folder / "probe" / "checkpoints").rglob("*") if f.is_file())
    disk = folder / "disk"
    disk.mkdir()
    with small_disk(disk, int(2.5 * size)) as small:
        config = write_run(folder, runs_dir=str(disk), steps=12, checkpoint={"every_steps": 2, "keep": 3})
        output = train(config, 1, code=1)
        checkpoints = disk / "run" / "checkpoints"
        assert "WARNING: " in output, output
        assert "step-00000006 was not saved" in output, output
        assert "No space left on device" in output, output
        assert "Training goes on" in output, output
        lines = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert lines[-1]["failed_saves"] == 3, lines[-1]  # steps 6, 8 and 10; that of 12, the last, is an error
        assert "step-00000012 was not saved" in output, output
        found = files.find_checkpoints(checkpoints)
        assert [path.name for path in found] == ["step-00000004", "step-00000002"]
        assert not any(map(files.faults, found))
        assert not files.find_unfinished(checkpoints)
        pruned = subprocess.run(
            [sys.executable, "-m", "disco_ds.cli.ckpt", "prune", str(disk / "run"), "--keep", "1"],
            capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        assert pruned.returncode == 0, pruned
        output = train(config, 1, "--checkpoint.keep", "1")
        assert "going on from step-00000004" in output, output
        assert [path.name for path in files.find_checkpoints(checkpoints)] == ["step-00000012"]
        expected = losses(disk)
    return {"by": "tmpfs" if small else "a writer that fails", "steps": len(expected)}


@contextmanager
def small_disk(folder: Path, size: int):
    """A tmpfs of ``size`` bytes on ``folder`` where root may mount one; else writes beyond it are made to fail."""
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    ).returncode  # fmt: skip
    if mounted:
        try:
            yield True
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    from disco_ds.checkpoint import writer as checkpoint_writer

    whole = checkpoint_writer._Hashed.write

    def write(self, data):
        used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        if used + len(data) > size:
            raise OSError(28, "No space left on device")
        return whole(self, data)

    checkpoint_writer._Hashed.write = write  # type: ignore[method-assign]  # the ranks are forked with it
    try:
        yield False
    finally:
        checkpoint_writer._Hashed.write = whole  # type: ignore[method-assign]


SCENARIOS = (other_ranks, damage, other_run, own_config, going_back, signals, full_disk)


def main(folder: Path, names: list[str]) -> dict:
    import_everything()
    told = {}
    for scenario in SCENARIOS:
        if not names or scenario.__name__ in names:
            (folder / scenario.__name__).mkdir()
            print(scenario.__name__, flush=True)
            told[scenario.__name__] = scenario(folder / scenario.__name__)
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
