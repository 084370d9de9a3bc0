"""Every kind of dirt on two real ranks with loader workers: each bad sample and shard is counted exactly as often as it
is met, and the global batches are those of one process."""

from __future__ import annotations

import io
import zlib
from collections import Counter
from typing import Any

import torch.distributed as dist
from PIL import Image

from disco_ds.data.stream import TrainStream
from tests.helpers.ranks import run_ranks
from tests.helpers.shards import (
    DIRT,
    data_config,
    dirty_samples,
    heldout,
    image_bytes,
    make_shards,
    noisy,
    sample,
    train_stream,
    truncate,
    write_shard,
    write_tar,
)

COUNTS = {reason: number for number, reason in enumerate([*sorted(DIRT), "tiny_image", "extreme_aspect"], 1)}
BATCH, BATCHES = 24, 7


FIELDS = {"lanes": 12, "shuffle": 48, "min_image_size": 8, "max_aspect": 2.0, "max_bad_fraction": 0.9}


def dirty_folder(folder: Any) -> str:
    """31 + 20 good samples; every kind of bad sample in its own number; shards that are cut, broken, or none at all."""
    bad = dirty_samples({reason: count for reason, count in COUNTS.items() if reason in DIRT})
    for i in range(COUNTS["tiny_image"]):
        bad[f"tiny{i}"] = sample(i, png=image_bytes(i, 7))
    for i in range(COUNTS["extreme_aspect"]):
        bad[f"long{i}"] = sample(i, png=long_image())
    good = {f"good{i:02d}": sample(i) for i in range(31)}
    mixed = sorted({**good, **bad}.items(), key=lambda item: hash_of(item[0]))
    write_shard(folder / "a.tar", dict(mixed))
    make_shards(folder, [20], start=100)
    members = [(f"d.{ext}", data) for _ in range(2) for ext, data in sample(7).items()]
    write_tar(folder / "d.tar", members)
    (cut,) = make_shards(folder / "cut", [9], start=500, prefix="c")
    truncate(cut, 512 * 17)
    (folder / "n.tar").write_bytes(b"<html>" * 500)
    return str(folder)


def long_image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (17, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def stream_of(folder: str, workers: int, rank: int = 0, world_size: int = 1) -> TrainStream:
    config = data_config(folder, workers=workers, **FIELDS)
    return train_stream(config, BATCH, rank=rank, world_size=world_size, seed=2, transform=noisy)


def take(stream: TrainStream) -> tuple[list[list[tuple[str, float]]], Counter[str], int, int]:
    """Rows of each batch, and after the last one: faults, reads, and bad samples by the lanes' own count."""
    batches = [next(stream) for _ in range(BATCHES)]
    rows = [list(zip(b.keys, b.images[:, 0, 0, 0].tolist(), strict=True)) for b in batches]
    faults = sum((Counter(batch.faults) for batch in batches), Counter())
    bad = sum(state["bad"] for state in stream.state()["lane_states"].values())
    return rows, faults, sum(batch.reads for batch in batches), bad


def on_a_rank(folder: str) -> list[Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for workers in (1, 3):
        stream = stream_of(folder, workers, rank, world_size)
        found.append(take(stream))
        stream.close()
        batches = heldout(folder, rank, world_size, batch=5, workers=workers, **FIELDS)
        keys = [key for batch in batches for key in batch.keys]
        found.append((keys, sum((Counter(batch.faults) for batch in batches), Counter())))
    return found


def test_two_ranks_with_one_and_three_workers_count_exactly(tmp_path):
    folder = dirty_folder(tmp_path / "data")
    alone = stream_of(folder, 0)
    rows, faults, reads, bad = take(alone)
    ranks = run_ranks(on_a_rank, 2, folder, timeout_s=300)
    for which in (0, 2):  # the training stream, with 1 worker and with 3
        for number in range(BATCHES):
            assert sorted(row for rank in ranks for row in rank[which][0][number]) == sorted(rows[number])
        assert sum((rank[which][1] for rank in ranks), Counter()) == faults
        assert sum(rank[which][2] for rank in ranks) == reads
        assert sum(rank[which][3] for rank in ranks) == bad
    of_samples = Counter({kind: count for kind, count in faults.items() if kind.rsplit("/", 1)[1] in COUNTS})
    assert of_samples.total() == bad == reads - BATCH * BATCHES
    assert {kind.rsplit("/", 1)[1] for kind in faults} >= {*COUNTS, "truncated_shard", "not_a_tar", "duplicate_key"}

    once = Counter({f"data/{reason}": count for reason, count in COUNTS.items()})
    once.update({"data/truncated_shard": 1, "data/not_a_tar": 1, "data/duplicate_key": 1})
    for which in (1, 3):  # the held-out data: each exactly once over both ranks
        keys = [key for rank in ranks for key in rank[which][0]]
        assert len(keys) == len(set(keys)) == 31 + 20 + 1 + 4
        assert sum((rank[which][1] for rank in ranks), Counter()) == once
