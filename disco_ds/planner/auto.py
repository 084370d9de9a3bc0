"""The planner inside a run: fill what says "auto" from the device that is there, and compare plan and measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_config import EngineConfig, choose_precision, plan_batch
from disco_ds.errors import ConfigError
from disco_ds.planner import from_ds_config
from disco_ds.planner.coefficients import Coefficients
from disco_ds.planner.devices import DEVICES, GIB, Device
from disco_ds.planner.memory import OPTIMIZER_BYTES, Buckets, Prediction, Setup, predict
from disco_ds.planner.models import ModelSource, Progress, say
from disco_ds.planner.search import Plan, Planner, Request, changed, with_accumulation
from disco_ds.planner.text import gib, headline
from disco_ds.planner.write import ds_config as planned_ds_config

WARN_ABOVE = 0.05
"""A measurement further from the plan than this share of it is worth a warning."""


def device_here(device: torch.device) -> Device:
    """The device of this process with the memory that it has; on a CPU, this rank's share of the machine's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        total = properties.total_memory / GIB
        like = min(DEVICES.values(), key=lambda known: abs(known.usable_gib - total))
        return Device(properties.name, total, like.tflops, hopper=properties.major >= 9)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = machine / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / GIB
    return Device("CPU", share, 0.05)


def fill_auto(
    config: RunConfig,
    content: dict[str, Any],
    *,
    world_size: int,
    device: torch.device,
    source: str = "ds_config",
    progress: Progress = say,
) -> tuple[RunConfig, dict[str, Any], Plan]:
    """``--plan auto``: decide what run and ds_config leave open, for the device at hand.

    What either of them says stays as it is: batch sizes, precision, stage, buckets, and the checkpointing policy where
    it was given at all. The same on every rank, since ranks have devices of one kind and nothing is measured.

    Args:
        config: the run.
        content: the ds_config as it was read.
        world_size: ranks.
        device: this rank's.
        source: the ds_config's name, for messages.
        progress: told when the model has to be traced.

    Returns:
        The run with batch, precision and checkpointing set; the ds_config with "auto" replaced; the plan.

    Raises:
        ConfigError: nothing fits, or the files contradict each other.
    """
    request, model_source = _request(config, content, world_size, device, source, progress)
    planner = _CpuPlanner(model_source) if device.type == "cpu" else Planner(model_source)
    plan = planner.best(request)
    if not plan.fits:
        raise ConfigError(f"--plan auto: {headline(plan, config.model.name)[0]}")
    setup, prediction = plan.setup, plan.prediction
    model = model_source.get(setup.precision, setup.checkpointing, "flash", setup.device)
    filled = _merged(content, planned_ds_config(plan, model))
    changes = {
        "global_batch": plan.global_batch,
        "micro_batch": prediction.micro_batch,
        "precision": setup.precision,
        "model": config.model.model_copy(update={"checkpointing": setup.checkpointing}),
    }
    # what is a default stays one: a ds_config may differ from defaults, and not from what was given
    given = config.model_copy(update=changes).model_dump(exclude_unset=True)
    return RunConfig.model_validate(given), filled, plan


def _request(
    config: RunConfig, content: dict[str, Any], world_size: int, device: torch.device, source: str, progress: Progress
) -> tuple[Request, ModelSource]:
    if config.optimizer.name not in OPTIMIZER_BYTES:
        raise ConfigError(f"--plan auto knows the optimizers {', '.join(OPTIMIZER_BYTES)}, not {config.optimizer.name}")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    batches = (config.global_batch, config.micro_batch, *(content.get(key, "auto") for key in keys))
    if any(value not in (None, "auto") for value in batches):
        plan_batch(config, content, world_size, source)  # raises where run and ds_config contradict each other
    choices = from_ds_config.choices(content, world_size)
    if "stage" not in content.get("zero_optimization", {}):
        choices["zero"] = "auto"
    policy = config.model.checkpointing if "checkpointing" in config.model.model_fields_set else "auto"
    choices["precision"] = choose_precision(config, content, device.type == "cuda", source)
    for name, value in (("global_batch", config.global_batch), ("micro_batch", config.micro_batch)):
        if value is not None:
            choices[name] = value
    request = Request(
        gpus=world_size, device=device_here(device), checkpointing=policy, optimizer=config.optimizer.name,
        **_step_options(config), **choices,
    )  # fmt: skip
    request = with_accumulation(request, content)
    model_source = _source(config, progress)
    if device.type == "cpu":
        # a machine's memory is not the planner's to fill: a tenth of it, and no fragmentation to speak of
        request = changed(request, fragmentation=1.0, reserve_bytes=int(0.9 * request.device.usable_bytes))
    model = model_source.get(request.precision, "none" if policy == "auto" else policy, "flash", device.type)
    return changed(request, buckets=planned_buckets(content, model, device.type)), model_source


