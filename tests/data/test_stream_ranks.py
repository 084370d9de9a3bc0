"""The stream on real ranks with loader workers: the same global batches as in one process, and a resume in between."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist

from disco_ds.data.cursor import merge_states
from disco_ds.data.stream import TrainStream
from disco_ds.distributed import everyones
from disco_ds.errors import DataError
from tests.helpers.ranks import run_ranks
from tests.helpers.shards import data_config, heldout, make_shards, noisy, train_stream


def stream(folder: str, workers: int, cursor: Any = None, rank: int = 0, world_size: int = 1) -> TrainStream:
    config = data_config(folder, workers=workers, lanes=12)
    return train_stream(config, 24, rank=rank, world_size=world_size, seed=1, transform=noisy, cursor=cursor)


def rows(batch: Any) -> list[tuple[str, float]]:
    return list(zip(batch.keys, batch.images[:, 0, 0, 0].tolist(), strict=True))


def train_and_resume(folder: str) -> tuple[list[list[tuple[str, float]]], list[str], str, list[int]]:
    """Three batches with 2 workers a rank, a cursor, three more with 1 that was told to end, as launchers do while the
    rank still needs batches; the held-out keys; then a worker dies; and one is left when the rank goes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = stream(folder, 2, None, rank, world_size)
    batches = [rows(next(first)) for _ in range(3)]
    cursor = merge_states(everyones(first.state()))
    first.close()
    second = stream(folder, 1, cursor, rank, world_size)
    batches.append(rows(next(second)))
    for pid in worker_pids(second):
        os.kill(pid, signal.SIGTERM)
    batches += [rows(next(second)) for _ in range(8)]
    keys = [key for batch in heldout(folder, rank, world_size, batch=5, workers=1) for key in batch.keys]
    for pid in worker_pids(second):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError) as caught:
        deque(islice(second, 10), maxlen=0)  # what was read ahead may still come
    second.close()
    LEFT.append(stream(folder, 1, cursor, rank, world_size))
    next(LEFT[0])
    return batches, keys, str(caught.value), worker_pids(LEFT[0])


LEFT: list[TrainStream] = []


def worker_pids(stream: TrainStream) -> list[int]:
    return [worker.pid for worker in stream._parts._workers]  # type: ignore[union-attr]


def test_two_ranks_with_workers_give_the_batches_of_one_process(tmp_path):
    make_shards(tmp_path, [17, 5, 11, 20])
    alone = stream(str(tmp_path), 0)
    expected = [sorted(rows(next(alone))) for _ in range(12)]
    results = run_ranks(train_and_resume, 2, str(tmp_path), timeout_s=300)
    for number, batch in enumerate(expected):
        assert sorted(row for batches, *_ in results for row in batches[number]) == batch
    keys = [key for _, rank_keys, *_ in results for key in rank_keys]
    assert len(keys) == len(set(keys)) == 53
    assert all("a loader worker died" in said for _, _, said, _ in results)
    left = [pid for *_, pids in results for pid in pids]
    assert len(left) == 2
    deadline = time.monotonic() + 60
    while any(map(is_running, left)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, left))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
