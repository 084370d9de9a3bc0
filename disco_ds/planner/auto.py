"""``--plan auto``: what run and ds_config leave open, decided for the device that is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_config import BATCH_KEYS, choose_precision, given, plan_batch
from disco_ds.errors import ConfigError
from disco_ds.planner.devices import device_here
from disco_ds.planner.from_ds_config import choices, planned_buckets, source_of, step_options
from disco_ds.planner.models import ModelSource, Progress, to_stderr
from disco_ds.planner.search import Plan, Planner, Request
from disco_ds.planner.text import headline
from disco_ds.planner.write import ds_config as planned_ds_config


def fill_auto(
    config: RunConfig,
    content: dict[str, Any],
    *,
    world_size: int,
    device: torch.device,
    source: str = "ds_config",
    progress: Progress = to_stderr,
) -> tuple[RunConfig, dict[str, Any], Plan]:
    """Decide what run and ds_config leave open, for the device at hand.

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
    models = source_of(config, progress)
    plan = Planner(models).best(_request(config, content, world_size, device.type, source, models))
    if not plan.fits:
        raise ConfigError(f"--plan auto: {headline(plan, config.model.name)[0]}")
    filled = _merged(content, planned_ds_config(plan, models.of(plan.setup)))
    changes = {
        "global_batch": plan.global_batch,
        "micro_batch": plan.prediction.micro_batch,
        "precision": plan.setup.precision,
        "model": config.model.model_copy(update={"checkpointing": plan.setup.checkpointing}),
    }
    # what is a default stays one: a ds_config may differ from defaults, and not from what was given
    as_given = config.model_copy(update=changes).model_dump(exclude_unset=True)
    return RunConfig.model_validate(as_given), filled, plan


def _request(
    config: RunConfig, content: dict[str, Any], world_size: int, kind: str, source: str, models: ModelSource
) -> Request:
    """What the files leave to the planner; ``kind`` is "cuda" or "cpu"."""
    batch = {"global_batch": config.global_batch, "micro_batch": config.micro_batch}
    if any((*batch.values(), given(content, BATCH_KEYS[0]), given(content, BATCH_KEYS[1]))):
        plan_batch(config, content, world_size, source)  # raises where run and ds_config contradict each other
    asked = choices(content, world_size) | {name: value for name, value in batch.items() if value is not None}
    if given(content.get("zero_optimization", {}), "stage") is None:
        asked["zero"] = "auto"
    if "checkpointing" in config.model.model_fields_set:
        asked["checkpointing"] = config.model.checkpointing
    asked["precision"] = choose_precision(config, content, kind == "cuda", source)
    gpu = device_here(kind)
    if kind == "cpu":
        # a machine's memory is not the planner's to fill: a tenth of it, and no fragmentation to speak of
        asked |= {"fragmentation": 1.0, "reserve_bytes": int(0.9 * gpu.usable_bytes)}
    request = Request(gpus=world_size, gpu=gpu, device=kind, **step_options(config), **asked)
    model = models.of(request.setup(0, "none" if request.checkpointing == "auto" else request.checkpointing))
    return replace(request, buckets=planned_buckets(content, model, kind, absent="auto"))


def _merged(content: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """The ds_config with the planned value wherever it says "auto" or nothing."""
    merged = dict(content)
    for key, value in planned.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            merged[key] = _merged(content[key], value)
        elif given(content, key) is None:
            merged[key] = value
    return merged
