"""Saving a run: DeepSpeed's shards, what else makes the next step, and a manifest that comes last.

DeepSpeed's own ``latest`` file, which points at halves after a kill, is not used.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from disco_ds import files
from disco_ds.checkpoint import folder as folders
from disco_ds.checkpoint.writer import FileWriter, writing_with
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
        found = folders.find_checkpoints(folder)
        for old in folders.expired(found, keep=keep, keep_every_steps=keep_every_steps):
            if old != target:
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
