"""SIGKILL at 20 random moments, saving included: what is kept, what is lost, and that the run ends as if unbroken."""

from __future__ import annotations

import random

from tests.helpers.forked import run_script

MOMENTS = 20


def test_nothing_is_lost_by_kills(tmp_path):
    figures = run_script("tests.faults.kills", tmp_path, MOMENTS, random.randrange(2**31), timeout_s=500)
    assert figures["moments"] == MOMENTS
    assert max(figures["steps_lost_each"]) <= figures["every_steps"]
