"""A run that cannot start: what all ranks see alike is said once, what one rank alone sees is said by that rank."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def test_rank_0_speaks_before_it_waits(monkeypatch, capsys):
    """The launcher ends it as soon as another rank has exited."""
    from disco_ds import distributed as failing
    from disco_ds.errors import ConfigError

    def wait(keys, timeout):
        assert capsys.readouterr().err == "error: steps is 0\n"
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(failing, "_store", lambda: mock.Mock(wait=wait))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        failing.fail(ConfigError("steps is 0"))


def cannot_start(case):
    from datetime import timedelta

    from disco_ds import distributed
    from disco_ds.errors import ConfigError

    if case == "one rank":  # nobody will say anything: no need to wait for it for long
        distributed._PATIENCE = timedelta(seconds=0.5)
    if case == "one rank" and dist.get_rank() != 2:
        dist.barrier()
    distributed.fail(ConfigError(f"no file for rank {dist.get_rank()}" if case == "each its own" else "steps is 0"))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("all alike", ["error: steps is 0"]),
        ("each its own", [f"{at}error: no file for rank {r}" for r, at in enumerate(("", "[rank 1] ", "[rank 2] "))]),
        ("one rank", ["[rank 2] error: steps is 0"]),
    ],
)
def test_who_says_what_is_wrong(case, expected):
    with pytest.raises(AssertionError) as caught:
        run_ranks(cannot_start, 3, case, timeout_s=60)
    assert re.findall(r"^(?:\[rank \d\] )?error: .*$", str(caught.value), re.MULTILINE) == expected
    assert "exit 2" in str(caught.value)
