"""The stream on real ranks with loader workers: the same global batches as in one process, and a resume in between."""

from __future__ import annotations

import os
import signal
from collections import deque
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist

from disco_ds.data import DataError, TrainStream, merge_states, read_heldout
from tests.ranks import run_ranks
from tests.shards import data_config, letters, make_shards, noisy, to_tensor


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
    results = run_ranks(train_and_resume, 2, str(tmp_path))
    for number, batch in enumerate(expected):
        assert sorted(row for batches, _, _ in results for row in batches[number]) == batch
    keys = [key for _, rank_keys, _ in results for key in rank_keys]
    assert len(keys) == len(set(keys)) == 53
    assert all("a loader worker died" in said for _, _, said in results)
