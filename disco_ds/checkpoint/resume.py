"""Resuming a run: which checkpoint, whether it fits, and its contents into an engine, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disco_ds.checkpoint import folder as folders
from disco_ds.checkpoint.reshard import fill_engine
from disco_ds.checkpoint.save import Identity, RunState
from disco_ds.checkpoint.state import SavedState
from disco_ds.distributed import everyones, on_rank_0
from disco_ds.errors import CheckpointError
from disco_ds.random_state import set_random_states

log = logging.getLogger("disco_ds")


def choose_checkpoint(resume: str | Path, folder: Path, progress: folders.Progress = lambda what: None) -> Path | None:
    """The checkpoint to go on from, by the rule of ``RunConfig.resume``; None for a fresh start.

    "auto" takes the newest that verifies and warns of those that it passes over. A collective: ranks share the reading
    of the files, and all get the same answer.

    Raises:
        CheckpointError: "never" where there is one, a path that holds none or a damaged one, or none that verifies.
    """
    own = resume in ("auto", "never")
    found = on_rank_0(lambda: folders.find_checkpoints(folder) if own else folders.find_all(Path(resume)))
    if resume == "never" and found:
        raise CheckpointError(
            f"resume is never, but {folder} holds {found[0].name}: choose another --name, or --resume auto to go on"
        )
    if own and not found:
        return None
    if not found:
        raise CheckpointError(
            f"resume: {resume} is no checkpoint, nor a folder that holds a complete one ({folders.MANIFEST} in it)"
        )
    candidates = found if resume == "auto" else found[:1]

    def shared_faults(path: Path) -> list[str]:  # the ranks share the reading
        found = everyones(folders.faults(path, dist.get_rank(), dist.get_world_size(), progress))
        return list(dict.fromkeys(fault for faults in found for fault in faults))

    chosen, passed_over = folders.newest_verified(candidates, shared_faults)
    if chosen is not None:
        if passed_over and dist.get_rank() == 0:
            log.warning("checkpoints that do not verify were passed over: %s", passed_over)
        return chosen
    if resume != "auto":
        raise CheckpointError(f"resume: {found[0]} does not verify: {passed_over}")
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {folder} verifies: {passed_over}. Restore one, or start "
        f"afresh under another --name; nothing there has been changed"
    )


def check_resumable(path: Path, run: Identity) -> dict[str, Any] | None:
    """Refuse, before anything is built, a checkpoint that does not fit this run; returns its place in the data.

    Raises:
        CheckpointError: another model, optimizer or global batch, or another sharding or precision where it cannot be
            converted.
    """
    manifest = folders.read_manifest(path)
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


def load_checkpoint(engine: Any, path: Path, identity: Identity) -> RunState:
    """Put weights, optimizer and random states back; returns the rest. A collective: call it on every rank.

    With the number of ranks, ZeRO stage and precision that saved it the next step is the same to the last bit. With
    others, weights and optimizer states are the same, and on other ranks the random states are drawn anew. The
    temperatures that the model has are those it was built with: ``engine.deepspeed_engine.resume_engine`` sets them.

    Args:
        path: a checkpoint that verifies, see :func:`choose_checkpoint`.
        identity: of this run.

    Raises:
        CheckpointError: the contents do not fit the engine.
    """
    manifest = folders.read_manifest(path)
    same_ranks, stage = manifest["world_size"] == identity.world_size, manifest["zero_stage"]
    same_files = stage == identity.zero_stage and manifest.get("precision", identity.precision) == identity.precision
    with _own_hyperparameters(engine):
        if same_files and (same_ranks or stage == 0):
            loaded, _ = engine.load_checkpoint(str(path), tag=folders.ENGINE, load_lr_scheduler_states=False)
            if loaded is None:
                raise CheckpointError(f"{path}: DeepSpeed found nothing to load in it")
        else:
            fill_engine(engine, SavedState(path / folders.ENGINE, stage))
    state = RunState(**manifest["state"])
    if same_ranks:
        states = torch.load(path / f"random-rank{dist.get_rank()}.pt", weights_only=False)
        set_random_states(states, engine.device)
    else:
        torch.manual_seed(torch.initial_seed() + state.step)  # not what the first steps had again
    return state


@contextmanager
def _own_hyperparameters(engine: Any) -> Iterator[None]:
    """Keep weight decay, betas and the like as the run's config says: DeepSpeed would bring the checkpoint's.

    ``step`` is no hyperparameter, though some optimizers keep it there.
    """
    own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in engine.optimizer.param_groups]
    yield
    for group, values in zip(engine.optimizer.param_groups, own, strict=True):
        group.update(values)
