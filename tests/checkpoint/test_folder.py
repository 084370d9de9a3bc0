"""Checkpoint folders as files, and disco-ckpt: what verifies, what is kept, what a damaged one is told to be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from disco_ds.checkpoint import folder as files
from disco_ds.cli.ckpt import main
from disco_ds.errors import CheckpointError


def make(folder, step, content=b"weights"):
    """A whole checkpoint of one file."""
    unfinished = folder / f"tmp-{files.folder_name(step)}"
    (unfinished / "engine").mkdir(parents=True)
    (unfinished / "engine" / "a.pt").write_bytes(content)
    saved = {"engine/a.pt": {"bytes": len(content), "sha256": files.sha256(unfinished / "engine" / "a.pt")}}
    manifest = {
        "format": files.FORMAT, "saved_at": "2026-01-02T03:04:05+0000", "world_size": 2, "zero_stage": 3,
        "model": {"name": "ViT-B-32"}, "optimizer": "adamw", "files": saved,
        "state": {"step": step, "samples_seen": 10 * step, "cursor": None},
    }  # fmt: skip
    files.publish(unfinished, folder / files.folder_name(step), manifest)
    return folder / files.folder_name(step)


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2 to 10, that of step 10 damaged, and a save that a kill ended."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6, 8, 10):
        make(checkpoints, step)
    (checkpoints / "step-00000010" / "engine" / "a.pt").write_bytes(b"weighty")
    (checkpoints / "tmp-step-00000012" / "engine").mkdir(parents=True)
    (checkpoints / "notes").mkdir()  # somebody's own
    return tmp_path / "run"


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_newest_first_and_only_whole_ones(run):
    found = files.find_checkpoints(run / "checkpoints")
    assert [files.step_of(path) for path in found] == [10, 8, 6, 4, 2]
    assert files.find_all(run) == found
    assert files.find_all(found[1]) == [found[1]]
    assert files.find_all(run / "nowhere") == []


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_fault_is_found_by_one_part(tmp_path, parts):
    path = make(tmp_path, 7)
    assert files.faults(path) == []
    cases = {b"weighty": "other content", b"weight": "has 6 bytes, 7 were saved", None: "has no bytes"}
    for content, said in cases.items():
        target = path / "engine" / "a.pt"
        target.unlink() if content is None else target.write_bytes(content)
        found = [fault for part in range(parts) for fault in files.faults(path, part=part, parts=parts)]
        assert len(found) == 1, found
        assert said in found[0]


def test_a_manifest_that_is_not_one_is_a_fault(tmp_path):
    path = make(tmp_path, 7)
    for content, said in {"{": "cannot be read", "[]": "format None", '{"format": 99}': "format 99"}.items():
        (path / files.MANIFEST).write_text(content)
        assert said in files.faults(path)[0]
        with pytest.raises(CheckpointError, match=said):
            files.read_manifest(path)


def test_publishing_takes_the_place_of_a_damaged_one(tmp_path):
    path = make(tmp_path, 7)
    (path / "engine" / "a.pt").write_bytes(b"?")
    make(tmp_path, 7, b"new")
    assert files.faults(path) == []
    assert (path / "engine" / "a.pt").read_bytes() == b"new"
    assert (tmp_path / "aside-1" / path.name / "engine" / "a.pt").read_bytes() == b"?"  # and nothing is deleted


def test_what_comes_after_a_step_is_moved_aside_and_never_counts_again(tmp_path):
    for step in (4, 8, 12):
        make(tmp_path, step)
    assert files.set_aside(tmp_path, after=12) is None
    assert files.set_aside(tmp_path, after=8) == tmp_path / "aside-1"
    make(tmp_path, 12)
    assert files.set_aside(tmp_path, after=4) == tmp_path / "aside-2"
    assert [path.name for path in files.find_checkpoints(tmp_path)] == ["step-00000004"]
    assert [path.name for path in files.find_all(tmp_path / "aside-2")] == ["step-00000012", "step-00000008"]


@pytest.mark.parametrize(
    ("keep", "every", "kept"),
    [(1, None, [10]), (2, 4, [10, 8, 4]), (9, None, [10, 8, 6, 4, 2]), (1, 2, [10, 8, 6, 4, 2])],
)
def test_retention(run, keep, every, kept):
    found = files.find_checkpoints(run / "checkpoints")
    old = files.expired(found, keep=keep, keep_every_steps=every)
    assert [files.step_of(path) for path in found if path not in old] == kept


def test_list_shows_each_and_what_lacks(run, capsys):
    (run / "checkpoints" / "step-00000004" / "engine" / "a.pt").unlink()
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["step-00000010", "100", "2", "3", "0.00", "2026-01-02T03:04:05+0000"]
    assert "engine/a.pt: no bytes, 7 were saved" in "\n".join(lines)
    assert main(["list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [10, 8, 6, 4, 2]
    assert [bool(row["faults"]) for row in rows] == [False, False, False, True, False]


def test_verify_reads_and_tells(run, capsys):
    assert main(["verify", str(run / "checkpoints" / "step-00000008")]) == 0
    assert capsys.readouterr().out == "step-00000008: verified\n"
    assert main(["verify", str(run)]) == 1
    assert "step-00000010: DAMAGED\n  engine/a.pt has other content" in capsys.readouterr().out
    assert main(["verify", str(run), "--json"]) == 1
    assert sum(map(len, json.loads(capsys.readouterr().out)["faults"].values())) == 1


def test_prune_keeps_what_verifies(run, capsys):
    before = names(run)
    assert main(["prune", str(run), "--keep", "1", "--keep-every", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert names(run) == before
    for word in ("step-00000010 (damaged)", "tmp-step-00000012 (never finished)", "step-00000002 (old)", "2 kept"):
        assert word in said, said
    assert main(["prune", str(run), "--keep", "1", "--keep-every", "4"]) == 0
    assert names(run) == ["notes", "step-00000004", "step-00000008"]


def test_prune_deletes_nothing_when_none_verifies(run, capsys):
    for path in files.find_checkpoints(run / "checkpoints"):
        (path / "engine" / "a.pt").write_bytes(b"")
    before = names(run)
    assert main(["prune", str(run), "--keep", "1"]) == 2
    assert "none of the 5 checkpoints verifies: nothing is deleted" in capsys.readouterr().err
    assert names(run) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "nowhere"], "nowhere does not exist"),
        (["prune", "."], "the following arguments are required: --keep"),
        (["prune", ".", "--keep", "0"], "--keep 0: at least 1 stays"),
        (["prune", ".", "--keep", "1", "--keep-every", "0"], "--keep-every 0: expected a number of steps"),
        (["verify", "."], ". holds no checkpoint"),
        (["look"], "invalid choice: 'look'"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("disco-ckpt: ")
    assert said in error


def test_the_command_needs_no_torch(run):
    program = (
        "import sys; from disco_ds.cli.ckpt import main; main(['list', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True).returncode == 0
