"""Marks, seeds, and fixtures that several files share."""

from __future__ import annotations

import os
import random

import pytest

# before torch is imported: on tensors this small, threads cost ten times what they gain, and ranks share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.helpers.ranks import run_ranks
from tests.helpers.saved_runs import RUNS, save_runs


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="the seed of tests that draw one: what a failed test's report says")
    parser.addoption("--seeds", type=int, default=1, help="how often each test that draws its seed is run")


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--seeds")
    if "seed" in metafunc.fixturenames and count > 1:
        metafunc.parametrize("seed", range(count), indirect=True, ids=lambda number: f"draw{number}")


@pytest.fixture
def seed(request):
    """A fresh seed each time; the report of a failed test says it."""
    given = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**31) if given is None else given
    request.node.add_report_section("setup", "seed", f"the seed was {value}; for this one again: --seed {value}")
    return value


def pytest_collection_modifyitems(items):
    """Marks by place and by fixture: files of ranks, tests of the runs that ranks saved, drawn seeds, the faults."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.stem.endswith("ranks") or "saved" in fixtures:
            item.add_marker("ranks")
        if "seed" in fixtures:
            item.add_marker("draws")
        if item.path.parent.name == "faults":
            item.add_marker("faults")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder of small runs that two ranks saved, and what their engines gave, by case (helpers/saved_runs.py)."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(save_runs, 2, str(folder), list(RUNS), timeout_s=300)[0]
