"""What the entries of data.train may be, and what is said when they lead nowhere."""

from __future__ import annotations

import re

import pytest

from disco_ds.data.sources import expand, fingerprint
from disco_ds.errors import DataError


@pytest.fixture
def folder(tmp_path):
    for name in ("00", "01", "02", "10"):
        (tmp_path / f"{name}.tar").touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.TAR").touch()
    (tmp_path / "notes.md").touch()
    return tmp_path


def names(entries, **options):
    return [[shard.rsplit("/", 1)[-1] for shard in source.shards] for source in expand(entries, **options)]


def test_local_forms(folder):
    assert names(str(folder / "01.tar")) == [["01.tar"]]
    assert names(str(folder / "{00..02}.tar")) == [["00.tar", "01.tar", "02.tar"]]
    assert names(str(folder / "{02,00}.tar")) == [["00.tar", "02.tar"]]
    assert names(str(folder / "0*.tar")) == [["00.tar", "01.tar", "02.tar"]]
    assert names(str(folder / "{0,1}*.tar")) == [["00.tar", "01.tar", "02.tar", "10.tar"]]
    assert names(str(folder)) == [["00.tar", "01.tar", "02.tar", "10.tar", "x.TAR"]]
    assert names([str(folder / "00.tar"), str(folder / "deep")]) == [["00.tar"], ["x.TAR"]]


def test_relative_paths_become_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert expand("01.tar")[0].shards == (str(folder / "01.tar"),)


def test_list_files(folder):
    (folder / "all.txt").write_text(f"# mine\n00.tar\n\n{folder}/{{01..02}}.tar\ndeep\ns3://bucket/{{0..1}}.tar\n")
    assert names(str(folder / "all.txt")) == [["00.tar", "01.tar", "02.tar", "x.TAR", "0.tar", "1.tar"]]
    (folder / "none.txt").write_text("# nothing\n")
    with pytest.raises(DataError, match=r"none\.txt' names nothing"):
        expand(str(folder / "none.txt"))
    (folder / "wrong.txt").write_text("no.tar\n")
    with pytest.raises(DataError, match=r"line in .*wrong\.txt.*no\.tar' does not exist"):
        expand(str(folder / "wrong.txt"))


def test_urls_and_pipes_are_not_looked_at():
    assert expand("https://host/{8..10}.tar")[0].shards == tuple(sorted(f"https://host/{n}.tar" for n in (8, 9, 10)))
    assert expand("pipe:cat /x/{0..1}.tar | tee")[0].shards == ("pipe:cat /x/0.tar | tee", "pipe:cat /x/1.tar | tee")


def test_labels_are_short_and_unique(folder):
    labels = [
        source.label for source in expand([str(folder), f"{folder}/", str(folder / "00.tar"), "s3://b/{0..1}.tar"])
    ]
    assert labels == [folder.name, f"{folder.name}#2", "00.tar", "{0..1}.tar"]


def test_missing_things_are_named(folder):
    for entry, said in {
        f"{folder}/no/a.tar": f"does not exist (the last folder on the way that exists is {str(folder)!r})",
        f"{folder}/{{20..29}}.tar": f"none of the 10 files of '{folder}/{{20..29}}.tar' exists, '{folder}/20.tar'",
        f"{folder}/z*.tar": "no file matches the glob",
    }.items():
        with pytest.raises(DataError, match=re.escape(said)) as caught:
            expand(entry, "data.val")
        assert str(caught.value).startswith("data.val: ")
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tar file .*it is empty"):
        expand(str(folder / "empty"))
    (folder / "empty" / "a.jpg").touch()
    with pytest.raises(DataError, match=r"no tar file .*it holds \.jpg"):
        expand(str(folder / "empty"))
    with pytest.raises(DataError, match=r"data\.train is empty"):
        expand([])


def test_a_gap_in_a_brace_list_is_a_warning(folder, caplog):
    assert names(str(folder / "{01..03}.tar")) == [["01.tar", "02.tar", "03.tar"]]
    assert "1 of 3 files" in caplog.text
    assert "03.tar' first" in caplog.text


def test_fingerprint_knows_names_not_folders(folder):
    whole = fingerprint(expand(str(folder)))
    moved = folder.rename(folder.parent / "moved")
    assert fingerprint(expand(str(moved))) == whole
    (moved / "11.tar").touch()
    assert fingerprint(expand(str(moved))) != whole
