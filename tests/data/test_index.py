"""Indices: the same samples with and without one, fewer headers and bytes read, and a stale one is left out."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tarfile
from pathlib import Path

import pytest

from disco_ds.cli.data.main import main
from disco_ds.data import TrainStream, merge_states
from disco_ds.data import index as index_module
from disco_ds.data import shards as module
from disco_ds.data.index import find_offsets
from disco_ds.data.shards import Access, read_shard, sample_offsets
from disco_ds.data.sources import INDEX_ENDING, expand
from tests.helpers.shards import (
    data_config,
    image_bytes,
    letters,
    make_shards,
    noisy,
    sample,
    truncate,
    write_shard,
    write_tar,
)


def index(*arguments: object) -> int:
    return main(["index", *map(str, arguments), "--workers", "1"])


def odd_shard(folder: Path) -> Path:
    """Long names, folders, files of no sample, duplicates, a key that comes back, in both formats of long names."""
    path = folder / "odd.tar"
    members = [("__meta__/note.txt", b"x"), ("README", b"no extension"), ("a.png", image_bytes(1)), ("a.txt", b"one")]
    members += [(f"{'deep/' * 40}{'n' * 120}.png", image_bytes(2)), (f"{'deep/' * 40}{'n' * 120}.txt", b"two")]
    members += [("ü.png", image_bytes(3)), ("ü.txt", b"three"), ("ü.txt", b"again"), ("a.png", image_bytes(4))]
    members += [("a.txt", b"a comes back"), ("b.txt", b"no picture"), ("c.png", b""), ("c.txt", b"empty")]
    write_tar(path, members)
    with tarfile.open(path, "a", format=tarfile.GNU_FORMAT) as archive:
        folder_info = tarfile.TarInfo("d")
        folder_info.type = tarfile.DIRTYPE
        archive.addfile(folder_info)
        for name, content in (("x" * 200 + ".png", image_bytes(5)), ("x" * 200 + ".txt", b"five")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        archive.addfile(folder_info)
    return path


def described(shard: Path, first: int, step: int, **options: str) -> list[tuple]:
    raws = read_shard(str(shard), None, first, step, Access(**options))
    return [(raw.number, raw.key, raw.files, raw.extensions, raw.duplicates) for raw in raws]


def test_every_slice_is_the_same(tmp_path):
    for shard in (odd_shard(tmp_path), *make_shards(tmp_path, [7, 1])):
        slices = [(first, step) for first in range(9) for step in (1, 2, 3, 50)]
        without = [described(shard, *part) for part in slices]
        assert index(shard) == 0
        assert find_offsets(str(shard)) == sample_offsets(str(shard))
        assert [described(shard, *part) for part in slices] == without
        assert index(shard, "--out", tmp_path / "elsewhere") == 0
        Path(f"{shard}{INDEX_ENDING}").unlink()
        assert [described(shard, *part, index=str(tmp_path / "elsewhere")) for part in slices] == without


class Counted:
    """Counts tar headers that are looked at and bytes that are read."""

    def __init__(self, monkeypatch):
        self.headers = self.bytes = 0
        plain_open, plain_header = module.gopen, module._StrictInfo.fromtarfile.__func__

        class File(io.FileIO):
            def readinto(file, buffer):
                count = super().readinto(buffer)
                self.bytes += count
                return count

        def opened(path, mode):
            return io.BufferedReader(File(path), 512) if path.endswith(".tar") else plain_open(path, mode)

        def header(cls, archive):
            self.headers += 1
            return plain_header(cls, archive)

        monkeypatch.setattr(module, "gopen", opened)
        monkeypatch.setattr(module._StrictInfo, "fromtarfile", classmethod(header))

    def take(self) -> tuple[int, int]:
        taken, self.headers, self.bytes = (self.headers, self.bytes), 0, 0
        return taken


def test_resuming_and_slices_read_only_what_they_give(tmp_path, monkeypatch):
    """Two shards in eight lanes: each is cut into four slices, of which three quarters belong to others."""
    for number in range(2):
        samples = {f"{number}-{i:03d}": sample(i, png=image_bytes(i, 64, "BMP")) for i in range(60)}
        write_shard(tmp_path / f"{number}.tar", samples)
    config = data_config(str(tmp_path), lanes=8, shuffle=16)
    options = {"rank": 0, "world_size": 1, "seed": 3, "transform": noisy, "tokenizer": letters, "global_batch": 8}
    stream = TrainStream(config, **options)
    for _ in range(9):
        next(stream)
    cursor = merge_states([stream.state()])
    counted = Counted(monkeypatch)

    def three(**more):
        index_module._come_past.cache_clear()  # as in a new process
        batches = [next(stream) for stream in [TrainStream(config, **options, **more)] for _ in range(3)]
        rows = [(batch.keys, batch.images.tolist(), batch.texts.tolist()) for batch in batches]
        return rows, counted.take()

    fresh, (fresh_headers, fresh_bytes) = three()
    resumed, (resumed_headers, resumed_bytes) = three(cursor=cursor)
    assert index(tmp_path) == 0
    counted.take()
    fresh_indexed, (headers, size) = three()
    assert fresh_indexed == fresh
    assert headers < fresh_headers
    assert size < fresh_bytes
    resumed_indexed, (headers, size) = three(cursor=cursor)
    assert resumed_indexed == resumed
    assert headers < resumed_headers / 3
    assert size < resumed_bytes


def test_slices_read_side_by_side_know_where_the_others_were(tmp_path, monkeypatch):
    """Without an index: four slices in turn find each header once and read it once for its sample."""
    (shard,) = make_shards(tmp_path, [40])
    counted = Counted(monkeypatch)
    alone = [described(shard, first, 4) for first in range(4)]
    index_module._come_past.cache_clear()
    counted.take()
    slices = [read_shard(str(shard), None, first, 4) for first in range(4)]
    together = [[next(raws, None) for raws in slices] for _ in range(10)]
    assert all(next(raws, None) is None for raws in slices)
    headers, _ = counted.take()
    assert headers < 240  # four times through all of them would be 320
    for part, expected in zip(zip(*together, strict=True), alone, strict=True):
        assert [(r.number, r.key, r.files, r.extensions, r.duplicates) for r in part] == expected


def test_an_index_is_taken_for_no_shard(tmp_path):
    shards = [str(path) for path in make_shards(tmp_path, [2, 2])]
    assert index(tmp_path) == 0
    for entry in (tmp_path, tmp_path / "*", f"{tmp_path}/s00{{0,1}}*"):
        assert list(expand(str(entry))[0].shards) == shards


@pytest.mark.parametrize("change", ["longer", "same size", "shorter"])
def test_a_stale_index_is_left_out_with_a_warning(tmp_path, caplog, change):
    (shard,) = make_shards(tmp_path, [6])
    assert index(shard) == 0
    if change == "shorter":
        truncate(shard, 512 * 4 * 5)
    else:
        numbers = range(10, 16 if change == "same size" else 18)
        write_shard(shard, {f"{n:06d}": sample(n) for n in numbers})
    with caplog.at_level(logging.WARNING, "disco_ds.data"):
        raws = read_shard(str(shard), None, 2, 1)
        assert next(raws).key == ("000002" if change == "shorter" else "000012")
        assert [next(read_shard(str(shard), None, 2, 1)).number for _ in range(3)] == [2, 2, 2]
    assert caplog.text.count("is left out; run disco-data index again") == 1
    if change != "shorter":
        assert index(shard) == 0
        assert find_offsets(str(shard)) == sample_offsets(str(shard))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 1, "bytes": 1, "headers": "x", "offsets": 3}'])
def test_a_broken_index_is_left_out(tmp_path, caplog, content):
    (shard,) = make_shards(tmp_path, [6])
    Path(f"{shard}{INDEX_ENDING}").write_text(content)
    with caplog.at_level(logging.WARNING, "disco_ds.data"):
        assert [raw.number for raw in read_shard(str(shard), None, 1, 2)] == [1, 3, 5]
    assert f"{shard.name}{INDEX_ENDING} " in caplog.text


def test_what_cannot_be_indexed_is_named(tmp_path, capsys):
    good, cut = make_shards(tmp_path, [4, 4])
    truncate(cut, 512 * 4)
    (tmp_path / "z.tar.gz").write_bytes(gzip.compress(good.read_bytes()))
    assert index(tmp_path) == 1
    said = capsys.readouterr()
    assert "1 indices of 4 samples" in said.out
    assert "2 shards have none" in said.out
    assert "truncated_shard" in said.err
    assert "a compressed tar cannot be indexed" in said.err
    assert not Path(f"{cut}{INDEX_ENDING}").exists()
    assert json.loads(Path(f"{good}{INDEX_ENDING}").read_text())["samples"] == 4
    assert index(good) == 0
    assert "1 were there" in capsys.readouterr().out
    for arguments, words in (
        (["pipe:cat x"], "only local shards are indexed"),
        ([tmp_path / "none"], "does not exist"),
        ([good, write_shard(tmp_path / "b" / good.name, {}), "--out", tmp_path / "o"], "have one name"),
    ):
        assert index(*arguments) == 2
        assert words in capsys.readouterr().err
