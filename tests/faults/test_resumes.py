"""Resuming on other ranks and stages, after damage, with a full disk, after signals, back from an earlier step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from disco_ds.checkpoint import folder as files
from disco_ds.cli.ckpt import main as ckpt
from tests.helpers.runs import TIMEOUT_S, ds_config, losses, refused, start, train, wait_until, write_run


def test_other_ranks(tmp_path):
    """World 4 → 2 → 4, and from ZeRO 2 to 3 to 1 on the way, against a run that was never broken."""
    config = write_run(tmp_path, steps=12)
    train(config, 4, *ds_config(2), "--name", "unbroken")
    expected = losses(tmp_path, "unbroken")
    train(config, 4, *ds_config(2), "--steps", "4")
    output = train(config, 2, *ds_config(3), "--steps", "8")
    assert "going on from step-00000004" in output, output
    train(config, 4, *ds_config(1))
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5, abs=0)


def test_damage(tmp_path):
    """The newest checkpoint is damaged: the one before it is taken, with the reason; none whole: an error."""
    config = write_run(tmp_path, steps=12, checkpoint={"every_steps": 4, "keep": 3})
    train(config, 2)
    expected = losses(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = files.find_checkpoints(checkpoints)[0]
    damaged = next((newest / "engine").glob("*rank_1*optim_states.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    damaged.write_bytes(content)
    (tmp_path / "run" / "result.json").unlink()
    output = train(config, 2)
    assert "going on from step-00000008" in output, output
    assert "passed over: step-00000012 (engine/" in output, output
    assert "other content than was saved" in output, output
    assert losses(tmp_path) == expected
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


def test_other_run(tmp_path):
    """A changed model or optimizer is refused; changed hyperparameters take effect."""
    config = write_run(tmp_path, steps=4)
    train(config, 2)
    for words, said in {
        ("--model.freeze", "image"): "holds another model",
        ("--optimizer.name", "lion"): "was saved with optimizer.name adamw, this run has lion",
        ("--resume", str(tmp_path / "nowhere")): "is no checkpoint",
        ("--seed", "5"): "seed was 0",
        ("--global_batch", "12"): "was saved with a global batch of 24, this run has 12",
        ("--data.lanes", "3"): "data.lanes 3 is not a multiple of the 2 ranks",
        ("--runs_dir", "/proc/nowhere"): "runs_dir: nothing can be written to /proc/nowhere/run",
    }.items():
        assert said in refused(config, 2, *words)
    train(config, 2, "--steps", "8", "--optimizer.weight_decay", "0.9", "--optimizer.lr", "2e-3")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["lr"]) == (8, 2e-3)


def test_own_config(tmp_path):
    """A run's config.yaml says what it ran with, the ds_config's part too, and starts it again."""
    config = write_run(tmp_path, global_batch=None, steps=4)
    own = tmp_path / "ds_config.json"
    batch = {"train_batch_size": 24, "gradient_accumulation_steps": 2}
    own.write_text(json.dumps({**batch, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    train(config, 2, "--ds_config", str(own))
    saved = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    found = content["global_batch"], content["precision"], content["optimizer"]["clip_norm"], content["micro_batch"]
    assert found == (24, "fp32", 0.5, None)
    assert "going on from step-00000004" in train(saved, 2, "--ds_config", str(own), "--steps", "6")
    assert "going on from step-00000006" in train(saved, 1, *ds_config(1), "--micro_batch", "6", "--steps", "8")
    assert max(losses(tmp_path)) == 8


def test_going_back(tmp_path):
    """--resume CHECKPOINT of the run's own takes another way from there; what was saved after it is moved aside."""
    config = write_run(tmp_path, steps=16, checkpoint={"every_steps": 4, "keep": 3})
    train(config, 2)
    expected, checkpoints = losses(tmp_path), tmp_path / "run" / "checkpoints"
    back = checkpoints / "step-00000008"
    output = train(config, 2, "--resume", str(back), "--steps", "10", "--optimizer.lr", "2e-3")
    assert "going on from step-00000008" in output, output
    assert f"another way from step 8: the checkpoints that this run leaves behind are now in {checkpoints}" in output
    assert sorted(path.name for path in (checkpoints / "aside-1").iterdir()) == ["step-00000012", "step-00000016"]
    assert not any(map(files.faults, (checkpoints / "aside-1").iterdir()))
    output = train(config, 2, "--optimizer.lr", "2e-3")  # goes on along the new way
    assert "going on from step-00000010" in output, output
    assert [path.name for path in files.find_checkpoints(checkpoints)][:2] == ["step-00000016", "step-00000012"]
    found = losses(tmp_path)
    assert {k: v for k, v in found.items() if k <= 9} == {k: v for k, v in expected.items() if k <= 9}
    assert found[16] != expected[16]
    elsewhere = checkpoints / "aside-1" / "step-00000012"
    output = train(config, 2, "--resume", str(elsewhere), "--steps", "13")  # back to the way that was left
    assert f"are now in {checkpoints / 'aside-2'}" in output, output
    assert [path.name for path in files.find_checkpoints(checkpoints)] == ["step-00000013"]
    assert len(files.find_checkpoints(checkpoints / "aside-2")) == 3
    assert losses(tmp_path)[13] == expected[13]


