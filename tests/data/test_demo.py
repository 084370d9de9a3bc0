"""The embedded default: what is in it, that its split is honest, and that it is built whole and once."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import re
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml

from disco_ds.cli.data.main import main as cli
from disco_ds.data import demo as module
from disco_ds.data.demo import demo_shards
from disco_ds.data.shards import read_shard
from disco_ds.errors import DataError
from tests.helpers.ranks import ROOT
from tests.helpers.shards import heldout


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shards(cache):
    return demo_shards(cache)


def test_every_emoji_is_there_once(shards):
    every = module.emoji_list()
    assert len(every) > 1800
    assert len(shards.train) == 32
    assert len(shards.val) == 2
    keys = [raw.key for shard in shards.train + shards.val for raw in read_shard(shard, ())]
    assert sorted(keys) == sorted(emoji.key for emoji in every)


def test_samples_are_whole(shards):
    for raw in read_shard(shards.val[0], None):
        assert set(raw.extensions) == {"png", "txt", "json", "cls"}
        assert raw.files["cls"].decode() in shards.classes
    batches = heldout(shards.val, batch=64, caption_key="json:captions")
    pictures = set()
    for batch in batches:
        assert not batch.faults
        assert batch.images.shape[1:] == (3, module.IMAGE_PX, module.IMAGE_PX)
        pictures |= {image.numpy().tobytes() for image in batch.images}
        assert all(len(captions) == 1 for captions in batch.captions)
    assert len(pictures) > 180
    for raw in read_shard(shards.train[0], None):
        captions = json.loads(raw.files["json"])["captions"]
        assert len(captions) == len(set(captions)) >= 2
        assert captions[0] == raw.files["txt"].decode()


def test_split_is_a_tenth_and_variants_stay_together():
    every = module.emoji_list()
    sides = Counter(module.split_of(emoji.group) for emoji in every)
    assert 0.07 < sides["val"] / len(every) < 0.13
    groups = defaultdict(set)
    for emoji in every:
        groups[emoji.group].add(emoji.captions[-1].split(": ", 1)[1])
    together = [
        {"health worker", "man health worker", "woman health worker"},
        {"prince", "princess"},
        {"man walking", "woman walking facing right", "pedestrian"},
        {"kiss", "kiss: man, man"},
        {"family: man, boy", "family: man, woman, girl, boy"},
    ]
    for names in together:
        assert any(names <= members for members in groups.values()), names
    apart = [{"owl", "elephant"}, {"man", "woman farmer"}, {"boy", "baby"}]
    for names in apart:
        assert not any(names <= members for members in groups.values()), names


def test_captions_do_not_repeat_across_the_split():
    full = defaultdict(set)
    for emoji in module.emoji_list():
        full[module.split_of(emoji.group)].add(emoji.captions[0])
    assert not full["train"] & full["val"]


def test_second_call_uses_what_is_there(shards, cache):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert demo_shards(cache) == shards
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_concurrent_builds_leave_one_whole(tmp_path, monkeypatch):
    some = module.emoji_list()[::10]
    monkeypatch.setattr(module, "emoji_list", lambda: some)
    (tmp_path / ".building-demo-left").mkdir()
    (tmp_path / ".building-demo-left" / "train-00000.tar").write_bytes(b"half")
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as builders:
        made = list(builders.map(demo_shards, [tmp_path] * 3))
    assert made[0] == made[1] == made[2] == demo_shards(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".building")) == [
        Path(made[0].train[0]).parent.name
    ]


def test_damage_is_mended(shards, cache):
    damaged = Path(shards.train[3])
    damaged.write_bytes(damaged.read_bytes()[:-512])
    assert demo_shards(cache) == shards
    assert len(list(read_shard(str(damaged), ()))) > 40


def test_old_leftovers_are_removed_and_new_ones_kept(tmp_path):
    for name, age_s in (("old", 2 * module.STALE_S), ("new", 0)):
        (tmp_path / f".building-demo-{name}").mkdir()
        stamp = (tmp_path / f".building-demo-{name}").stat().st_mtime - age_s
        os.utime(tmp_path / f".building-demo-{name}", (stamp, stamp))
    module._remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".building-demo-new"]


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("DISCO_DS_CACHE", "/a")
    assert module.cache_folder() == Path("/a")
    monkeypatch.delenv("DISCO_DS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert module.cache_folder() == Path("/b/disco_ds")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert module.cache_folder() == Path("/c/.cache/disco_ds")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "resvg_py":
            raise ModuleNotFoundError("No module named 'resvg_py'", name="resvg_py")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=re.escape('resvg_py: pip install "disco-ds[demo]"')):
        demo_shards(tmp_path)


def test_unwritable_cache_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="DISCO_DS_CACHE"):
        demo_shards(tmp_path / "file" / "below")


def test_command_prints_where_it_lies(shards, cache, capsys, monkeypatch):
    assert cli(["demo", "--cache", str(cache)]) == 0
    said = capsys.readouterr().out
    assert str(Path(shards.train[0]).parent) in said
    assert "CC BY-SA 4.0" in said
    assert (Path(shards.train[0]).parent / "ATTRIBUTION.txt").read_text().count("OpenMoji")
    monkeypatch.setattr(module, "_require_packages", lambda: (_ for _ in ()).throw(DataError("no packages")))
    assert cli(["demo", "--cache", str(cache)]) == 2
    assert "no packages" in capsys.readouterr().err


def test_demo_run_file_fits_the_data(shards):
    from disco_ds.config.schema import RunConfig

    run = RunConfig(**yaml.safe_load((ROOT / "disco_ds" / "config" / "demo.yaml").read_text()))
    assert run.evaluation.classes == shards.classes
    assert run.data.train == run.data.val == "demo"
