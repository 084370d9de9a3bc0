"""Fixtures that several files share."""

from __future__ import annotations

import os

import pytest

# before torch is imported: on tensors this small, threads cost ten times what they gain, and ranks share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.helpers.ranks import run_ranks
from tests.helpers.saved_runs import RUNS, save_runs


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder of small runs that two ranks saved, and what their engines gave, by case (helpers/saved_runs.py)."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(save_runs, 2, str(folder), list(RUNS), timeout_s=300)[0]
