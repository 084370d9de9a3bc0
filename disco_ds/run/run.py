"""A run that is ready for its next step: what its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disco_ds.checkpoint.save import Identity, RunState
from disco_ds.config.schema import RunConfig
from disco_ds.data.stream import TrainStream
from disco_ds.engine.ds_config import EngineConfig
from disco_ds.engine.schedule import Schedule
from disco_ds.engine.step import TrainStep
from disco_ds.run.watchdog import Watchdog
from disco_ds.telemetry.sinks import Telemetry


@dataclass
class Run:
    """What :func:`disco_ds.run.prepare.prepare` makes and :func:`disco_ds.run.train.train` drives."""

    config: RunConfig
    folder: Path
    engine_config: EngineConfig
    engine: Any
    tokenizer: Callable[[list[str]], torch.Tensor]
    stream: TrainStream
    train_step: TrainStep
    schedule: Schedule
    telemetry: Telemetry
    control: Any
    """A gloo group for the few numbers that ranks agree on: it never waits for a GPU."""
    watchdog: Watchdog
    state: RunState
    identity: Identity
    failed_saves: int = 0
    """Checkpoints that could not be written."""

    @property
    def global_batch(self) -> int:
        """Pairs a step, over all ranks."""
        return self.engine_config.batch.global_batch

    @property
    def device(self) -> torch.device:
        """Where this rank's towers are."""
        return self.train_step.device
