"""Remote shards that fail: tried again with waits, no sample twice, then counted; local files are never tried again."""

from __future__ import annotations

import logging
import shlex
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from disco_ds.data import shards as module
from disco_ds.data.shards import Access, ShardFault, read_shard
from tests.helpers.shards import data_config, make_shards, train_stream, truncate

SAMPLE_BYTES = 4 * 512


def flaky(folder: Path, shard: Path, failures: int, keep: int, name: str = "count") -> str:
    """A command that gives ``keep`` bytes and fails, so many times, and then the whole; it counts its starts."""
    counter, data = shlex.quote(str(folder / name)), shlex.quote(str(shard))
    fail = f"head -c {keep} {data}; exit 1"
    return f"pipe:echo x >> {counter}; if [ $(wc -l < {counter}) -le {failures} ]; then {fail}; fi; cat {data}"


def starts(folder: Path, name: str = "count") -> int:
    return len((folder / name).read_text().splitlines())


@pytest.fixture
def waits(monkeypatch):
    """The seconds that were waited, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waited.append))  # the real one serves subprocess too
    return waited


# between samples, in a header, in a picture, between the files of one sample, nothing at all, all but the end mark
@pytest.mark.parametrize("keep", [2 * SAMPLE_BYTES, 2 * SAMPLE_BYTES + 100, 3 * SAMPLE_BYTES + 700,
                                  2 * SAMPLE_BYTES + 1024, 0, 5 * SAMPLE_BYTES])  # fmt: skip
@pytest.mark.parametrize(("first", "step"), [(0, 1), (1, 2)])
def test_a_pipe_that_fails_is_read_on_where_it_broke(tmp_path, waits, keep, first, step):
    (shard,) = make_shards(tmp_path, [5])
    command = flaky(tmp_path, shard, failures=3, keep=keep)
    found = list(read_shard(command, None, first, step, Access(retries=3, retry_s=1.0)))
    expected = list(read_shard(str(shard), None, first, step))
    assert [(raw.key, raw.number, raw.files) for raw in found] == [(r.key, r.number, r.files) for r in expected]
    assert starts(tmp_path) == 4
    # How much of a failed command's output is read is chance: webdataset's pipe raises when it sees the status.
    assert len(waits) == 3
    assert 0.5 <= waits[0] <= 1.5
    assert all(0.5 <= wait <= 1.5 * 4 for wait in waits)


def test_it_is_given_up_after_so_many_attempts(tmp_path, waits):
    (shard,) = make_shards(tmp_path, [5])
    command = flaky(tmp_path, shard, failures=100, keep=2 * SAMPLE_BYTES)
    read = []
    with pytest.raises(ShardFault) as caught:
        read.extend(raw.key for raw in read_shard(command, None, access=Access(retries=2)))
    assert caught.value.reason == "unreadable_shard"
    assert 3 <= starts(tmp_path) <= 3 + 2 * len(read)  # a new sample begins the count anew
    # A command that failed after whole files may have more of the last sample; that one is not given.
    assert read in ([], ["000000"])


def test_waits_grow(tmp_path, waits):
    with pytest.raises(ShardFault):
        list(read_shard("pipe:exit 1", None, access=Access(retries=4, retry_s=2.0)))
    for number, wait in enumerate(waits):
        assert 2.0 * 2**number * 0.5 <= wait <= 2.0 * 2**number * 1.5
    assert len(waits) == 4


def test_a_remote_shard_that_is_short_itself_is_read_twice_only(tmp_path, waits):
    (shard,) = make_shards(tmp_path, [5])
    truncate(shard, 2 * SAMPLE_BYTES)
    read = []
    with pytest.raises(ShardFault) as caught:
        read.extend(raw.key for raw in read_shard(f"pipe:cat {shard}", None, access=Access(retries=9)))
    assert caught.value.reason == "truncated_shard"
    assert read == ["000000", "000001"]  # as a file of this content
    assert len(waits) == 1


def test_local_files_are_not_tried_again(tmp_path, waits):
    (shard,) = make_shards(tmp_path, [5])
    truncate(shard, 2 * SAMPLE_BYTES)
    for path, reason in ((shard, "truncated_shard"), (tmp_path / "none.tar", "missing_shard")):
        with pytest.raises(ShardFault) as caught:
            list(read_shard(str(path), None, access=Access(retries=3)))
        assert caught.value.reason == reason
    assert not waits


def test_the_wait_is_real(tmp_path, caplog):
    (shard,) = make_shards(tmp_path, [2])
    command = flaky(tmp_path, shard, failures=1, keep=0)
    before = time.monotonic()
    with caplog.at_level(logging.WARNING, "disco_ds.data"):
        assert len(list(read_shard(command, None, access=Access(retries=1, retry_s=0.2)))) == 2
    assert time.monotonic() - before >= 0.1
    assert "attempt 1 of 1 in 0." in caplog.text


def test_the_stream_is_the_same_with_failures_and_counts_what_it_lost(tmp_path):
    whole, other = make_shards(tmp_path, [9, 7])

    def keys(entries, **fields):
        config = data_config(entries, lanes=2, shuffle=8, retry_s=0.0, **fields)
        stream = train_stream(config, 8)
        batches = [next(stream) for _ in range(4)]
        return ([key.rsplit("#", 1)[1] for b in batches for key in b.keys], sum((Counter(b.faults) for b in batches),
                Counter()))  # fmt: skip

    failing = flaky(tmp_path, whole, failures=2, keep=3 * SAMPLE_BYTES)
    expected, _ = keys([f"pipe:cat {whole}", f"pipe:cat {other}"])
    found, faults = keys([failing, f"pipe:cat {other}"], retries=2)
    assert sorted(found) == sorted(expected)
    assert not faults
    (tmp_path / "count").unlink()
    _, faults = keys([flaky(tmp_path, whole, 999, 3 * SAMPLE_BYTES), f"pipe:cat {other}"], retries=1)
    assert {kind.rsplit("/", 1)[1] for kind in faults} == {"unreadable_shard"}