def test_signals(tmp_path):
    """SIGUSR1 to one rank saves and goes on; SIGTERM saves and ends; every N-th checkpoint is kept."""
    config = write_run(tmp_path, steps=100_000, checkpoint={"keep": 1, "keep_every_steps": 5, "every_steps": None})
    job = start(config, 2)
    checkpoints = tmp_path / "run" / "checkpoints"
    for count in range(1, 4):
        assert wait_until(job, lambda: len(losses(tmp_path)) > 3), job.output()
        os.kill(job.pids[count % 2], signal.SIGUSR1)
        seen = files.find_checkpoints(checkpoints)[:1]
        assert wait_until(job, lambda seen=seen: files.find_checkpoints(checkpoints)[:1] != seen), job.output()
    os.kill(job.pids[1], signal.SIGTERM)
    assert job.wait(TIMEOUT_S) == [0, 0], job.output()
    assert "stopped by SIGTERM at step" in job.output(), job.output()
    steps = str(files.step_of(files.find_checkpoints(checkpoints)[0]) + 12)
    train(config, 2, "--steps", steps, "--checkpoint.every_steps", "1")
    steps = [files.step_of(path) for path in files.find_checkpoints(checkpoints)]
    assert all(step % 5 == 0 for step in steps[1:]), steps
    assert len(steps) >= 3, steps


def test_full_disk(tmp_path):
    """A disk with room for two checkpoints and a half: the third fails, training goes on, then there is room again."""
    probe = write_run(tmp_path, steps=2)
    train(probe, 1, "--name", "probe")
    size = sum(f.stat().st_size for f in (tmp_path / "probe" / "checkpoints").rglob("*") if f.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, int(2.5 * size)) as before:
        config = write_run(tmp_path, runs_dir=str(disk), steps=12, checkpoint={"every_steps": 2, "keep": 3})
        output = train(config, 1, code=1, before=before)
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
        assert ckpt(["prune", str(disk / "run"), "--keep", "1"]) == 0
        output = train(config, 1, "--checkpoint.keep", "1", before=before)
        assert "going on from step-00000004" in output, output
        assert [path.name for path in files.find_checkpoints(checkpoints)] == ["step-00000012"]


@contextmanager
def small_disk(folder: Path, size: int):
    """A tmpfs of ``size`` bytes on ``folder`` where root may mount one; else what ranks are to do before they train."""
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    root = os.geteuid() == 0 and shutil.which("mount") is not None
    if not root or subprocess.run(["mount", *options], capture_output=True).returncode:
        yield fail_writes_beyond, (folder, size)
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fail_writes_beyond(disk: tuple[Path, int]) -> None:
    """From here on a checkpoint's writes fail in this process where the folder would hold more bytes."""
    from disco_ds.checkpoint import save

    folder, size = disk
    whole = save._Hashed.write

    def write(self, data):
        used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        if used + len(data) > size:
            raise OSError(28, "No space left on device")
        return whole(self, data)

    save._Hashed.write = write  # type: ignore[method-assign]