def planned_buckets(content: dict[str, Any], model: Coefficients, device: str) -> Buckets:
    """Those of a ds_config whose absent keys will be filled in as those that say "auto"."""
    keys = ("reduce_bucket_size", "overlap_comm", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    zero = {**dict.fromkeys(keys, "auto"), **content.get("zero_optimization", {})}
    return from_ds_config.buckets({**content, "zero_optimization": zero}, model, device)


def _step_options(config: RunConfig) -> dict[str, Any]:
    """What a run says of its loss and of the cached form, as Request and Setup call it."""
    return {
        "loss": config.loss.kind,
        "tile": config.loss.tile,
        "keep_logits": config.loss.keep_logits,
        "reuse_last": config.cached.reuse_last,
        "reduce_once": config.cached.reduce == "once",
        "images_on_device": "cached" if config.cached.images == "device" else False,
    }


def _source(config: RunConfig, progress: Progress) -> ModelSource:
    changes = config.model.model_dump(include={"config", "freeze", "patch_dropout", "image_size", "context_length"})
    return ModelSource(config.model.name, progress, changes)


class _CpuPlanner(Planner):
    """Plans for CPU ranks: traced with the CPU's operations, which takes seconds, so only the extremes."""

    def setups(self, request: Request) -> Any:
        for setup in super().setups(request):
            yield Setup(**{**vars(setup), "device": "cpu", "runtime_bytes": 0})

    def policies(self, request: Request) -> tuple[str, ...]:
        return ("none", "full") if request.checkpointing == "auto" else (request.checkpointing,)


def _merged(content: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """The ds_config with the planned value wherever it says "auto" or nothing."""
    merged = dict(content)
    for key, value in planned.items():
        given = content.get(key, "auto")
        if isinstance(value, dict) and isinstance(given, dict):
            merged[key] = _merged(given, value)
        elif given == "auto":
            merged[key] = value
    return merged


def predict_run(
    config: RunConfig, engine_config: EngineConfig, *, device: torch.device, progress: Progress = say
) -> Prediction:
    """What the planner says of a run as it was resolved, whoever chose its settings.

    Raises:
        ConfigError: the model cannot be traced, or the optimizer is not known to the planner.
    """
    if config.optimizer.name not in OPTIMIZER_BYTES:
        raise ConfigError(f"the planner knows the optimizers {', '.join(OPTIMIZER_BYTES)}, not {config.optimizer.name}")
    source = _source(config, progress)
    model = source.get(engine_config.precision, config.model.checkpointing, "flash", device.type)
    choices = from_ds_config.choices(engine_config.deepspeed, engine_config.batch.world_size)
    here = device_here(device)
    setup = Setup(
        gpus=engine_config.batch.world_size, zero=engine_config.zero_stage, precision=engine_config.precision,
        checkpointing=config.model.checkpointing, offload=choices.get("offload", "none"),
        optimizer=config.optimizer.name, **_step_options(config), device=device.type,
        runtime_bytes=here.runtime_bytes(engine_config.batch.world_size) if device.type == "cuda" else 0,
        buckets=from_ds_config.buckets(engine_config.deepspeed, model, device.type),
    )  # fmt: skip
    return predict(model, setup, engine_config.batch.per_rank, engine_config.batch.micro_batch)


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
    states: list[Any] = []
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype == torch.float32 and parameter.data_ptr() not in _pointers(engine.module):
                states.append(parameter)
            states += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return Measured(
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        {"parameters": parameters, "optimizer": _bytes(states)},
    )


def _pointers(module: torch.nn.Module) -> set[int]:
    return {parameter.data_ptr() for parameter in module.parameters()}


def _bytes(tensors: Any) -> int:
    """Bytes on a GPU of the storages behind tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values())


def compare(prediction: Prediction, measured: Measured) -> tuple[str, str | None]:
    """Measured beside planned.

    Returns:
        One line for the log, and a warning where what was allocated is further from the plan than 5 % of it.
    """
    planned = dict(prediction.peak.bytes)
    # the CUDA context, NCCL and what the allocator holds beyond its blocks are not in max_memory_allocated
    allocated = prediction.peak_bytes - planned["runtime"] - planned["fragmentation"]
    error = measured.allocated / max(allocated, 1) - 1
    line = (
        f"memory: allocated {gib(measured.allocated)} GiB, planned {gib(allocated)} ({error:+.1%}); reserved "
        f"{gib(measured.reserved)} GiB"
    )
    base = {"parameters": planned["parameters"], "optimizer": planned["optimizer"]}
    for name, value in measured.categories.items():
        if name in base and prediction.peak.name in ("loss", "forward and backward") and prediction.setup.zero != 3:
            line += f"; {name} {gib(value)} of {gib(base[name])}"
    if abs(error) <= WARN_ABOVE:
        return line, None
    side = "more" if error > 0 else "less"
    return line, (
        f"the step took {abs(error):.1%} {side} memory than planned ({gib(measured.allocated)} GiB allocated, "
        f"{gib(allocated)} planned at its highest moment, {prediction.peak.name}): the next plan for this model may be "
        f"as far off; docs/planner.md lists what the plan assumes"
    )
