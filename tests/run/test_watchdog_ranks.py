"""A rank that hangs, or is killed: the run ends on all ranks, and the one to blame is named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def one_rank_hangs():
    from disco_ds.run.watchdog import Watchdog

    watchdog = Watchdog(3.0)
    watchdog.progress("step 5: waits for data")
    if dist.get_rank() == 1:
        time.sleep(120)
    time.sleep(1.5)  # so that rank 1 is behind by more than the clock's second
    watchdog.progress("step 5: trains")
    dist.all_reduce(torch.zeros(1))  # waits for rank 1


def test_a_rank_that_hangs_is_named():
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_rank_hangs, 2, timeout_s=90)
    text = str(caught.value)
    assert "still running after" not in text, text
    assert "exit 75" in text, text
    report = text[text.index("no progress for") :]
    blamed, other = report.index("rank 1: step 5: waits for data"), report.index("rank 0: step 5: trains")
    assert blamed < other, text


def one_rank_was_never_there():
    from disco_ds.run.watchdog import Watchdog

    if dist.get_rank() == 0:
        Watchdog(2.0)
    time.sleep(60)


def test_a_rank_that_is_lost_before_it_is_watched_is_named():
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_rank_was_never_there, 2, timeout_s=40)
    text = str(caught.value)
    assert "exit 75" in text, text
    assert text.index("rank 1: never seen") < text.index("rank 0: starts"), text


def one_rank_goes(how):
    from disco_ds.run.watchdog import Watchdog

    rank = dist.get_rank()
    watchdog = Watchdog(5.0)
    watchdog.progress("step 7: trains")
    dist.barrier()
    try:
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise ValueError("images are upside down")
        for _ in range(1000):
            dist.all_reduce(torch.zeros(1))
    except Exception as error:
        print(f"blamed by rank {rank}: {watchdog.blame(error)!r}", flush=True)
        raise


@pytest.mark.parametrize(
    ("how", "said"),
    [("killed", "rank 1 is gone"), ("raises", "rank 1 failed (step 7: trains): images are upside down")],
)
def test_a_rank_that_goes_is_named_by_the_others(how, said):
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_rank_goes, 3, how, timeout_s=90, patience_s=15)
    text = str(caught.value)
    assert "still running after" not in text
    assert how != "killed" or "rank 1 (exit -9)" in text
    for rank in (0, 2):
        assert f"blamed by rank {rank}: '{said}" in text, text
