"""Saving a run: DeepSpeed's shards, what else makes the next step, and a manifest that comes last.

DeepSpeed's own ``latest`` file, which points at halves after a kill, is not used. Its ``save_checkpoint`` has barriers
between its writes, where others would wait for a rank that has raised: so every rank comes to the end, and all of them
learn there whose write has failed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from disco_ds import files
from disco_ds.checkpoint import folder as folders
from disco_ds.distributed import everyones, on_rank_0
from disco_ds.errors import CheckpointError
from disco_ds.random_state import random_states


@dataclass
class RunState:
    """What the loop needs beside weights and optimizer to make the next step."""

    step: int
    """Optimizer steps done."""
    samples_seen: int
    cursor: dict[str, Any] | None
    """The data stream's position, see disco_ds.data.stream."""
    skipped: int = 0
    """Steps whose update was left out."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Identity:
    """What a checkpoint and the run that loads it have to agree on, and the sharding and precision that may differ."""

    world_size: int
    zero_stage: int
    precision: str
    global_batch: int
    model: dict[str, Any]
    optimizer: str


def save_checkpoint(
    engine: Any, folder: Path, state: RunState, identity: Identity, *, keep: int, keep_every_steps: int | None = None
) -> Path:
    """Write a checkpoint, then drop those that retention gives up. A collective: call it on every rank.

    Args:
        folder: of the run's checkpoints.
        keep, keep_every_steps: which checkpoints stay, as CheckpointConfig has them.

    Returns:
        The folder of the new checkpoint; it exists under this name only when it is whole.

    Raises:
        CheckpointError: on every rank, when any of them could not write; older checkpoints are as they were.
    """
    target = folder / folders.folder_name(state.step)
    unfinished = folder / f"{folders.UNFINISHED}{target.name}"
    failure = f"{target} was not saved"
    on_rank_0(lambda: _make_folder(unfinished), failure=failure)
    writer = FileWriter(unfinished)
    with writing_with(engine, writer):
        names = {"parameter_groups": _group_names(engine)}
        engine.save_checkpoint(str(unfinished), tag=folders.ENGINE, client_state=names, save_latest=False)
    writer.save(random_states(engine.device), unfinished / f"random-rank{dist.get_rank()}.pt")
    everyone = everyones((writer.files, writer.error))
    errors = [f"rank {number}: {error}" for number, (_, error) in enumerate(everyone) if error]
    if errors:
        on_rank_0(lambda: files.remove(unfinished))
        raise CheckpointError(f"{failure}: {folders.first_few(errors)}")
    manifest = {
        "format": folders.FORMAT,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **asdict(identity),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "open_clip_torch", "disco-ds")},
        "state": asdict(state),
        "files": {name: saved for written, _ in everyone for name, saved in sorted(written.items())},
    }

    def publish() -> None:
        try:
            folders.publish(unfinished, target, manifest)
        except OSError:
            files.remove(unfinished)
            raise
        for old in folders.expired(folders.find_checkpoints(folder), keep=keep, keep_every_steps=keep_every_steps):
            folders.remove(old)

    on_rank_0(publish, failure=failure)
    return target


def _make_folder(unfinished: Path) -> None:
    """An empty folder to save in; halves that killed saves have left would fill the disk for ever."""
    for left in folders.find_unfinished(unfinished.parent):
        files.remove(left)
    (unfinished / folders.ENGINE).mkdir(parents=True)


def _group_names(engine: Any) -> list[list[str]]:
    """Names of the parameters in the optimizer's groups: at stage 0 the optimizer's file has numbers only."""
    if engine.zero_optimization_stage() > 0:
        return []
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    # fp16_groups: those of DeepSpeed's wrapper for bf16 (0.19.8), which hides the parameters in its param_groups
    groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    return [[names[parameter] for parameter in group] for group in groups]


class FileWriter(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine for one save of one rank into ``root``: flushes, and hashes on the way."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}
        """Size and SHA-256 of each, as manifests have them."""
        self.error: str | None = None
        """What went wrong first; from then on nothing is written."""

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write one file, as ``torch.save`` does. Never raises for what the disk does."""
        if self.error is not None:
            return
        try:
            with Path(path).open("wb") as file:
                hashed = _Hashed(file)
                torch.save(state_dict, hashed)  # type: ignore[arg-type]  # it needs write and flush only
                file.flush()
                os.fsync(file.fileno())
            name = str(Path(path).relative_to(self.root))
            self.files[name] = {"bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            self.error = f"{path}: {str(cause).splitlines()[0]}"


class _Hashed:
    """A file to write to that knows the SHA-256 of what it was given."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.bytes, self.digest = file, 0, hashlib.sha256()
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)


@contextmanager
def writing_with(engine: Any, writer: FileWriter) -> Iterator[None]:
    """Let a DeepSpeedEngine save through ``writer``; its recovery scripts, which nothing here needs, are left out.

    ``checkpoint_engine`` and ``_copy_recovery_script`` are as in deepspeed 0.19.8.
    """
    before = engine.checkpoint_engine
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield
    finally:
        engine.checkpoint_engine = before
        del engine._copy_recovery_script
