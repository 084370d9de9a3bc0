"""The model that a run has saved: which checkpoint, which architecture, and its weights under open_clip's names.

No engine, no GPU and no process group is needed, whatever the ZeRO stage and the number of ranks that saved it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from disco_ds import run_layout
from disco_ds.checkpoint import folder as folders
from disco_ds.checkpoint.state import SavedState
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import CheckpointError

log = logging.getLogger("disco_ds")

ARCHITECTURE = ("name", "config", "image_size", "context_length", "pretrained")
"""Fields of ModelConfig that decide which weights a model has, and what its preprocessing is."""


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint that verifies, and what its run says about the model."""

    path: Path
    """The checkpoint's folder."""
    model: ModelConfig
    """The architecture, and the pretrained that the run started from."""
    manifest: dict[str, Any]
    run: dict[str, Any]
    """The run's config.yaml; empty where it is not there."""

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.manifest["state"]["step"])

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer under open_clip's names and shapes, on the CPU, floating-point ones in fp32.

        Trained weights are the optimizer's fp32 masters, also where the engine computed in bf16.

        Raises:
            CheckpointError: DeepSpeed's files are not laid out as expected.
        """
        state = SavedState(self.path / folders.ENGINE, self.manifest["zero_stage"]).weights()
        whole = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
        return open_clip_state_dict(whole)


def open_clip_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of :class:`disco_ds.model.towers.TwoTowers` under open_clip's names and shapes."""
    scalars = ("logit_scale", "logit_bias")
    return {n.removeprefix("clip."): value.reshape(()) if n in scalars else value for n, value in state.items()}


def find_saved(path: Path, checkpoint: str | None = None) -> SavedModel:
    """The newest checkpoint of a run that verifies; those passed over are warned of.

    Args:
        path: a run's folder, its checkpoints folder, or a checkpoint.
        checkpoint: the name of the one to take (``step-00000100``).

    Raises:
        CheckpointError: there is none, or it does not verify.
    """
    found = folders.find_some(path)
    if checkpoint is not None:
        names = [candidate.name for candidate in found]
        if checkpoint not in names:
            raise CheckpointError(f"{path} has no checkpoint {checkpoint!r}; it has {', '.join(names)}")
        found = [found[names.index(checkpoint)]]
    chosen, passed_over = folders.newest_verified(found)
    if chosen is None:
        raise CheckpointError(f"{path}: no checkpoint verifies: {passed_over}")
    if passed_over:
        log.warning("checkpoints that do not verify were passed over: %s", passed_over)
    return _described(chosen)


def _described(path: Path) -> SavedModel:
    """The checkpoint with its model: of the run's config.yaml, or of the manifest alone where that has gone."""
    manifest, run = folders.read_manifest(path), _run_file(path)
    saved, told = manifest["model"], run.get("model", {})
    for name in ("name", "config"):
        if name in told and told[name] != saved.get(name, told[name]):
            log.warning("%s: the run's config.yaml has another model.%s; the checkpoint's is taken", path, name)
            told = {}
    known = {**told, **saved}
    try:
        model = ModelConfig(**{name: known[name] for name in ARCHITECTURE if name in known})
    except ValueError as error:
        raise CheckpointError(f"{path}: its model cannot be understood by this version: {error}") from None
    return SavedModel(path, model, manifest, run)


def _run_file(checkpoint: Path) -> dict[str, Any]:
    """What the config.yaml of the run says whose ``checkpoints`` folder this checkpoint is in; {} without one."""
    try:
        content = yaml.safe_load((run_layout.run_of(checkpoint) / run_layout.CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
