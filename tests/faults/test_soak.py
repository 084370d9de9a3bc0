"""A long run of a tiny model."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.forked import run_script

STEPS = 2000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_grows(tmp_path):
    assert run_script("tests.faults.soak", tmp_path, STEPS, timeout_s=500)["steps"] == STEPS
