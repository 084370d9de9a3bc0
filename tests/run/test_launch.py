"""launch/train.py as a user starts it: the launchers, the ZeRO stages, resuming, signals, and what mistakes are told.

Each case is a real program with real ranks, so there are few of them and each looks at much.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.ranks import ROOT
from tests.helpers.shards import make_shards
from tests.helpers.tiny import TINY

BIN = Path(sys.executable).parent
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with train and val shards, a model and a run file."""
    folder = tmp_path_factory.mktemp("data")
    make_shards(folder / "train", [40, 30, 50, 20])
    make_shards(folder / "val", [21, 12], start=500)
    (folder / "tiny.json").write_text(json.dumps(TINY))
    run = {
        "name": "run",
        "steps": 6,
        "global_batch": 24,
        "model": {"name": str(folder / "tiny.json")},
        "data": {"train": str(folder / "train"), "val": str(folder / "val"), "workers": 0},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def environment():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**env, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def command(launcher, ranks, *arguments):
    script = [str(ROOT / "launch" / "train.py"), *arguments]
    if launcher == "python":
        return [sys.executable, *script]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), f"--nproc_per_node={ranks}", f"--master_port={free_port()}", *script]
    return [str(BIN / "deepspeed"), "-q", f"--num_accelerators={ranks}", f"--master_port={free_port()}", *script]


def start(data, runs, launcher, ranks, *arguments):
    full = command(launcher, ranks, "--config", str(data / "run.yaml"), "--runs_dir", str(runs), *arguments)
    return subprocess.Popen(
        full, cwd=runs, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def finish(process, code=0):
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {TIMEOUT_S} s:\n{output}") from None
    assert process.returncode == code or (code and process.returncode), f"exit {process.returncode}:\n{output}"
    return output


def train(data, runs, launcher, ranks, *arguments, code=0):
    return finish(start(data, runs, launcher, ranks, *arguments), code)


def losses(runs, name="run"):
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def stage(number):
    return ["--ds_config", str(ROOT / "ds_configs" / f"zero{number}.json")]


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """The run that the others are compared with: one process, ZeRO 2, started as plain Python."""
    runs = tmp_path_factory.mktemp("plain")
    output = train(data, runs, "python", 1, *stage(2))
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
    for word in ("24 pairs", "6 steps = 144 samples", "warm-up 1 step", "ZeRO 2, fp32", "train_batch_size=24",
                 "step 6/6", "R@10", "chance", "image 0.1 M"):  # fmt: skip
        assert word in output, f"{word!r} is not in:\n{output}"
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in output, output


def test_the_docs_tell_of_every_file_and_number(plain):
    folder, page = plain[0] / "run", (ROOT / "docs" / "evaluation.md").read_text()
    for path in folder.iterdir():
        assert f"`{path.name}/`" in page if path.is_dir() else f"`{path.name}`" in page, path.name
    names = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name for name in names if f"`{name}`" not in page and not name.startswith("time_in_")} == set()


@pytest.mark.parametrize(
    ("launcher", "ranks", "arguments"),
    [
        ("deepspeed", 2, stage(0)),
        ("torchrun", 2, [*stage(3), "--micro_batch", "4"]),
        ("deepspeed", 2, [*stage(2), "--micro_batch", "6", "--data.workers", "1"]),
        ("torchrun", 4, stage(1)),
        (
            "torchrun",
            2,
            ["--ds_config", str(ROOT / "ds_configs" / "zero3_offload.json"), "--model.checkpointing", "full"],
        ),
    ],
    ids=["deepspeed-zero0", "torchrun-zero3-cached", "deepspeed-zero2-cached", "torchrun-4-zero1", "zero3-offload"],
)
def test_the_loss_is_the_same_however_it_is_run(data, plain, tmp_path, launcher, ranks, arguments):
    """Same seed: same initial weights and same global batches on any number of ranks, stage, micro-batch, launcher."""
    train(data, tmp_path, launcher, ranks, *arguments)
    expected, found = losses(plain[0]), losses(tmp_path)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-4)


def test_resuming_goes_on_as_if_nothing_had_happened(data, plain, tmp_path):
    train(data, tmp_path, "torchrun", 2, *stage(2), "--steps", "4", "--schedule.kind", "constant")
    before = losses(tmp_path)
    output = train(data, tmp_path, "torchrun", 2, *stage(2), "--schedule.kind", "constant")
    assert "going on from step-00000004" in output
    resumed = losses(tmp_path)
    train(data, tmp_path, "torchrun", 2, *stage(2), "--schedule.kind", "constant", "--name", "unbroken")
    assert {k: v for k, v in resumed.items() if k <= 4} == before
    assert resumed == losses(tmp_path, "unbroken")  # to the last bit


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_sigterm_saves_and_the_same_command_goes_on(data, tmp_path, launcher):
    """As a scheduler sends it, to all processes: ranks, loader workers and the launcher too."""
    process = start(
        data, tmp_path, launcher, 2, *stage(2), "--steps", "100000", "--checkpoint.every_steps", "100000",
        "--data.workers", "1",
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    output = finish(process, code=1)  # the launchers themselves report that they were told to stop
    assert "stopped by SIGTERM" in output, output
    saved = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1, saved
    step = int(saved[0].removeprefix("step-"))
    assert step >= 3
    output = train(data, tmp_path, "torchrun", 2, *stage(2), "--steps", str(step + 2))
    assert f"going on from {saved[0]}" in output
    assert max(losses(tmp_path)) == step + 2


def test_mistakes_end_early_with_one_line(data, plain, tmp_path):
    """On two ranks, the message once, no traceback, and nothing on disk."""
    (tmp_path / "empty").mkdir()
    cases = {
        "data.train": ["--data.train", str(tmp_path / "nowhere.tar")],
        "global batch 25": ["--global_batch", "25"],
        "captions": ["--data.caption_key", "json:caption"],
        "ViT-B-99": ["--model.name", "ViT-B-99"],
    }
    for word, arguments in cases.items():
        output = train(data, tmp_path, "torchrun", 2, *arguments, code=2)
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, output
        assert word in output or word == "captions", output
        if word == "captions":
            assert "txt" in output, output  # the keys that were seen
            assert "png" in output, output
        assert f'File "{ROOT / "disco_ds"}' not in output, output  # (torchrun adds a traceback of its own)
        assert not (tmp_path / "run").exists()
    output = train(data, plain[0], "python", 1, "--resume", "never", code=2)
    assert "error: resume is never" in output
    output = train(data, plain[0], "torchrun", 2, *stage(0), code=2)
    assert "was saved at ZeRO stage 2, the ds_config says 0" in output
