"""A run's checkpoint folders as files: their names, manifests, verification and pruning. Needs no torch.

A checkpoint is a folder ``checkpoints/step-00000100``. It is written under a temporary name, flushed, and renamed when
its manifest is in it, so a folder of that name was whole once; sizes and SHA-256 in the manifest say whether it still
is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disco_ds import files, run_layout
from disco_ds.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
UNFINISHED = "tmp-"
ENGINE = "engine"
"""The folder of DeepSpeed's files in a checkpoint: its "tag"."""
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK_BYTES = 1 << 22

Progress = Callable[[str], object]


def folder_name(step: int) -> str:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name; -1 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def find_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints with a manifest in a run's ``checkpoints`` folder, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) >= 0 and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of, reverse=True)


def find_unfinished(folder: Path) -> list[Path]:
    """What saves that never ended have left."""
    return sorted(folder.glob(f"{UNFINISHED}*")) if folder.is_dir() else []


def find_all(path: Path) -> list[Path]:
    """Checkpoints at ``path``, newest first: itself, those in it, or those of the run whose folder it is."""
    if (path / MANIFEST).is_file():
        return [path]
    return find_checkpoints(path) or find_checkpoints(path / run_layout.CHECKPOINTS)


def find_some(path: Path) -> list[Path]:
    """As :func:`find_all`; raises CheckpointError where there is none."""
    found = find_all(path)
    if not found:
        what = "holds no checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}; give a run's folder, its checkpoints folder, or a checkpoint")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: its manifest is of format {found!r}; this version reads format {FORMAT}")
    return manifest


def faults(path: Path, part: int = 0, parts: int = 1, progress: Progress = lambda what: None) -> list[str]:
    """What is wrong with a checkpoint, a line each; empty when every file has its size and SHA-256.

    Args:
        part, parts: look only at file number ``part``, ``part + parts``, …: ranks share the reading.
        progress: told of each file before it is read.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    wrong = []
    for name, saved in sorted(manifest["files"].items())[part::parts]:
        file = path / name
        progress(f"reads {path.name}/{name}")
        size = file.stat().st_size if file.is_file() else "no"
        try:
            if size != saved["bytes"]:
                wrong.append(f"{name} has {size} bytes, {saved['bytes']} were saved")
            elif sha256(file) != saved["sha256"]:
                wrong.append(f"{name} has other content than was saved (SHA-256)")
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error}")
    return wrong


def newest_verified(found: list[Path], faults_of: Callable[[Path], list[str]] = faults) -> tuple[Path | None, str]:
    """The first of ``found`` without faults, and those before it by name with what is wrong with them."""
    passed_over: list[str] = []
    for path in found:
        wrong = faults_of(path)
        if not wrong:
            return path, "; ".join(passed_over)
        passed_over.append(f"{path.name} ({first_few(wrong)})")
    return None, "; ".join(passed_over)


def first_few(lines: list[str]) -> str:
    """The first three lines joined, and how many more there are."""
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def expired(found: list[Path], *, keep: int, keep_every_steps: int | None) -> list[Path]:
    """Of checkpoints, newest first, those that retention gives up: all but ``keep`` and every N-th step."""
    return [path for path in found[keep:] if keep_every_steps is None or step_of(path) % keep_every_steps]


def remove(path: Path) -> None:
    """Delete a checkpoint; its manifest goes first, so that a half-deleted one never counts as one."""
    (path / MANIFEST).unlink(missing_ok=True)
    files.remove(path)


def set_aside(folder: Path, after: int) -> Path | None:
    """Move what a run has saved after a step that it goes back to into a folder ``aside-…`` beside; None: nothing.

    There it counts for nothing any more: neither is it the newest, nor does it use up what retention keeps.

    Raises:
        OSError: the file system refuses.
    """
    later = [path for path in folder.iterdir() if step_of(path) > after] if folder.is_dir() else []
    if not later:
        return None
    aside = _new_aside(folder)
    for path in later:
        path.rename(aside / path.name)
    return aside


def _new_aside(folder: Path) -> Path:
    aside = next(path for number in itertools.count(1) if not (path := folder / f"aside-{number}").exists())
    aside.mkdir()
    return aside


def publish(unfinished: Path, target: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest to a folder whose files are flushed, and give it its name.

    Raises:
        OSError: the file system refuses; ``target`` is then as it was.
    """
    files.replace_text(unfinished / MANIFEST, json.dumps(manifest, indent=1), sync=True)
    for folder in (*{path.parent for path in unfinished.rglob("*")}, unfinished):
        _flush_folder(folder)
    if (target / MANIFEST).exists():
        target.rename(_new_aside(target.parent) / target.name)
    elif target.exists():  # half deleted
        remove(target)
    os.rename(unfinished, target)
    _flush_folder(target.parent)


def _flush_folder(path: Path) -> None:
    """Let a folder's entries reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
