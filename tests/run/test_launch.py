"""launch/train.py as a user starts it: the launchers, the ZeRO stages, resuming, signals, and what mistakes are told.

Each launcher is a real program with real ranks once; what does not depend on it is seen on forked ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.ranks import ROOT, free_port, user_environment
from tests.helpers.runs import TIMEOUT_S, ds_config, losses, refused, train, write_run
from tests.helpers.tiny import TINY

pytestmark = pytest.mark.ranks
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": [sys.executable],
    "deepspeed": [str(BIN / "deepspeed"), "-q", "--num_accelerators=2", "--master_port={port}"],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node=2", "--master_port={port}"],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The run file of six steps with an evaluation."""
    folder = tmp_path_factory.mktemp("data")
    data = {"train": str(folder / "train"), "val": str(folder / "val"), "workers": 0}
    schedule = {"kind": "constant", "warmup_steps": 1}  # does not depend on the number of steps
    config = write_run(folder, steps=6, data=data, checkpoint={"every_steps": 3}, schedule=schedule)
    (folder / "tiny.json").write_text(json.dumps(TINY))
    return config


def start(config, runs, launcher, *arguments):
    launch = [word.format(port=free_port()) for word in LAUNCHERS[launcher]]
    command = [*launch, str(ROOT / "launch" / "train.py"), "--config", str(config), "--runs_dir", str(runs)]
    return subprocess.Popen(
        [*command, *arguments], cwd=runs, env=user_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process):
    """What it printed, once it has ended."""
    try:
        return process.communicate(timeout=TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {TIMEOUT_S} s:\n{process.communicate()[0]}") from None


def on_ranks(config, runs, ranks, *arguments):
    """A run on forked ranks; what they printed."""
    return train(config, ranks, "--runs_dir", str(runs), *arguments)


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    """The run that the others are compared with: one process, ZeRO 2, started as plain Python."""
    runs = tmp_path_factory.mktemp("plain")
    process = start(config, runs, "python", *ds_config(2))
    output = finish(process)
    assert process.returncode == 0, output
    return runs, output


def test_a_run_leaves_what_it_promises(plain):
    runs, output = plain
    folder = runs / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for key in ("samples_seen", "loss", "lr", "logit_scale", "grad_norm", "samples_per_s", "step_s", "data_wait_s",
                "peak_memory_bytes"):  # fmt: skip
        assert all(key in line for line in lines), key
    assert lines[-1]["samples_seen"] == 6 * 24
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["optimizer"]["betas"] == [0.9, 0.98]  # defaults are in it too
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [6]
    assert evaluations[0]["val/pairs"] == 33
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-00000003", "step-00000006"]
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "result.json").read_text())["steps"] == 6
    words = ("24 pairs", "6 steps = 144 samples", "warm-up 1 step", "ZeRO 2, fp32", "train_batch_size=24",
             "step 6/6", "R@10", "chance", "image 0.1 M")  # fmt: skip
    assert not [word for word in words if word not in output], output
    assert not [noise for noise in ("Warning", "WARNING", "Traceback") if noise in output], output


def test_the_docs_tell_of_every_file_and_number(plain):
    folder, page = plain[0] / "run", (ROOT / "docs" / "evaluation.md").read_text()
    for path in folder.iterdir():
        assert f"`{path.name}/`" in page if path.is_dir() else f"`{path.name}`" in page, path.name
    names = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name for name in names if f"`{name}`" not in page and not name.startswith("time_in_")} == set()


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ds_config(0)),
        (2, [*ds_config(3), "--micro_batch", "4"]),
        (2, [*ds_config(2), "--micro_batch", "6", "--data.workers", "1"]),
        (4, ds_config(1)),
        (2, [*ds_config("zero3_offload"), "--model.checkpointing", "full"]),
    ],
    ids=["zero0", "zero3-cached", "zero2-cached", "4-zero1", "zero3-offload"],
)
def test_the_loss_is_the_same_however_it_is_run(config, plain, tmp_path, ranks, arguments):
    """Same seed: same initial weights and same global batches on any number of ranks, stage, micro-batch."""
    on_ranks(config, tmp_path, ranks, *arguments)
    assert losses(tmp_path) == pytest.approx(losses(plain[0]), abs=1e-4)


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [("deepspeed", [*ds_config(2), "--micro_batch", "6"]), ("torchrun", [*ds_config(3), "--micro_batch", "4"])],
    ids=["deepspeed-zero2-cached", "torchrun-zero3-cached"],
)
def test_launchers_train_and_sigterm_saves(config, plain, tmp_path, launcher, arguments):
    """As a scheduler sends it, to all processes: ranks, loader workers and the launcher too. Then the run goes on."""
    arguments = [*arguments, "--checkpoint.every_steps", "100000"]
    process = start(config, tmp_path, launcher, *arguments, "--steps", "100000", "--data.workers", "1")
    deadline = time.monotonic() + TIMEOUT_S
    while len(losses(tmp_path)) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, finish(process)
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    output = finish(process)
    assert process.returncode, output  # the launchers themselves report that they were told to stop
    assert "stopped by SIGTERM" in output, output
    saved = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1, saved
    step = int(saved[0].removeprefix("step-"))
    assert step >= 3
    output = on_ranks(config, tmp_path, 2, *arguments, "--steps", str(step + 2))
    assert f"going on from {saved[0]}" in output
    found, expected = losses(tmp_path), losses(plain[0])
    assert max(found) == step + 2
    common = found.keys() & expected.keys()
    assert len(common) >= 5
    assert {k: found[k] for k in common} == pytest.approx({k: expected[k] for k in common}, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.train", "nowhere.tar"], ["data.train"]),
        (["--global_batch", "25"], ["global batch 25"]),
        (["--data.caption_key", "json:caption"], ["txt", "png"]),  # the keys that were seen
        (["--model.name", "ViT-B-99"], ["ViT-B-99"]),
    ],
)
def test_mistakes_end_early_with_one_line(config, tmp_path, arguments, words):
    """On two ranks, the message once, no traceback, and nothing on disk."""
    error = refused(config, 2, "--runs_dir", str(tmp_path), *arguments)
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


def test_a_folder_that_another_run_has(config, plain):
    runs = ["--runs_dir", str(plain[0])]
    assert "error: resume is never" in refused(config, 1, *runs, "--resume", "never")
    assert "was saved at ZeRO stage 2, the ds_config says 0" in refused(config, 2, *runs, *ds_config(0))
