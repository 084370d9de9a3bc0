"""What a ds_config decides of a plan: stage, batch keys, precision, buckets, offload. Without torch and DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disco_ds.engine.ds_types import AUTO, read_json, typed
from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import Coefficients
from disco_ds.planner.partitions import Buckets, default_buckets


def read(path: str | Path) -> dict[str, Any]:
    """The content of a ds_config, without its nulls.

    Raises:
        ConfigError: it cannot be read, is not a JSON object, or has a value that its key does not take.
    """
    flag = "--ds-config"
    return typed(read_json(path, flag), f"{flag} {path}")


def choices(content: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Fields of :class:`~disco_ds.planner.search.Request` that the ds_config decides; "auto" decides nothing.

    Args:
        content: of :func:`read`, or of :func:`disco_ds.engine.ds_checks.read_ds_config`.
        gpus: number of GPUs.

    Raises:
        ConfigError: the batch keys do not divide.
    """
    zero = content.get("zero_optimization", {})
    found: dict[str, Any] = {"zero": zero.get("stage", 0)}
    if content.get("bf16", {}).get("enabled") is True:
        found["precision"] = "bf16"
    elif content.get("torch_autocast", {}).get("enabled") is True:
        found["precision"] = "amp"
    elif content.get("bf16", {}).get("enabled") is False:
        found["precision"] = "fp32"
    total = _number(content, "train_batch_size")
    micro = _number(content, "train_micro_batch_size_per_gpu")
    steps = _number(content, "gradient_accumulation_steps")
    if total is None and micro is not None:
        total = micro * (steps or 1) * gpus
    if total is not None and micro is None and steps is not None:
        if total % (steps * gpus):
            raise ConfigError(
                f"--ds-config: train_batch_size {total} does not divide by gradient_accumulation_steps {steps} x "
                f"--gpus {gpus}"
            )
        micro = total // (steps * gpus)
    if total is not None:
        found["global_batch"] = total
    if micro is not None:
        found["micro_batch"] = micro
    if zero.get("offload_param", {}).get("device", "none") != "none":
        found["offload"] = "all"
    elif zero.get("offload_optimizer", {}).get("device", "none") != "none":
        found["offload"] = "optimizer"
    return found


def _number(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key, AUTO)
    return None if value == AUTO else value


def buckets(content: dict[str, Any], model: Coefficients, device: str = "cuda") -> Buckets:
    """The bucket sizes of a ds_config; DeepSpeed's own defaults for keys that are not there.

    DeepSpeed's default reduce_bucket_size is 5e8 elements, and it is allocated whole whatever the model's size.
    """
    zero = content.get("zero_optimization", {})
    ours = default_buckets(model, device)
    overlap = zero.get("overlap_comm", zero.get("stage") == 3)

    def size(key: str, auto: int, default: int) -> int:
        value = zero.get(key, default)
        return auto if value == AUTO else int(value)

    reduce = size("reduce_bucket_size", ours.reduce, 500_000_000)
    if "reduce_bucket_size" in zero:  # disco_ds lowers a bucket that is given, and leaves DeepSpeed's default alone
        reduce = min(reduce, model.parameters + model.parameters % 2)
    return Buckets(
        reduce=reduce,
        max_live=size("stage3_max_live_parameters", ours.max_live, 1_000_000_000),
        reuse_distance=size("stage3_max_reuse_distance", ours.reuse_distance, 1_000_000_000),
        overlap=ours.overlap if overlap == AUTO else bool(overlap),
    )
