"""Slices of shards: each gives exactly its samples, and reads no more than them once the headers are known."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from disco_ds.data import shards as module
from disco_ds.data.shards import ShardFault, read_shard
from disco_ds.data.sources import expand
from tests.helpers.shards import image_bytes, make_shards, sample, truncate, write_shard, write_tar


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


def described(shard: Path | str, first: int = 0, step: int = 1) -> list[tuple]:
    raws = read_shard(str(shard), None, first, step)
    return [(raw.number, raw.key, raw.files, raw.extensions, raw.duplicates) for raw in raws]


def test_every_slice_of_every_kind_of_shard(tmp_path):
    """In the middle of a file, of a compressed one, and of a pipe."""
    for shard in (odd_shard(tmp_path), *make_shards(tmp_path, [7, 1])):
        whole = described(shard)
        packed = shard.with_suffix(".tar.gz")
        packed.write_bytes(gzip.compress(shard.read_bytes()))
        for first in range(9):
            for step in (1, 2, 3, 50):
                assert described(shard, first, step) == whole[first::step]
                assert described(packed, first, step) == whole[first::step]
        assert described(f"pipe:cat {shard}", 1, 2) == whole[1::2]


def test_slices_give_what_stands_before_a_fault(tmp_path):
    (shard,) = make_shards(tmp_path, [9])
    truncate(shard, 4 * 512 * 6 + 700)
    for first, step in ((0, 2), (1, 2), (2, 3), (5, 1)):
        numbers = []
        with pytest.raises(ShardFault, match="unexpected end of data"):
            numbers.extend(raw.number for raw in read_shard(str(shard), None, first, step))
        assert numbers == list(range(first, 6, step))


def test_slices_read_only_what_they_give(tmp_path, monkeypatch):
    """Six slices of one shard find each header once, and read it once for its sample."""
    (shard,) = make_shards(tmp_path, [40])
    whole, headers = described(shard), 0
    plain = module._StrictInfo.fromtarfile.__func__

    def counted(cls, archive):
        nonlocal headers
        headers += 1
        return plain(cls, archive)

    monkeypatch.setattr(module._StrictInfo, "fromtarfile", classmethod(counted))
    for first in range(6):
        assert described(shard, first, 6) == whole[first::6]
    assert headers <= 2 * 80 + 1 + 6  # each file's, the end mark, and the first as each slice opens the archive


def test_a_shard_that_is_written_anew_is_read_anew(tmp_path):
    (shard,) = make_shards(tmp_path, [6])
    assert len(described(shard, 0, 2)) == 3
    write_shard(shard, {f"{n:06d}": sample(n) for n in range(10, 18)})
    assert [key for _, key, *_ in described(shard, 0, 2)] == ["000010", "000012", "000014", "000016"]


def test_an_index_of_the_release_before_is_taken_for_no_shard(tmp_path):
    shards = [str(path) for path in make_shards(tmp_path, [2, 2])]
    for shard in shards:
        Path(f"{shard}.index.json").write_text("{}")
    for entry in (tmp_path, tmp_path / "*", f"{tmp_path}/s00{{0,1}}*"):
        assert list(expand(str(entry))[0].shards) == shards
