"""The check before a run says what it saw and what it looked for."""

from __future__ import annotations

import pytest

from disco_ds.data.probe import probe
from disco_ds.errors import DataError
from tests.helpers.shards import data_config, make_shards, to_tensor, write_shard, write_tar


def test_probe_says_what_was_seen(tmp_path):
    write_shard(tmp_path / "a.tar", {f"k{i}": {"jpeg": b"x", "caption": b"y"} for i in range(300)})
    with pytest.raises(DataError) as caught:
        probe(data_config(str(tmp_path)), transform=to_tensor)
    for part in (
        "data.train",
        "a.tar",
        "200 samples scanned",
        "0 kept",
        ".jpeg (200x), .caption (200x)",
        "'txt'",
        "missing_caption",
    ):
        assert part in str(caught.value)
    (pair,) = probe(data_config(str(make_shards(tmp_path / "good", [1])[0])), transform=to_tensor)
    assert pair.caption == "picture 0"


def test_probe_looks_at_every_source_and_past_bad_shards(tmp_path):
    first, second = make_shards(tmp_path / "a", [2, 2])
    first.write_bytes(b"nothing")
    empty = write_tar(tmp_path / "b" / "empty.tar", [])
    assert len(probe(data_config(str(tmp_path / "a")), transform=to_tensor)) == 1
    with pytest.raises(DataError, match=r"'b': 0 samples scanned up to .*empty\.tar, 0 kept"):
        probe(data_config([str(second), str(empty.parent)]), transform=to_tensor)
