"""Resuming on other ranks and stages, after damage, with a full disk, after signals; see resumes.py for each."""

from __future__ import annotations

from tests.faults import resumes
from tests.helpers.forked import run_script


def test_resuming(tmp_path):
    told = run_script("tests.faults.resumes", tmp_path, timeout_s=500)
    assert list(told) == [scenario.__name__ for scenario in resumes.SCENARIOS]
