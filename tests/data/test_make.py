"""disco-data make: bytes unchanged, the same shards however often it is killed, and everything missing named."""

from __future__ import annotations

import csv
import json
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from disco_ds.cli.data import make as command
from disco_ds.cli.data.main import main
from disco_ds.data.shards import read_shard
from disco_ds.data.tools.make import make_shard, split_of
from tests.helpers.shards import image_bytes


def make(*arguments: object, workers: int = 1) -> int:
    return main(["make", *map(str, arguments), "--workers", str(workers)])


def photos(folder: Path, count: int = 12) -> Path:
    """Images with captions beside them, in folders, one with a class as well."""
    for i in range(count):
        base = folder / ("ab"[i % 2]) / f"photo {i:02d}"
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_suffix((".png", ".PNG")[i % 3 == 2]).write_bytes(image_bytes(i))
        base.with_suffix(".txt").write_text(f"caption {i}")
    (folder / "a" / "photo 00.cls").write_text("7")
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.tar"))}


def samples(out: Path, pattern: str = "*.tar") -> dict[str, dict[str, bytes]]:
    return {raw.key: raw.files for path in sorted(out.glob(pattern)) for raw in read_shard(str(path), None)}


def test_a_folder_with_captions_beside(tmp_path, capsys):
    source, out = photos(tmp_path / "in"), tmp_path / "out"
    assert make(source, out, "--samples-per-shard", 5) == 0
    assert sorted(content(out)) == [f"train-0000{i}.tar" for i in range(3)]
    assert "train-{00000..00002}.tar: 12 samples" in capsys.readouterr().out
    found = samples(out)
    assert len(found) == 12
    assert found["a/photo 00"] == {"png": image_bytes(0), "txt": b"caption 0", "cls": b"7"}
    assert found["a/photo 02"] == {"png": image_bytes(2), "txt": b"caption 2"}
    assert list(found) != sorted(found)  # mixed
    assert main(["check", str(out), "--workers", "1"]) == 0
    again = tmp_path / "again"
    assert make(source, again, "--samples-per-shard", 5, workers=2) == 0
    assert content(again) == content(out)


def test_what_is_missing_is_listed(tmp_path, capsys):
    source = photos(tmp_path / "in", 6)
    (source / "a" / "photo 00.txt").unlink()
    (source / "b" / "photo 01.png").unlink()
    (source / "b" / "photo 03.txt").write_text(" \n")
    (source / "b" / ".hidden.png").write_bytes(b"")
    (source / "a" / "photo 04.png").unlink()
    (source / "a" / "photo 04.png").symlink_to(source / "nothing")
    (source / "readme.md").write_text("x")
    out = tmp_path / "out"
    for _ in range(2):  # a second call writes nothing and says the same
        assert make(source, out) == 1
        said = capsys.readouterr()
        assert "2 samples" in said.out
        for words in (
            "missing  4, all in",
            "a/photo 04.png: no such file",
            "a/photo 00.png: no .txt of this name",
            "b/photo 01.txt: no image of this name",
            "b/photo 03.png: the caption is empty",
        ):
            assert words in said.err
        assert (out / "missing.txt").read_text().count("\n") == 4


