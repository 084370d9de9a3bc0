"""Saving and resuming a run: DeepSpeed's shards, what else makes the next step, and a manifest that comes last.

A checkpoint is a folder ``checkpoints/step-00000100``. It is written under a temporary name and renamed when every
rank is done, so a folder of that name is whole; the manifest in it says what it holds. DeepSpeed's own ``latest``
file, which points at halves after a kill, is not used.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from disco_ds.errors import CheckpointError

log = logging.getLogger("disco_ds")

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")
_FORMAT = 1


@dataclass
class RunState:
    """What the loop needs beside weights and optimizer to make the next step."""

    step: int
    """Optimizer steps done."""
    samples_seen: int
    cursor: dict[str, Any] | None
    """The data stream's position, see disco_ds.data.stream."""


def _name(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run's ``checkpoints`` folder, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def choose_checkpoint(resume: str | Path, folder: Path) -> Path | None:
    """The checkpoint to go on from, by the rule of ``RunConfig.resume``; None for a fresh start.

    Raises:
        CheckpointError: "never" where there is one, or a path that holds none.
    """
    found = find_checkpoints(folder)
    if resume == "auto":
        return found[0] if found else None
    if resume == "never":
        if found:
            raise CheckpointError(
                f"resume is never, but {folder} holds {found[0].name}: choose another --name, or --resume auto to go on"
            )
        return None
    path = Path(resume)
    for candidate in (path, *find_checkpoints(path)[:1], *find_checkpoints(path / "checkpoints")[:1]):
        if (candidate / MANIFEST).is_file():
            return candidate
    raise CheckpointError(f"resume: {path} is no checkpoint, nor a folder that holds a complete one ({MANIFEST} in it)")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or was written by a newer format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from None
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')!r}; this version reads format {_FORMAT}")
    return manifest


def check_resumable(path: Path, *, world_size: int, zero_stage: int, model: dict[str, Any]) -> None:
    """Refuse, before anything is built, a checkpoint that does not fit this run.

    Raises:
        CheckpointError: other number of ranks, other ZeRO stage, other model.
    """
    manifest = read_manifest(path)
    if manifest["world_size"] != world_size:
        raise CheckpointError(
            f"{path} was saved by {manifest['world_size']} ranks and this run has {world_size}: "
            f"start it on {manifest['world_size']}, or start afresh under another --name"
        )
    if manifest["zero_stage"] != zero_stage:
        raise CheckpointError(
            f"{path} was saved at ZeRO stage {manifest['zero_stage']}, the ds_config says {zero_stage}: use that stage"
        )
    if manifest["model"] != model:
        raise CheckpointError(f"{path} holds another model: {manifest['model']} there, {model} in this run")


def save_checkpoint(
    engine: Any, folder: Path, state: RunState, *, zero_stage: int, model: dict[str, Any], keep: int
) -> Path:
    """Write a checkpoint and drop all but the newest ``keep``. A collective: call it on every rank.

    Returns:
        The folder of the new checkpoint; it exists under this name only when it is whole.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    target = folder / _name(state.step)
    unfinished = folder / f"tmp-{_name(state.step)}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(unfinished), tag="engine", client_state={}, save_latest=False)
    torch.save(_random_states(engine.device), unfinished / f"random-rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        manifest = {
            "format": _FORMAT,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "world_size": world_size,
            "zero_stage": zero_stage,
            "model": model,
            "versions": {name: version(name) for name in ("torch", "deepspeed", "open_clip_torch", "disco-ds")},
            "state": asdict(state),
            "files": {str(p.relative_to(unfinished)): p.stat().st_size for p in _files(unfinished)},
        }
        for path in _files(unfinished):
            _flush(path)
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _flush(unfinished / MANIFEST)
        if target.exists():
            shutil.rmtree(target)
        os.rename(unfinished, target)
        _flush(folder)
        for old in find_checkpoints(folder)[keep:]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load_checkpoint(engine: Any, path: Path) -> RunState:
    """Put weights, optimizer and random states back; returns the rest. A collective: call it on every rank.

    Raises:
        CheckpointError: files are missing or have another size than when they were saved.
    """
    manifest = read_manifest(path)
    for name, size in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise CheckpointError(
                f"{path / name}: expected {size} bytes, found {found or 'no file'}; resume from another checkpoint"
            )
    loaded, _ = engine.load_checkpoint(str(path), tag="engine", load_lr_scheduler_states=False)
    if loaded is None:
        raise CheckpointError(f"{path}: DeepSpeed found nothing to load in it")
    _set_random_states(torch.load(path / f"random-rank{dist.get_rank()}.pt", weights_only=False), engine.device)
    return RunState(**manifest["state"])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
