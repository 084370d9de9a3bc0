"""disco-data check: exact counts, what is said, and clean shards that hold the good samples' bytes."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from disco_ds.cli.data.main import main
from disco_ds.data.shards import read_shard
from disco_ds.data.tools.preparation import Preparation
from tests.helpers.shards import (
    DIRT,
    dirty_samples,
    image_bytes,
    make_shards,
    sample,
    to_tensor,
    truncate,
    write_shard,
    write_tar,
)

COUNTS = {reason: number for number, reason in enumerate(sorted(DIRT), start=1)}


def check(*arguments: object, workers: int = 1) -> int:
    return main(["check", *map(str, arguments), "--workers", str(workers)])


@pytest.fixture
def dirty(tmp_path) -> Path:
    """Ten good and 21 bad samples, an odd pair of pictures, a shard that is cut, and one that is none."""
    folder = tmp_path / "raw"
    good = {f"good{i}": sample(i, json=b'{"width": 16}', cls=b"3") for i in range(10)}
    write_shard(folder / "a.tar", {**good, **dirty_samples(COUNTS)})
    odd = {"w": {"jpg": image_bytes(1, 40, "JPEG"), "txt": b"wide words"}, "g": {"png": image_bytes(2, 8, mode="L"),
           "txt": b"g" * 90}}  # fmt: skip
    write_tar(
        folder / "b.tar", [(f"{k}.{e}", d) for k, files in odd.items() for e, d in [*files.items(), ("txt", b"2")]]
    )
    (cut,) = make_shards(folder, [5], start=50)
    truncate(cut, 512 * 9)
    (folder / "z.tar").write_bytes(b"<html>" * 200)
    return folder


EXPECTED = {**{f"raw/{reason}": count for reason, count in COUNTS.items()},
            "raw/duplicate_key": 2, "raw/truncated_shard": 1, "raw/not_a_tar": 1}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_everything_is_counted(dirty, capsys, workers):
    assert check(dirty, "--json", workers=workers) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == EXPECTED
    assert (found["shards"], found["samples"], found["good"]) == (4, 10 + 21 + 2 + 2, 14)
    assert found["width"] == [8, 16, 40]
    assert found["modes"] == {"PNG RGB": 12, "JPEG RGB": 1, "PNG L": 1}
    assert found["characters"] == [9, 9, 90]
    assert all(1 <= len(found["examples"][kind]) <= 3 for kind in EXPECTED)


def test_few_shards_are_shared_by_processes(tmp_path, capsys):
    write_shard(tmp_path / "a.tar", {**{f"good{i}": sample(i) for i in range(10)}, **dirty_samples(COUNTS)})
    assert check(tmp_path, "--json", workers=2) == 1
    found = json.loads(capsys.readouterr().out)
    assert Counter(found["faults"]) == Counter({f"{tmp_path.name}/{reason}": n for reason, n in COUNTS.items()})
    assert (found["shards"], found["samples"], found["good"]) == (1, 31, 10)


def test_the_table(dirty, capsys):
    assert check(dirty, "--model", "demo") == 1
    out = capsys.readouterr().out
    for words in (
        "samples  35: 14 good, 21 dropped (60.00%)",
        "width 8 / 16 / 40",
        "PNG RGB 12",
        "the context is 16",
        "undecodable_image",
        "a.tar#bad-undecodable_image-0: UnidentifiedImageError",
        "faults   25",
    ):
        assert words in out
    assert "1 (7.1%) are cut" in out


def test_clean_is_0_and_bad_input_is_2(tmp_path, capsys):
    make_shards(tmp_path, [3])
    assert check(tmp_path) == 0
    assert "faults   none" in capsys.readouterr().out
    assert check(write_tar(tmp_path / "empty" / "a.tar", [])) == 1
    assert "nothing here can be trained on" in capsys.readouterr().out
    for arguments, words in (
        ([tmp_path / "none"], "SHARDS: "),
        ([], "name the shards to read"),
        ([tmp_path, "--model", "ViT-B-33"], "ViT-B-32"),
        ([tmp_path, "--data.min_image_size", "x"], "--data.min_image_size"),
        ([tmp_path, "--nothing"], "--nothing"),
        (["--run", tmp_path / "run.yaml"], "--run "),
    ):
        assert check(*arguments) == 2, arguments
        said = capsys.readouterr().err
        assert words in said
        assert said.startswith("disco-data: ")
        assert said.count("\n") == 1


def test_fields_of_a_run_are_used(tmp_path, capsys):
    write_shard(tmp_path / "d" / "a.tar", {f"k{i}": {"png": image_bytes(i, 10 + i), "json": b'{"text": ["a", "b"]}'}
                for i in range(4)})  # fmt: skip
    assert check(tmp_path / "d", "--data.caption_key", "json:text", "--data.min_image_size", "12", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], found["captions"], found["faults"]) == (2, 4, {"d/tiny_image": 2})
    val = write_shard(tmp_path / "val.tar", {"v": {"png": image_bytes(1), "json": b'{"text": "c"}'}})
    fields = {"train": str(tmp_path / "d"), "val": str(val), "caption_key": "json:text"}
    run = {"steps": 3, "model": {"name": "demo"}, "data": fields}
    (tmp_path / "config.yaml").write_text(json.dumps(run))
    assert check("--run", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["context"], found["truncated"]) == (5, 16, 0)


def test_fix_writes_the_good_samples_unchanged(dirty, tmp_path, capsys):
    out = tmp_path / "clean"
    assert check(dirty, "--fix", out) == 1
    assert "written  3 shards with 14 samples" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["a.tar", "b.tar", "s000.tar"]
    found = {raw.key: raw.files for path in sorted(out.iterdir()) for raw in read_shard(str(path), None)}
    assert list(found)[:10] == [f"good{i}" for i in range(10)]
    for i in range(10):
        assert found[f"good{i}"] == sample(i, json=b'{"width": 16}', cls=b"3")
    assert found["w"]["txt"] == b"wide words"
    assert check(out) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert check(dirty, "--fix", out) == 2
    assert "is there already and is not written over" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert check(dirty, "--fix", dirty) == 2  # nor over the source
    again = tmp_path / "again"
    assert check(dirty, "--fix", again, workers=2) == 1
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {p.name: d for p, d in before.items()}


def test_fix_refuses_what_has_no_name_of_its_own(tmp_path, capsys):
    (one,) = make_shards(tmp_path / "a", [2])
    make_shards(tmp_path / "b", [2])
    assert check(f"pipe:cat {one}", "--fix", tmp_path / "out") == 2
    assert "has no file name" in capsys.readouterr().err
    assert check(tmp_path, "--fix", tmp_path / "out") == 2
    assert re.search(r"a/s000\.tar and .*b/s000\.tar would both", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_fix_keeps_gzip(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(make_shards(tmp_path / "x", [3])[0].read_bytes()))
    assert check(tmp_path / "a.tar.gz", "--fix", tmp_path / "out") == 0
    assert (tmp_path / "out" / "a.tar.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert len(list(read_shard(str(tmp_path / "out" / "a.tar.gz"), None))) == 3


def test_tokens_are_those_of_open_clip():
    import open_clip

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    counter = Preparation(to_tensor, tokenizer, 77).count_tokens
    for text in ("a dog", "", "x" * 70, "雨の日", "word " * 60):
        row = tokenizer([text], context_length=1000)[0]
        assert counter(text) == int((row != 0).sum())
    assert counter("word " * 75) == 77
    assert counter("word " * 76) == 78

    def other(texts, context_length):  # a tokenizer of another kind: padded with 1
        return tokenizer(texts, context_length=context_length).masked_fill(tokenizer(texts, context_length) == 0, 1)

    assert Preparation(to_tensor, other, 77).count_tokens("a dog") == 4


def test_sizes_are_those_that_are_seen(tmp_path, capsys):
    image = Image.new("RGB", (30, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif.tobytes())
    write_shard(tmp_path / "a.tar", {"k": {"jpg": buffer.getvalue(), "txt": b"turned"}})
    assert check(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["width"], found["height"], found["shorter_side"]) == ([10] * 3, [30] * 3, [10] * 3)