def test_names_that_would_be_mixed_up_are_told_apart(tmp_path):
    """Dots end a key in webdataset, and neighbours with one key are one sample."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    names = ["a.b.png", "a.c.png", "a_b.png", "__x__.png", "a.jpeg", "a.png", "ü.png", "d.webp"]
    for i, name in enumerate(names):
        (source / name).write_bytes(image_bytes(i))
        (source / name).with_suffix(".txt").write_text(name)
    assert make(source, out) == 0
    found = samples(out)
    assert sorted(found) == sorted(["a_b", "a_c", "a_b-2", "_x__", "a", "a-2", "ü", "d"])
    images = sorted(data for files in found.values() for end, data in files.items() if end != "txt")
    assert images == sorted(image_bytes(i) for i in range(8))


def test_a_folder_for_each_class(tmp_path, capsys):
    source, out = tmp_path / "in", tmp_path / "out"
    for name in ("big_dog", "cat"):
        (source / name).mkdir(parents=True)
        for i in range(2):
            (source / name / f"{i}.png").write_bytes(image_bytes(i))
    (source / "stray.png").write_bytes(image_bytes(9))
    assert make(source, out, "--captions", "folder", "--template", "one {}") == 1
    found = samples(out)
    assert found["big_dog/0"] == {"png": image_bytes(0), "txt": b"one big dog", "cls": b"big dog"}
    assert (out / "classes.txt").read_text() == "big dog\ncat\n"
    assert "stray.png: lies in no class folder" in capsys.readouterr().err


def rows(folder: Path, count: int = 7) -> list[tuple[str, str]]:
    (folder / "img").mkdir(parents=True)
    for i in range(count):
        (folder / "img" / f"{i}.png").write_bytes(image_bytes(i))
    return [(f"img/{i}.png", f'words, "{i}"\nand a line') for i in range(count)]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_tables_of_paths(tmp_path, capsys, ending):
    table, out = tmp_path / f"t.{ending}", tmp_path / "out"
    pairs = [*rows(tmp_path), ("img/none.png", "no picture"), ("", "no path"), ("img/0.png", "")]
    with open(table, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter="\t" if ending == "tsv" else ",")
        writer.writerows([("ID", "FilePath", "Caption"), *((i, *pair) for i, pair in enumerate(pairs))])
    assert make(table, out, "--samples-per-shard", 3) == 1
    assert len(content(out)) == 3
    found = samples(out)
    assert list(found) == [f"{i:09d}" for i in range(7)]
    assert found["000000003"] == {"png": image_bytes(3), "txt": b'words, "3"\nand a line'}
    said = capsys.readouterr().err
    for words in ("row 7: img/none.png: no such file", "row 8: nothing in column 'FilePath'",
                  "row 9: img/0.png: the caption is empty"):  # fmt: skip
        assert words in said
    moved = tmp_path / "moved"
    (tmp_path / "img").rename(moved)
    named = ["--image-column", "FilePath", "--caption-column", "ID", "--image-root"]
    assert make(table, tmp_path / "o2", *named, tmp_path / "no") == 1
    assert not samples(tmp_path / "o2")


def test_parquet_of_paths_and_of_bytes(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pairs = rows(tmp_path)
    paths, texts = [path for path, _ in pairs], [text for _, text in pairs]
    encoded = [image_bytes(i, format="JPEG" if i % 2 else "PNG") for i in range(7)]
    columns = {"paths": paths, "bytes": encoded, "both": [{"bytes": data, "path": "unused.gif"} for data in encoded]}
    for name, images in columns.items():
        parquet.write_table(arrow.table({"image": images, "text": texts}), tmp_path / f"{name}.parquet")
        out = tmp_path / f"out-{name}"
        assert make(tmp_path / f"{name}.parquet", out, "--samples-per-shard", 4) == 0
        found = samples(out)
        assert [files["txt"].decode() for files in found.values()] == texts
        if name == "paths":
            assert [files["png"] for files in found.values()] == [image_bytes(i) for i in range(7)]
        else:
            assert [files[("png", "jpg")[i % 2]] for i, files in enumerate(found.values())] == encoded


def test_wrong_input_is_one_line(tmp_path, capsys, monkeypatch):
    def fails(words, *arguments):
        assert make(*arguments) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1

    (tmp_path / "empty").mkdir()
    (tmp_path / "t.csv").write_text("url,alt text\nhttp://x/1.jpg,words\n")
    (tmp_path / "other.csv").write_text("image,caption\nhttp://x/1.jpg,words\n")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    (tmp_path / "x.xlsx").write_bytes(b"")
    out = tmp_path / "out"
    fails("does not exist", tmp_path / "none", out)
    fails("it is empty", tmp_path / "empty", out)
    fails("no image (.jpg", photos(tmp_path / "in", 2).parent / "texts" if (tmp_path / "texts").mkdir() else
          tmp_path / "texts", out)  # fmt: skip
    fails("its columns are 'url', 'alt text'. Give --image-column NAME", tmp_path / "t.csv", out)
    fails("--caption-column 'x'", tmp_path / "other.csv", out, "--caption-column", "x")
    fails(".csv, .tsv, .parquet", tmp_path / "x.xlsx", out)
    pytest.importorskip("pyarrow")
    fails("is not a parquet file", tmp_path / "x.parquet", out)
    fails("is a URL; download the images first", tmp_path / "other.csv", out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails('pip install "disco-ds[parquet]"', tmp_path / "x.parquet", out)
    fails("--val-fraction: expected at least 0 and less than 1, found 1", tmp_path / "in", out, "--val-fraction", "1")


def test_another_source_or_options_in_the_same_folder_are_refused(tmp_path, capsys):
    source, out = photos(tmp_path / "in"), tmp_path / "out"
    assert make(source, out, "--samples-per-shard", 5) == 0
    before = content(out)
    assert make(source, out, "--samples-per-shard", 6) == 2
    assert "samples_per_shard was 5 and is now 6" in capsys.readouterr().err
    (source / "new.png").write_bytes(image_bytes(99))
    assert make(source, out, "--samples-per-shard", 5) == 2
    assert "as it is now" in capsys.readouterr().err
    assert make(source, source / "out", "--samples-per-shard", 5) == 2
    assert "lies in SOURCE" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    assert make(source, tmp_path / "other", "--samples-per-shard", 5) == 2
    assert "did not begin" in capsys.readouterr().err
    assert content(out) == before


def test_the_split_is_by_name_and_about_the_fraction(tmp_path):
    source, out = photos(tmp_path / "in", 40), tmp_path / "out"
    assert make(source, out, "--val-fraction", 0.25, "--samples-per-shard", 8) == 0
    train, val = samples(out, "train-*.tar"), samples(out, "val-*.tar")
    assert set(val) == {key for key in {**train, **val} if split_of(key, 0.25) == "val"}
    assert len(train) + len(val) == 40
    shares = [split_of(f"name{i}", 0.1) for i in range(10_000)]
    assert 900 < shares.count("val") < 1100
    assert split_of("name7", 0.5) == split_of("name7", 0.5)
    assert "val" not in {split_of(f"name{i}", 0.0) for i in range(1000)}


def test_captions_of_one_image_stay_on_one_side(tmp_path):
    pairs = rows(tmp_path, 30)
    lines = "".join(f"{path},{word}\n" for path, _ in pairs for word in ("one", "two"))
    (tmp_path / "t.csv").write_text("path,text\n" + lines)
    out = tmp_path / "out"
    assert make(tmp_path / "t.csv", out, "--val-fraction", 0.5) == 0
    train, val = samples(out, "train-*.tar"), samples(out, "val-*.tar")
    sides = [{files["png"] for files in side.values()} for side in (train, val)]
    assert all(sides)
    assert not sides[0] & sides[1]


def slow_make(arguments: list[str]) -> None:
    """A make that takes its time over every shard."""

    def slow(task):
        made = make_shard(task)
        time.sleep(0.1)
        return made

    command.make_shard = slow
    make(*arguments)


def test_a_killed_make_goes_on(tmp_path):
    source, whole, out = photos(tmp_path / "in", 24), tmp_path / "whole", tmp_path / "out"
    (source / "a" / "photo 00.txt").unlink()
    options = ["--samples-per-shard", "2", "--val-fraction", "0.2"]
    assert make(source, whole, *options) == 1
    process = multiprocessing.get_context("fork").Process(target=slow_make, args=([source, out, *options],))
    process.start()
    while len(content(out)) < 4 and process.is_alive():
        time.sleep(0.02)
    process.kill()
    process.join()
    early = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert 4 <= len(early) < len(content(whole))
    for name, data in content(out).items():
        assert data == content(whole)[name]  # visible only when whole
    with open(out / "make-done.jsonl", "a") as file:
        file.write('{"shard": "train-0')  # killed in the middle of a line
    known = {json.loads(line)["shard"] for line in (out / "make-done.jsonl").read_text().splitlines()[:-1]}
    assert make(source, out, *options) == 1
    assert content(out) == content(whole)
    assert (out / "missing.txt").read_text() == (whole / "missing.txt").read_text()
    kept = {path.name for path in out.glob("*.tar") if early.get(path.name) == path.stat().st_mtime_ns}
    assert kept >= known
    (out / "train-00001.tar").unlink()  # one that was lost is made again
    assert make(source, out, *options) == 1
    assert content(out) == content(whole)
