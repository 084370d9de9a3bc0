"""Bad samples and bad shards: counted by source and reason, named, never fatal up to the limit."""

from __future__ import annotations

import logging
from collections import Counter, deque
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from disco_ds.data.shards import ShardFault, read_shard
from disco_ds.errors import DataError
from tests.helpers.shards import (
    DIRT,
    data_config,
    dirty_samples,
    heldout,
    make_shards,
    sample,
    train_stream,
    truncate,
    write_shard,
    write_tar,
)

COUNTS = {reason: number for number, reason in enumerate(sorted(DIRT), start=1)}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0)])
def test_heldout_counts_every_bad_sample_once(tmp_path, ranks, workers):
    good = {f"good{i}": sample(i) for i in range(10)}
    write_shard(tmp_path / "a.tar", {**good, **dirty_samples(COUNTS)})
    make_shards(tmp_path, [3, 2], start=100)
    batches = [batch for rank in range(ranks) for batch in heldout(str(tmp_path), rank, ranks, workers=workers)]
    faults = sum((Counter(batch.faults) for batch in batches), Counter())
    assert faults == {f"{tmp_path.name}/{reason}": count for reason, count in COUNTS.items()}
    assert sorted(key for batch in batches for key in batch.keys) == sorted(
        [f"a.tar#good{i}" for i in range(10)] + [f"s000.tar#{n:06d}" for n in (100, 101, 102)]
        + [f"s001.tar#{n:06d}" for n in (103, 104)]
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_counts_every_bad_sample_once_a_pass(tmp_path, workers, caplog):
    """21 bad and 31 good: after enough passes each bad one was counted as often as each good one was given."""
    samples = {**{f"good{i:02d}": sample(i) for i in range(31)}, **dirty_samples(COUNTS)}
    write_shard(tmp_path / "a.tar", dict(sorted(samples.items(), key=lambda item: hash_of(item[0]))))
    stream = train_stream(data_config(str(tmp_path), lanes=1, workers=workers), 31)
    faults: Counter[str] = Counter()
    reads = 0
    with caplog.at_level(logging.WARNING, "disco_ds.data"):
        for _ in range(4):
            batch = next(stream)
            faults.update(batch.faults)
            reads += batch.reads
        # The last pass may not have come to its end with the last good sample: the next one is of the pass after it.
        cursor = stream.state()
    stream.close()
    left = 4 * sum(COUNTS.values()) - sum(faults.values())
    assert 0 <= left <= sum(COUNTS.values())
    assert all(
        faults[f"{tmp_path.name}/{reason}"] in range(3 * count, 4 * count + 1) for reason, count in COUNTS.items()
    )
    assert reads == 4 * 31 + sum(faults.values())
    assert sum(state["bad"] for state in cursor["lane_states"].values()) == sum(faults.values())
    shown = [record.message for record in caplog.records if "undecodable_image" in record.message]
    assert len(shown) == 3
    assert "a.tar#bad-undecodable_image-" in shown[0]
    assert "only counted" in shown[-1]


def hash_of(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())


def test_resume_counts_nothing_twice(tmp_path):
    """Faults of an unbroken run = faults before + faults after a resume at every batch, a broken shard included."""
    samples = {**{f"good{i:02d}": sample(i) for i in range(31)}, **dirty_samples(COUNTS)}
    write_shard(tmp_path / "a.tar", dict(sorted(samples.items(), key=lambda item: hash_of(item[0]))))
    cut = make_shards(tmp_path, [9], start=500)[0]
    truncate(cut, cut.stat().st_size // 2)
    config = data_config(str(tmp_path), lanes=3, shuffle=30)
    whole, unbroken, broken, cursor = train_stream(config, 8), Counter(), Counter(), None
    for _ in range(12):
        unbroken.update(next(whole).faults)
        part = train_stream(config, 8, cursor=cursor)
        broken.update(next(part).faults)
        cursor = part.state()
    assert unbroken == broken
    assert unbroken[f"{tmp_path.name}/truncated_shard"] >= 1


def test_faults_are_logged_though_an_evaluation_comes_between():
    from disco_ds.data.stream import Batch
    from disco_ds.run.window import Window

    run = SimpleNamespace(train_step=SimpleNamespace(timer=SimpleNamespace(read=dict)), state=SimpleNamespace(step=3))
    window = Window(run)
    batch = Batch(torch.empty(0), torch.empty(0), [], {"train/no caption": 2}, 2)
    window.timed_next(iter([batch]))
    window.restart()  # as after an evaluation
    window.timed_next(iter([batch]))
    assert window.faults == {"train/no caption": 4}


def test_too_many_bad_samples_stop_the_run(tmp_path):
    bad = {f"bad{i}": sample(i, png=b"x") for i in range(60)}
    write_shard(tmp_path / "a.tar", {**bad, **{f"good{i}": sample(i) for i in range(30)}})
    stream = train_stream(data_config(str(tmp_path), lanes=2), 8)
    with pytest.raises(DataError, match=r"of 1\d\d\d samples read are bad.*max_bad_fraction = 0\.5.*undecodable_image"):
        deque(islice(stream, 200), maxlen=0)
    stream = train_stream(data_config(str(tmp_path), lanes=2, max_bad_fraction=0.7), 8)
    for _ in range(100):
        next(stream)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_good_is_an_error_and_no_stall(tmp_path, workers):
    write_shard(tmp_path / "a.tar", {f"bad{i}": sample(i, png=b"x") for i in range(5)})
    stream = train_stream(data_config(str(tmp_path), lanes=2, workers=workers), 8)
    with pytest.raises(DataError, match=r"without one usable sample.*undecodable_image"):
        next(stream)
    stream.close()


def test_a_shard_that_vanishes_is_counted(tmp_path):
    paths = make_shards(tmp_path, [8, 8, 8])
    stream = train_stream(data_config(str(tmp_path), lanes=1, shuffle=8), 8)
    next(stream)
    paths[1].unlink()
    faults = sum((Counter(next(stream).faults) for _ in range(6)), Counter())
    assert set(faults) == {f"{tmp_path.name}/missing_shard"}
    assert 2 <= faults.total() <= 4


BROKEN = {
    "not_a_tar": lambda path: path.write_bytes(b"<html>404</html>" * 100),
    "unreadable_shard": lambda path: (path.unlink(), path.mkdir()),
    "missing_shard": lambda path: path.unlink(),
    "truncated_shard": lambda path: truncate(path, 512 * 9),
    "damaged_shard": lambda path: path.write_bytes(_overwritten(path.read_bytes(), 512 * 8)),
}


def _overwritten(data: bytes, where: int) -> bytes:
    return data[:where] + b"\xff" * 512 + data[where + 512 :]


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_shards_have_their_reasons(tmp_path, reason):
    """Each sample takes four blocks of 512: header and content of .png and .txt."""
    (path,) = make_shards(tmp_path, [5])
    BROKEN[reason](path)
    read = []
    with pytest.raises(ShardFault, match=path.name) as caught:
        read.extend(read_shard(str(path), None))
    assert caught.value.reason == reason
    whole = {"truncated_shard": 2, "damaged_shard": 1}.get(reason, 0)
    assert [raw.key for raw in read][:whole] == [f"{n:06d}" for n in range(whole)]
    assert len(read) == whole


@pytest.mark.parametrize("keep", range(512, 512 * 21, 512))
def test_any_truncation_is_noticed(tmp_path, keep):
    (path,) = make_shards(tmp_path, [5])
    content_end = 512 * 20
    truncate(path, keep)
    read = []
    with pytest.raises(ShardFault) as caught:
        read.extend(raw.key for raw in read_shard(str(path), None))
    assert caught.value.reason == "truncated_shard"
    assert len(read) <= -(-min(keep, content_end) // 2048)


def test_pipe_that_fails_is_unreadable(tmp_path):
    for command in ("pipe:exit 3", f"pipe:head -c 1000 {make_shards(tmp_path, [5])[0]}; exit 4"):
        with pytest.raises(ShardFault) as caught:
            list(read_shard(command, None))
        assert caught.value.reason == "unreadable_shard"


def test_duplicate_files_are_counted_and_the_first_is_kept(tmp_path):
    members = [(f"k.{ext}", data) for _ in range(2) for ext, data in sample(7).items()]
    write_tar(tmp_path / "a.tar", [*members, *((f"l.{ext}", data) for ext, data in sample(8).items())])
    (batch,) = heldout(str(tmp_path))
    assert batch.keys == ["a.tar#k", "a.tar#l"]
    assert batch.faults == {f"{tmp_path.name}/duplicate_key": 1}
