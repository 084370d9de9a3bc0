"""What a ds_config, and a run beside it, decide of a plan. Without torch and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disco_ds.engine import buckets
from disco_ds.engine.ds_config import BATCH_KEYS, given, solve_batch
from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import OPTIMIZER_BYTES, Coefficients
from disco_ds.planner.models import ModelSource, Progress

if TYPE_CHECKING:
    from disco_ds.config.schema import RunConfig


def choices(content: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Fields of :class:`~disco_ds.planner.search.Request` that the ds_config decides; "auto" decides nothing.

    Args:
        content: of :func:`disco_ds.engine.ds_schema.read_ds_config`.
        gpus: number of GPUs.

    Raises:
        ConfigError: the batch keys do not divide.
    """
    zero = content.get("zero_optimization", {})
    found: dict[str, Any] = {"zero": zero.get("stage", 0)}
    bf16 = given(content.get("bf16", {}), "enabled")
    if bf16:
        found["precision"] = "bf16"
    elif given(content.get("torch_autocast", {}), "enabled"):
        found["precision"] = "amp"
    elif bf16 is False:
        found["precision"] = "fp32"
    total, micro, steps = (given(content, key) for key in BATCH_KEYS)
    if micro is not None or (total is not None and steps is not None):
        once = steps or (1 if total is None else None)
        names = ("--ds-config: train_batch_size", "train_micro_batch_size_per_gpu")
        batch = solve_batch(gpus, total, micro, once, names=names, ranks="--gpus {}")
        total, micro = batch.global_batch, batch.micro_batch
    found |= {"global_batch": total, "micro_batch": micro, "accumulation": steps}
    if zero.get("offload_param", {}).get("device", "none") != "none":
        found["offload"] = "all"
    elif zero.get("offload_optimizer", {}).get("device", "none") != "none":
        found["offload"] = "optimizer"
    return {name: value for name, value in found.items() if value is not None}


def planned_buckets(
    content: Mapping[str, Any], model: Coefficients, device: str = "cuda", *, absent: str | None = None
) -> buckets.Buckets:
    """The bucket sizes of a run with this ds_config; ``absent`` is the value of keys that are not there ("auto", where
    they will be filled in), None: DeepSpeed's own defaults."""
    zero = content.get("zero_optimization", {})
    if absent is not None:
        zero = {**dict.fromkeys(buckets.FILLED, absent), **zero}
    return buckets.planned(zero, model.parameters, model.largest, on_gpu=device == "cuda")


def step_options(config: RunConfig) -> dict[str, Any]:
    """What a run says of its optimizer, its loss and the cached form, as :class:`~disco_ds.planner.memory.Setup` has
    it; :func:`disco_ds.planner.write.run_config` is the inverse.

    Raises:
        ConfigError: an optimizer whose states are not known.
    """
    if config.optimizer.name not in OPTIMIZER_BYTES:
        known = ", ".join(OPTIMIZER_BYTES)
        raise ConfigError(f"the planner knows the optimizers {known}, not {config.optimizer.name}")
    return {
        "optimizer": config.optimizer.name,
        "loss": config.loss.kind,
        "tile": config.loss.tile,
        "keep_logits": config.loss.keep_logits,
        "reuse_last": config.cached.reuse_last,
        "reduce_once": config.cached.reduce == "once",
        "images_on_device": "cached" if config.cached.images == "device" else False,
    }


def source_of(config: RunConfig, progress: Progress) -> ModelSource:
    """The model of a run."""
    changes = config.model.model_dump(include={"config", "freeze", "patch_dropout", "image_size", "context_length"})
    return ModelSource(config.model.name, progress, changes)
