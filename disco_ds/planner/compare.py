"""Predicted beside measured: what the planner says of a run, and what its GPU says after some steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_config import EngineConfig
from disco_ds.planner.devices import device_here
from disco_ds.planner.from_ds_config import choices, planned_buckets, source_of, step_options
from disco_ds.planner.memory import Prediction, Setup, predict
from disco_ds.planner.models import Progress, to_stderr
from disco_ds.planner.text import gib

WARN_ABOVE = 0.05
"""A measurement further from the plan than this share of it is worth a warning."""


def predict_run(
    config: RunConfig, engine_config: EngineConfig, *, device: torch.device, progress: Progress = to_stderr
) -> Prediction:
    """What the planner says of a run as it was resolved, whoever chose its settings.

    Raises:
        ConfigError: the model cannot be traced, or the optimizer is not known to the planner.
    """
    batch, kind = engine_config.batch, device.type
    setup = Setup(
        gpus=batch.world_size, zero=engine_config.zero_stage, precision=engine_config.precision,
        checkpointing=config.model.checkpointing, device=kind, **step_options(config),
        offload=choices(engine_config.deepspeed, batch.world_size).get("offload", "none"),
        runtime_bytes=device_here(kind).runtime_bytes(batch.world_size) if kind == "cuda" else 0,
    )  # fmt: skip
    model = source_of(config, progress).of(setup)
    setup = replace(setup, buckets=planned_buckets(engine_config.deepspeed, model, kind))
    return predict(model, setup, batch.per_rank, batch.micro_batch)


@dataclass
class Measured:
    """What a GPU says after some steps, in bytes."""

    allocated: int
    """torch.cuda.max_memory_allocated"""
    reserved: int
    """torch.cuda.max_memory_reserved"""
    categories: dict[str, int]
    """What can be counted between two steps: parameters, and the optimizer's states."""


def measure(engine: Any, device: torch.device) -> Measured:
    """Read the allocator's highest marks, and count what lies there between steps. Call on a GPU, after a step."""
    parameters = _bytes(getattr(p, "ds_tensor", p) for p in engine.module.parameters())
    working = {parameter.data_ptr() for parameter in engine.module.parameters()}
    states: list[Any] = []
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype == torch.float32 and parameter.data_ptr() not in working:
                states.append(parameter)
            states += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return Measured(
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        {"parameters": parameters, "optimizer": _bytes(states)},
    )


def _bytes(tensors: Any) -> int:
    """Bytes on a GPU of the storages behind tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values())


def beside_plan(prediction: Prediction, measured: Measured) -> tuple[str, str | None]:
    """Measured beside planned.

    Returns:
        One line for the log, and a warning where what was allocated is further from the plan than 5 % of it.
    """
    planned = prediction.peak.bytes
    # the CUDA context, NCCL and what the allocator holds beyond its blocks are not in max_memory_allocated
    allocated = prediction.peak_bytes - planned["runtime"] - planned["fragmentation"]
    error = measured.allocated / max(allocated, 1) - 1
    line = (
        f"memory: allocated {gib(measured.allocated)} GiB, planned {gib(allocated)} ({error:+.1%}); reserved "
        f"{gib(measured.reserved)} GiB"
    )
    if prediction.peak.name in ("loss", "forward and backward") and prediction.setup.zero != 3:
        line += "".join(f"; {name} {gib(value)} of {gib(planned[name])}" for name, value in measured.categories.items())
    if abs(error) <= WARN_ABOVE:
        return line, None
    side = "more" if error > 0 else "less"
    return line, (
        f"the step took {abs(error):.1%} {side} memory than planned ({gib(measured.allocated)} GiB allocated, "
        f"{gib(allocated)} planned at its highest moment, {prediction.peak.name}): the next plan for this model may be "
        f"as far off; docs/planner.md lists what the plan assumes"
    )
