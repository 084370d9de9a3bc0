"""The stream on real ranks with loader workers: the same global batches as in one process, and a resume in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist

from disco_ds.data import DataError, TrainStream, merge_states, read_heldout
from tests.helpers.ranks import ROOT, rank_environment, run_ranks
from tests.helpers.shards import data_config, letters, make_shards, noisy, to_tensor


def stream(folder: str, workers: int, cursor: Any = None, rank: int = 0, world_size: int = 1) -> TrainStream:
    config = data_config(folder, workers=workers, lanes=12)
    place = {"global_batch": 24, "rank": rank, "world_size": world_size}
    return TrainStream(config, **place, seed=1, transform=noisy, tokenizer=letters, cursor=cursor)


def rows(batch: Any) -> list[tuple[str, float]]:
    return list(zip(batch.keys, batch.images[:, 0, 0, 0].tolist(), strict=True))


def gathered(item: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, item)
    return every


def train_and_resume(folder: str) -> tuple[list[list[tuple[str, float]]], list[str], str]:
    """Three batches with 2 workers a rank, a cursor, three more with 1; then the held-out keys; then a worker dies."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = stream(folder, 2, None, rank, world_size)
    batches = [rows(next(first)) for _ in range(3)]
    cursor = merge_states(gathered(first.state()))
    first.close()
    second = stream(folder, 1, cursor, rank, world_size)
    batches += [rows(next(second)) for _ in range(3)]

    config = data_config("unused", val=folder)
    options = {"transform": to_tensor, "tokenizer": letters, "rank": rank, "world_size": world_size, "batch": 5}
    keys = [key for batch in read_heldout(config, workers=1, **options) for key in batch.keys]

    for worker in second._parts._workers:  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError) as caught:
        deque(islice(second, 10), maxlen=0)  # what was read ahead may still come
    second.close()
    return batches, keys, str(caught.value)


def test_two_ranks_with_workers_give_the_batches_of_one_process(tmp_path):
    make_shards(tmp_path, [17, 5, 11, 20])
    alone = stream(str(tmp_path), 0)
    expected = [sorted(rows(next(alone))) for _ in range(6)]
    results = run_ranks(train_and_resume, 2, str(tmp_path), timeout_s=300)
    for number, batch in enumerate(expected):
        assert sorted(row for batches, _, _ in results for row in batches[number]) == batch
    keys = [key for _, rank_keys, _ in results for key in rank_keys]
    assert len(keys) == len(set(keys)) == 53
    assert all("a loader worker died" in said for _, _, said in results)


PROGRAM = """
import os, signal, sys
from tests.data.test_stream_ranks import stream
if __name__ == "__main__":
    ours = stream(sys.argv[1], 2)
    next(ours)
    workers = [worker.pid for worker in ours._parts._workers]
    for pid in workers:
        os.kill(pid, signal.SIGTERM)  # as launchers do; the rank still needs batches to end its step
    for _ in range(6):
        next(ours)
    print(*workers, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_outlive_a_sigterm_and_die_with_their_rank(tmp_path):
    make_shards(tmp_path, [17, 5, 11, 20])
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**rank_environment(0, 1), "PYTHONPATH": str(ROOT)}
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )  # fmt: skip
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    assert rank.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in workers)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
