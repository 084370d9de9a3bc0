"""What a run writes and prints: console, JSONL over kills and resumes, TensorBoard, W&B."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from disco_ds.errors import ConfigError
from disco_ds.telemetry.console import duration
from disco_ds.telemetry.jsonlines import read_lines, set_aside_after, write_line
from disco_ds.telemetry.sinks import Telemetry, check_logging

METRICS = {
    "samples_seen": 5120, "loss": 3.21, "lr": 5e-4, "logit_scale": 2.7, "grad_norm": 0.5, "samples_per_s": 1234.5,
    "step_s": 0.21, "data_wait_s": 0.004, "peak_memory_bytes": 3 * 2**30,
}  # fmt: skip


def telemetry(folder, **options):
    stream = io.StringIO()
    return Telemetry(folder, stream=stream, **options), stream


def steps_of(path):
    return [line["step"] for line in read_lines(path)]


class TestConsole:
    def test_a_line_says_what_a_person_wants_to_know(self, tmp_path):
        now = [100.0]
        log, stream = telemetry(tmp_path, total_steps=600, clock=lambda: now[0])
        now[0] += 20
        log.log(10, METRICS)
        assert stream.getvalue() == (
            "step  10/600 | loss 3.2100 | lr 5.00e-04 | logit_scale 2.700 | grad_norm 0.500 | 1,234 samples/s | "
            "0.210 s/step (data 0.004) | peak 3.00 GiB | ETA 19m40s\n"
        )

    def test_what_is_not_known_is_left_out(self, tmp_path):
        log, stream = telemetry(tmp_path)
        log.log(3, {"loss": float("nan"), "step_s": 1.5, "grad_norm": None})
        assert stream.getvalue() == "step 3 | loss nan | 1.500 s/step\n"

    def test_time_left_follows_the_recent_pace_and_counts_from_the_resumed_step(self, tmp_path):
        now = [0.0]
        log, stream = telemetry(tmp_path, total_steps=1000, start_step=500, clock=lambda: now[0])
        for step in range(510, 760, 10):
            now[0] += 100 if step < 560 else 5  # the slow start is 20 intervals ago at the end
            log.log(step, {})
        lines = stream.getvalue().splitlines()
        assert lines[0].endswith("ETA 1h22m")  # 490 steps at 10 s
        assert lines[-1].endswith("ETA 2m05s")  # 250 steps at half a second
        log.log(1000, {})
        assert stream.getvalue().endswith("ETA 0s\n")

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (7620, "2h07m"), (86399, "1d00h"),
            (273600, "3d04h"),
        ],
    )  # fmt: skip
    def test_durations(self, seconds, text):
        assert duration(seconds) == text


class TestJsonLines:
    def test_one_valid_flushed_object_a_line(self, tmp_path):
        log, _ = telemetry(tmp_path)
        log.log(10, {**METRICS, "loss": torch.tensor(2.5), "lr": np.float32(0.25), "samples_seen": torch.tensor(7)})
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed: it must be there already
        assert json.loads(line) == {**METRICS, "step": 10, "loss": 2.5, "lr": 0.25, "samples_seen": 7}

    def test_nan_and_infinity_are_valid_json_and_told_apart(self, tmp_path):
        log, _ = telemetry(tmp_path)
        log.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "low": float("-inf"), "lr": 1.0})
        found = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
        assert found == {
            "step": 1, "loss": None, "grad_norm": None, "low": None, "lr": 1.0,
            "non_finite": {"loss": "nan", "grad_norm": "inf", "low": "-inf"},
        }  # fmt: skip

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    def test_a_full_disk_is_said_and_survived(self, tmp_path):
        log, stream = telemetry(tmp_path)
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        log.log(1, {"loss": 1.0})
        assert "WARNING: metrics.jsonl could not be written: [Errno 28]" in stream.getvalue()
        (tmp_path / "metrics.jsonl").unlink()
        log.log(2, {"loss": 2.0})
        assert steps_of(tmp_path / "metrics.jsonl") == [2]

    def test_resume_sets_later_lines_aside(self, tmp_path):
        with closing(telemetry(tmp_path)[0]) as log:
            for step in range(10, 60, 10):
                log.log(step, {"loss": float(step)})
                log.log_eval(step, {"val/pairs": step})
        with closing(telemetry(tmp_path, start_step=30)[0]) as log:
            log.log(40, {"loss": -1.0})
        assert [(line["step"], line["loss"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
            (10, 10.0), (20, 20.0), (30, 30.0), (40, -1.0),
        ]  # fmt: skip
        assert steps_of(tmp_path / "metrics.dropped.jsonl") == [40, 50]
        assert steps_of(tmp_path / "eval.jsonl") == [10, 20, 30]
        assert steps_of(tmp_path / "eval.dropped.jsonl") == [40, 50]
        with closing(telemetry(tmp_path, start_step=0)[0]):
            assert steps_of(tmp_path / "metrics.jsonl") == []
        assert steps_of(tmp_path / "metrics.dropped.jsonl") == [40, 50, 10, 20, 30, 40]

    @pytest.mark.parametrize(
        "torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\xff\xfe\n", b'{"step": "x"}\n', b"[3]\n", b'{"step": 2}\n']
    )
    def test_a_torn_line_never_joins_the_next(self, tmp_path, torn):
        path = tmp_path / "metrics.jsonl"
        whole = b'{"step": 1}\n{"step": 2}\n'
        path.write_bytes(whole + torn)
        set_aside_after(path, 9)
        write_line(path, {"step": 4})
        complete = torn == b'{"step": 3}'  # only its line end is missing
        assert steps_of(path) == ([1, 2, 3, 4] if complete else [1, 2, 4])
        assert len(path.read_bytes().splitlines()) == (4 if complete else 3)
        dropped = tmp_path / "metrics.dropped.jsonl"
        assert (dropped.read_bytes().strip() if dropped.exists() else b"") == (b"" if complete else torn.strip())

    def test_a_kill_while_setting_aside_loses_nothing(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
        with mock.patch.object(os, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            set_aside_after(path, 1)
        assert steps_of(path) == [1, 2]
        set_aside_after(path, 1)
        assert steps_of(path) == [1]
        assert set(steps_of(tmp_path / "metrics.dropped.jsonl")) == {2}

    def test_evaluating_a_step_again_takes_the_place_of_the_first(self, tmp_path):
        log, stream = telemetry(tmp_path)
        log.log_eval(10, {"val/pairs": 1})
        log.log_eval(20, {"val/pairs": 2}, "first words")
        log.log_eval(20, {"val/pairs": 3}, "last words")
        assert [line["val/pairs"] for line in read_lines(tmp_path / "eval.jsonl")] == [1, 3]
        assert stream.getvalue() == "first words\nlast words\n"

    def test_other_ranks_touch_nothing(self, tmp_path):
        log, stream = telemetry(tmp_path / "run", rank=1)
        log.log(1, METRICS)
        log.log_eval(1, METRICS, "words")
        log.message("words")
        log.close()
        assert not (tmp_path / "run").exists()
        assert stream.getvalue() == ""


class TestSinks:
    def test_tensorboard_gets_the_same_names_and_hides_steps_done_again(self, tmp_path):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        for start, steps in ((0, range(10, 60, 10)), (30, range(40, 60, 10))):
            with closing(telemetry(tmp_path, start_step=start, tensorboard=True)[0]) as log:
                for step in steps:
                    log.log(step, {**METRICS, "loss": float(step + start), "note": "text"})
                log.log_eval(steps[-1], {"val/image_to_text_R@10": 0.5})
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {*METRICS, "val/image_to_text_R@10"}
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 10), (20, 20), (30, 30), (40, 70), (50, 80)]

    def test_wandb_takes_a_run_up_again(self, tmp_path, monkeypatch):
        wandb = mock.MagicMock()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        for start in (0, 10):
            with closing(telemetry(tmp_path, start_step=start, wandb="clip", run_config={"seed": 1})[0]) as log:
                log.log(start + 10, {"loss": 1.5, "note": "text"})
        first, second = (call.kwargs for call in wandb.init.call_args_list)
        assert first == second  # the same id
        assert first.items() >= {"project": "clip", "resume": "allow", "config": {"seed": 1}}.items()
        logged = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
        assert logged == [{"step": 10, "loss": 1.5}, {"step": 20, "loss": 1.5}]
        assert wandb.init.return_value.finish.call_count == 2

    @pytest.mark.parametrize(
        ("wanted", "module"), [({"tensorboard": True}, "torch.utils.tensorboard"), ({"wandb": "clip"}, "wandb")]
    )
    def test_a_missing_extra_is_named(self, monkeypatch, wanted, module):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
        (extra,) = wanted
        with pytest.raises(ConfigError, match=rf"pip install 'disco-ds\[{extra}\]'"):
            check_logging(**{"tensorboard": False, "wandb": None, **wanted})
        check_logging(tensorboard=False, wandb=None)
