"""--profile, and what a run leaves for its report: real ranks on a tiny model, and the GPU's part against stand-ins."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from disco_ds.cli.train import parse
from disco_ds.engine.step import PhaseTimer
from disco_ds.report.run_folder import read_runs
from disco_ds.run.profiler import WARM_UP_STEPS, Profiler
from disco_ds.telemetry.jsonlines import read_lines
from tests.helpers import runs


def names_in(trace):
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event.get("name", "") for event in events]


def test_a_run_is_profiled_and_leaves_what_its_report_shows(tmp_path):
    shards = str(tmp_path / "train")
    config = runs.write_run(tmp_path, steps=8, data={"train": shards, "val": shards, "workers": 0})
    output = runs.train(config, 2, "--profile", "2", "--checkpoint.every_steps", "8")
    folder = tmp_path / "run" / "profile" / f"step-{WARM_UP_STEPS + 2:08d}"
    assert output.count("profile: ") == output.count("ui.perfetto.dev") == 1
    assert str(folder) in output
    assert "memory_viz" not in output
    assert sorted(path.name for path in folder.iterdir()) == ["trace-rank0.json.gz", "trace-rank1.json.gz"]
    for trace in folder.iterdir():
        names = names_in(trace)
        for phase in ("forward", "loss", "backward", "step"):
            assert names.count(f"phase: {phase}") == 2, phase
        assert any("gloo" in name for name in names)

    run = tmp_path / "run"
    assert {"report.html", "report.png", "heldout.json", "starts.jsonl"} <= {path.name for path in run.iterdir()}
    assert "smoothed" not in (run / "report.html").read_text()  # 8 logged steps are shown as they are
    assert "Held-out images at step 8" in (run / "report.html").read_text()

    runs.train(config, 1, "--steps", "10", "--optimizer.lr", "2e-3")
    first, second = read_lines(run / "starts.jsonl")
    assert (first["step"], second["step"]) == (0, 8)
    assert first["config"]["optimizer"]["lr"] == 1e-3
    assert second["config"]["optimizer"]["lr"] == 2e-3
    assert len(list((run / "profile").iterdir())) == 1  # not asked for again
    text = (run / "report.html").read_text()
    assert "ranks: 2 → 1; micro_batch: 12 → 24" in text
    assert "optimizer.lr: 0.001 → 0.002" in text
    assert "logging.profile_steps: 2 → 0" in text
    assert read_runs([run])[0].finished


@pytest.mark.parametrize(
    ("words", "steps"),
    [("", 0), ("--profile", 3), ("--profile --seed 1", 3), ("--profile 7", 7), ("--logging.profile_steps 2", 2)],
)
def test_the_flag(words, steps):
    assert parse(["--data.train", "x", "--steps", "5", *words.split()])[0].logging.profile_steps == steps


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fake_run(folder, steps, device="cpu"):
    said = []
    return SimpleNamespace(
        folder=folder, device=torch.device(device), schedule=SimpleNamespace(steps=steps), said=said,
        state=SimpleNamespace(step=0), train_step=SimpleNamespace(timer=PhaseTimer(torch.device("cpu"))),
        telemetry=SimpleNamespace(message=said.append), watchdog=SimpleNamespace(progress=lambda text: None),
    )  # fmt: skip


def train(run, count, stop_after=None):
    """The loop's calls; the phases' seconds of the whole run."""
    profiler, steps = Profiler(run, count), stop_after or run.schedule.steps
    while run.state.step < steps:
        with run.train_step.timer("forward"):
            torch.ones(2).sum()
        run.state.step += 1
        profiler.step()
    profiler.close()
    return run.train_step.timer.read()


@pytest.mark.parametrize(("steps", "count", "folder", "kept"), [
    (20, 3, 5, 3), (6, 3, 4, 3), (5, 10, 2, 4), (4, 3, 2, 3), (2, 5, 2, 1), (1, 3, None, 0), (9, 0, None, 0),
])  # fmt: skip
def test_the_steps_that_are_kept(tmp_path, alone, steps, count, folder, kept):
    run = fake_run(tmp_path, steps)
    assert train(run, count)["forward"] > 0
    made = sorted(path.name for path in (tmp_path / "profile").glob("*"))
    assert made == ([f"step-{folder:08d}"] if folder else [])
    if folder:
        assert names_in(tmp_path / "profile" / made[0] / "trace-rank0.json.gz").count("phase: forward") == kept
    else:
        assert ("no profile" in " ".join(run.said)) == bool(count)


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path, alone, caplog):
    train(fake_run(tmp_path / "a", 100), 50, stop_after=10)
    (trace,) = (tmp_path / "a").rglob("*.gz")
    assert names_in(trace).count("phase: forward") == 10 - WARM_UP_STEPS - 1
    train(fake_run(tmp_path / "b", 100), 50, stop_after=WARM_UP_STEPS + 1)
    assert not (tmp_path / "b" / "profile").exists()
    assert "no profile: the run was stopped before" in caplog.text


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, alone, caplog):
    (tmp_path / "profile").write_text("a file is in the way")
    run = fake_run(tmp_path, 20)
    assert train(run, 2)["forward"] > 0
    assert run.state.step == 20
    assert "no profile: " in caplog.text


def test_on_a_gpu_memory_is_recorded_from_start_to_end(tmp_path, alone, monkeypatch):
    calls = mock.MagicMock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", calls.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.dump)
    run = fake_run(tmp_path, 20, device="cuda")
    train(run, 2)
    (trace,) = (tmp_path / "profile").glob("*/trace-rank0.json.gz")
    start, dump, end = calls.mock_calls
    assert start == mock.call.record(max_entries=mock.ANY)
    assert dump == mock.call.dump(str(trace.with_name("memory-rank0.pickle")))
    assert end == mock.call.record(enabled=None)
    assert "memory_viz" in run.said[0]


def test_off_it_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", lambda *_, **__: 1 / 0)
    run = fake_run(tmp_path, 50)
    train(run, 0)
    assert run.said == []
