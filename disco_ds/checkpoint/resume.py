"""Saving and resuming a run: DeepSpeed's shards, what else makes the next step, and a manifest that comes last.

The folders themselves are in ``checkpoint_files``, reading them on another number of ranks in ``checkpoint_reshard``.
DeepSpeed's own ``latest`` file, which points at halves after a kill, is not used.
"""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from disco_ds.checkpoint import folder as files
from disco_ds.checkpoint.reshard import fill_engine
from disco_ds.checkpoint.state import SavedState
from disco_ds.checkpoint.writer import FileWriter, writing_with
from disco_ds.distributed import everyones, on_rank_0
from disco_ds.errors import CheckpointError

log = logging.getLogger("disco_ds")

ENGINE = "engine"
"""The folder of DeepSpeed's files in a checkpoint: its "tag"."""


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


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: see CheckpointConfig."""

    keep: int
    keep_every_steps: int | None = None


def choose_checkpoint(resume: str | Path, folder: Path, progress: files.Progress = files.no_progress) -> Path | None:
    """The checkpoint to go on from, by the rule of ``RunConfig.resume``; None for a fresh start.

    "auto" takes the newest that verifies and warns of those that it passes over. A collective: ranks share the reading
    of the files, and all get the same answer.

    Raises:
        CheckpointError: "never" where there is one, a path that holds none or a damaged one, or none that verifies.
    """
    own = resume in ("auto", "never")
    found = on_rank_0(lambda: files.find_checkpoints(folder) if own else files.find_all(Path(resume)))
    if resume == "never" and found:
        raise CheckpointError(
            f"resume is never, but {folder} holds {found[0].name}: choose another --name, or --resume auto to go on"
        )
    if resume in ("auto", "never") and not found:
        return None
    if not found:
        raise CheckpointError(
            f"resume: {resume} is no checkpoint, nor a folder that holds a complete one ({files.MANIFEST} in it)"
        )
    skipped: list[str] = []
    for candidate in found if resume == "auto" else found[:1]:
        faults = shared_faults(candidate, progress)
        if not faults:
            if skipped and dist.get_rank() == 0:
                log.warning("checkpoints that do not verify were passed over: %s", "; ".join(skipped))
            return candidate
        skipped.append(f"{candidate.name} ({_some(faults)})")
    if resume != "auto":
        raise CheckpointError(f"resume: {found[0]} does not verify: {'; '.join(skipped)}")
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {folder} verifies: {'; '.join(skipped)}. Restore one, or start "
        f"afresh under another --name; nothing there has been changed"
    )


def shared_faults(path: Path, progress: files.Progress = files.no_progress) -> list[str]:
    """What is wrong with a checkpoint; the ranks share the reading. A collective."""
    found = everyones(files.faults(path, dist.get_rank(), dist.get_world_size(), progress))
    return list(dict.fromkeys(fault for faults in found for fault in faults))


def check_resumable(path: Path, run: Identity) -> dict[str, Any] | None:
    """Refuse, before anything is built, a checkpoint that does not fit this run; returns its place in the data.

    Raises:
        CheckpointError: another model, optimizer or global batch, or another sharding or precision where it cannot be
            converted.
    """
    manifest = files.read_manifest(path)
    if manifest["model"] != run.model:
        raise CheckpointError(f"{path} holds another model: {manifest['model']} there, {run.model} in this run")
    if manifest["optimizer"] != run.optimizer:
        raise CheckpointError(
            f"{path} was saved with optimizer.name {manifest['optimizer']}, this run has {run.optimizer}: use that "
            "one, or start a new run from its weights"
        )
    if manifest.get("global_batch", run.global_batch) != run.global_batch:
        raise CheckpointError(
            f"{path} was saved with a global batch of {manifest['global_batch']}, this run has {run.global_batch}: the "
            "run's length, schedule and place in the data are counted in batches. Keep it (other ranks and "
            "micro-batches are free), or start a new run from its weights: another --name, --model.pretrained "
            f"{path}"
        )
    stage = manifest["zero_stage"]
    if stage == run.zero_stage == 0 and manifest.get("precision", run.precision) != run.precision:
        raise CheckpointError(
            f"{path} was saved in {manifest['precision']}, this run has precision {run.precision}: at ZeRO stage 0 the "
            "optimizer's file is of one precision. Use that one, or ZeRO stage 1, which gives the same steps"
        )
    if stage != run.zero_stage and run.zero_stage == 0:
        raise CheckpointError(
            f"{path} was saved at ZeRO stage {stage}, the ds_config says 0: use 1, 2 or 3 (1 gives the same steps)"
        )
    return manifest["state"]["cursor"]


def save_checkpoint(engine: Any, folder: Path, state: RunState, identity: Identity, retention: Retention) -> Path:
    """Write a checkpoint, then drop those that retention gives up. A collective: call it on every rank.

    Returns:
        The folder of the new checkpoint; it exists under this name only when it is whole.

    Raises:
        CheckpointError: on every rank, when any of them could not write; older checkpoints are as they were.
    """
    rank = dist.get_rank()
    target = folder / files.folder_name(state.step)
    unfinished = folder / f"{files.UNFINISHED}{target.name}"
    _together(lambda: _make_room(folder, unfinished), f"{target} was not saved")
    writer = FileWriter(unfinished)
    groups = {"parameter_groups": _group_names(engine)}
    with writing_with(engine, writer):
        engine.save_checkpoint(str(unfinished), tag=ENGINE, client_state=groups, save_latest=False)
    writer.save(_random_states(engine.device), unfinished / f"random-rank{rank}.pt")
    everyone = everyones((writer.files, writer.error))
    errors = [f"rank {number}: {error}" for number, (_, error) in enumerate(everyone) if error]
    if errors:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{target} was not saved: {_some(errors)}")
    manifest = {
        "format": files.FORMAT,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **asdict(identity),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "open_clip_torch", "disco-ds")},
        "state": asdict(state),
        "files": {name: asdict(saved) for written, _ in everyone for name, saved in sorted(written.items())},
    }
    _together(lambda: _publish(unfinished, target, manifest, retention), f"{target} was not saved")
    return target


def _make_room(folder: Path, unfinished: Path) -> None:
    """An empty folder to save in; halves that killed saves have left would fill the disk for ever."""
    for left in files.find_unfinished(folder):
        shutil.rmtree(left, ignore_errors=True)
    (unfinished / ENGINE).mkdir(parents=True)


def _publish(unfinished: Path, target: Path, manifest: dict[str, Any], retention: Retention) -> None:
    try:
        files.publish(unfinished, target, manifest)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    found = files.find_checkpoints(target.parent)
    for old in files.expired(found, keep=retention.keep, keep_every_steps=retention.keep_every_steps):
        if old != target:
            files.remove(old)


def load_checkpoint(engine: Any, path: Path, identity: Identity) -> RunState:
    """Put weights, optimizer and random states back; returns the rest. A collective: call it on every rank.

    With the number of ranks, ZeRO stage and precision that saved it the next step is the same to the last bit. With
    others, weights and optimizer states are the same, and on other ranks the random states are drawn anew. Afterwards
    the model still has the temperatures it was built with: call ``engine.temperature.clamp_temperatures``.

    Args:
        path: a checkpoint that verifies, see :func:`choose_checkpoint`.
        identity: of this run.

    Raises:
        CheckpointError: the contents do not fit the engine.
    """
    manifest = files.read_manifest(path)
    same_ranks, stage = manifest["world_size"] == identity.world_size, manifest["zero_stage"]
    same_files = stage == identity.zero_stage and manifest.get("precision", identity.precision) == identity.precision
    with _own_hyperparameters(engine):
        if same_files and (same_ranks or stage == 0):
            loaded, _ = engine.load_checkpoint(str(path), tag=ENGINE, load_lr_scheduler_states=False)
            if loaded is None:
                raise CheckpointError(f"{path}: DeepSpeed found nothing to load in it")
        else:
            fill_engine(engine, SavedState(path / ENGINE, stage))
    state = RunState(**manifest["state"])
    if same_ranks:
        random_states = torch.load(path / f"random-rank{dist.get_rank()}.pt", weights_only=False)
        _set_random_states(random_states, engine.device)
    else:
        torch.manual_seed(torch.initial_seed() + state.step)  # not what the first steps had again
    return state


@contextmanager
def _own_hyperparameters(engine: Any) -> Iterator[None]:
    """Keep weight decay, betas and the like as this run's config says: DeepSpeed would bring those of the checkpoint.

    ``step`` is no hyperparameter, though some optimizers keep it there.
    """
    own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in engine.optimizer.param_groups]
    yield
    for group, values in zip(engine.optimizer.param_groups, own, strict=True):
        group.update(values)


def _together(action: Callable[[], None], what: str) -> None:
    """Do something to the disk on rank 0; where it fails, every rank raises the same CheckpointError."""
    try:
        on_rank_0(action)
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from None


def _some(lines: list[str], shown: int = 3) -> str:
    return "; ".join(lines[:shown]) + (f"; and {len(lines) - shown} more" if len(lines) > shown else "")


def _group_names(engine: Any) -> list[list[str]]:
    """Names of the parameters in the optimizer's groups: at stage 0 the optimizer's file has numbers only."""
    if engine.zero_optimization_stage() > 0:
        return []
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    return [[names[parameter] for parameter in group] for group in groups]


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
