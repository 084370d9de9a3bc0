"""The learning rate's schedules."""

from __future__ import annotations

import pytest

from disco_ds.config.schema import RunConfig
from disco_ds.engine.schedule import build_schedule


def schedule(global_batch=10, schedule=None, **length):
    return build_schedule(
        RunConfig(data={"train": "x"}, optimizer={"lr": 1.0}, schedule=schedule or {}, **length), global_batch
    )


@pytest.mark.parametrize("kind", ["cosine", "constant", "cooldown"])
def test_schedules(kind):
    lr = schedule(steps=100, schedule={"kind": kind, "warmup_samples": 95, "cooldown_steps": 20, "lr_end": 0.1})
    values = [lr(step) for step in range(101)]
    assert lr.warmup == 10  # 95 samples are ten steps of ten
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(0.1 <= value <= 1.0 for value in values)
    flat, half = {"cosine": (11, 55), "constant": (101, None), "cooldown": (81, 90)}[kind]
    assert set(values[10:flat]) == {1.0}
    if half:
        assert [values[half], values[100]] == pytest.approx([0.55, 0.1])


def test_schedule_defaults():
    lr = schedule(samples=1001)  # rounded up
    assert (lr.steps, lr.warmup, lr.cooldown) == (101, 11, 20)
    assert schedule(steps=10**6).warmup == 2000
    assert schedule(steps=5, global_batch=1, schedule={"warmup_steps": 0})(0) == 1.0
