"""The ds_config: read it, check it in the user's terms, fill in what says "auto".

DeepSpeed's three batch keys keep their meaning and gain the contrastive one: ``train_batch_size`` =
``train_micro_batch_size_per_gpu`` x ``gradient_accumulation_steps`` x GPUs, and the negatives of every pair are all
``train_batch_size``. Accumulation here is cached feature gradients (:mod:`disco_ds.engine.step`), exact, so DeepSpeed
itself is handed the rank's whole batch as one micro-batch and never divides a loss by k.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_checks import REFUSED, uses_deepspeed_checkpointing
from disco_ds.engine.ds_types import AUTO, typed
from disco_ds.errors import ConfigError

BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
FILLED = (*BUCKETS, "stage3_max_live_parameters", "stage3_param_persistence_threshold", "overlap_comm")
"""Keys of zero_optimization for which "auto" is known here."""


@dataclass
class BatchPlan:
    """How one optimizer step is cut: global_batch = micro_batch x accumulation x world_size, in pairs."""

    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int

    @property
    def per_rank(self) -> int:
        """Pairs of one rank in one step."""
        return self.micro_batch * self.accumulation


@dataclass
class EngineConfig:
    """A checked ds_config: what DeepSpeed gets, and what it was resolved to."""

    deepspeed: dict[str, Any]
    """Handed to deepspeed.initialize as it is."""
    batch: BatchPlan
    precision: str
    """"bf16", "amp" or "fp32"."""
    zero_stage: int
    filled: dict[str, Any] = field(default_factory=dict)
    """Values that were put in place of "auto" or a missing key, by dotted name."""
    source: str = ""
    """File that it came from, for messages."""


def _number(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key, AUTO)
    return None if value == AUTO else value


def _agreed(content: dict[str, Any], key: str, option: str, given: int | None, source: str) -> int | None:
    value = _number(content, key)
    if value is not None and given is not None and value != given:
        raise ConfigError(
            f'{option} is {given} but {key} in {source} is {value}: make them equal, or write "auto" there for '
            "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps, which run file and "
            "flags then decide"
        )
    return value if value is not None else given


def plan_batch(config: RunConfig, content: dict[str, Any], world_size: int, source: str) -> BatchPlan:
    """Solve train_batch_size = micro x accumulation x world_size for what is not given.

    Args:
        content: a ds_config of :func:`disco_ds.engine.ds_types.typed`.

    Raises:
        ConfigError: too little is given, the two files disagree, or the numbers do not divide.
    """
    total = _agreed(content, "train_batch_size", "global_batch", config.global_batch, source)
    micro = _agreed(content, "train_micro_batch_size_per_gpu", "micro_batch", config.micro_batch, source)
    steps = _number(content, "gradient_accumulation_steps")
    if total is None:
        if micro is None:
            raise ConfigError(
                f"the batch is not given: set global_batch (pairs per step over all GPUs; --global_batch 32768), or "
                f"train_batch_size in {source}"
            )
        total = micro * (steps or 1) * world_size
    if micro is None:
        per_step = (steps or 1) * world_size
        if total % per_step:
            raise ConfigError(
                f"global batch {total} does not divide by {world_size} ranks x gradient_accumulation_steps "
                f"{steps or 1}; nearest that do: {_nearest_multiples(total, per_step)}"
            )
        micro = total // per_step
    if steps is None:
        if total % (micro * world_size):
            raise ConfigError(
                f"global batch {total} does not divide by micro_batch {micro} x {world_size} ranks; "
                f"nearest that do: {_nearest_multiples(total, micro * world_size)}"
            )
        steps = total // (micro * world_size)
    if micro * steps * world_size != total:
        raise ConfigError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f'{steps} x {world_size} ranks = {micro * steps * world_size}; write "auto" for one of them in {source}'
        )
    return BatchPlan(total, micro, steps, world_size)


def _nearest_multiples(value: int, step: int) -> str:
    low = value // step * step
    return " and ".join(str(v) for v in (low, low + step) if v > 0)


def _enabled(content: dict[str, Any], section: str) -> bool | None:
    value = content.get(section, {}).get("enabled", AUTO)
    return None if value == AUTO else value


def choose_precision(config: RunConfig, content: dict[str, Any], on_gpu: bool, source: str) -> str:
    """ "bf16", "amp" or "fp32", from RunConfig.precision, the ds_config's sections, and the device.

    Raises:
        ConfigError: both sections are on, or RunConfig and the ds_config disagree.
    """
    sections = {"bf16": _enabled(content, "bf16"), "amp": _enabled(content, "torch_autocast")}
    on = [name for name, value in sections.items() if value]
    if len(on) == 2:
        raise ConfigError(f"{source}: bf16 and torch_autocast are both enabled; choose one (--precision bf16 or amp)")
    if config.precision == AUTO:
        if on:
            return on[0]
        return "bf16" if on_gpu and sections["bf16"] is None else "fp32"
    if (on and on[0] != config.precision) or sections.get(config.precision) is False:
        found = f"enables {on[0]}" if on else f"disables {config.precision}"
        raise ConfigError(f'precision is {config.precision} but {source} {found}: write "enabled": "auto" there')
    return config.precision


def resolve(config: RunConfig, content: dict[str, Any], *, world_size: int, on_gpu: bool, source: str) -> EngineConfig:
    """Check a ds_config against the run and fill all but the bucket sizes, which need the model (:func:`fill_buckets`).

    Raises:
        ConfigError: see :func:`~disco_ds.engine.ds_types.typed`, :func:`plan_batch`, :func:`choose_precision`; a
            clip_norm that disagrees, "auto" for a key for which it is not known, an odd allgather_bucket_size.
    """
    content = typed(content, source)
    batch = plan_batch(config, content, world_size, source)
    precision = choose_precision(config, content, on_gpu, source)
    ds = copy.deepcopy(content)
    zero = ds.setdefault("zero_optimization", {"stage": 0})
    zero.setdefault("stage", 0)
    _check_buckets(zero, source)
    filled: dict[str, Any] = {}
    for key, value in (
        ("train_batch_size", batch.global_batch),
        ("train_micro_batch_size_per_gpu", batch.micro_batch),
        ("gradient_accumulation_steps", batch.accumulation),
    ):
        if content.get(key, AUTO) == AUTO:
            filled[key] = value
    ds["train_batch_size"] = batch.global_batch
    ds["train_micro_batch_size_per_gpu"] = batch.per_rank
    ds["gradient_accumulation_steps"] = 1
    clip = ds.get("gradient_clipping", AUTO)
    if clip == AUTO:
        filled["gradient_clipping"] = ds["gradient_clipping"] = config.optimizer.clip_norm
    elif "clip_norm" in config.optimizer.model_fields_set and clip != config.optimizer.clip_norm:
        raise ConfigError(
            f"optimizer.clip_norm is {config.optimizer.clip_norm} but gradient_clipping in {source} is {clip}: "
            f'write "auto" there, or make them equal'
        )
    if _enabled(content, "bf16") is None:
        filled["bf16.enabled"] = precision == "bf16"
    ds["bf16"] = {**ds.get("bf16", {}), "enabled": precision == "bf16"}
    if precision == "amp":
        ds["torch_autocast"] = {"dtype": "bfloat16", **ds.get("torch_autocast", {}), "enabled": True}
    else:
        ds.pop("torch_autocast", None)
    if (
        uses_deepspeed_checkpointing(content)
        and config.model.checkpointing not in ("full",)
        and not (config.model.checkpointing.startswith("every:"))
    ):
        raise ConfigError(
            f"{source}: activation_checkpointing says how to recompute, model.checkpointing is "
            f"{config.model.checkpointing}: set --model.checkpointing full or every:K, or take the section out"
        )
    if config.optimizer.name != "adamw":
        ds["zero_allow_untested_optimizer"] = True  # Lion is as element-wise as Adam; the others run at stage 0
    for key in [key for key in ds if key in REFUSED]:
        del ds[key]  # they are off; some of their names DeepSpeed refuses whatever they say
    # the optimizer handed over is torch's own where DeepSpeed's CPU Adam is not built
    ds.setdefault("zero_force_ds_cpu_optimizer", False)
    return EngineConfig(ds, batch, precision, zero["stage"], filled, source)


def _check_buckets(zero: dict[str, Any], source: str) -> None:
    for key, value in zero.items():
        name = f"{source}: zero_optimization.{key}"
        if value == AUTO and key not in FILLED:
            raise ConfigError(f'{name}: "auto" is not known here; give a value')
        if key == "allgather_bucket_size" and value != AUTO and value % 2:
            raise ConfigError(f"{name}: must be even, found {value}")


def fill_buckets(engine_config: EngineConfig, parameters: int, largest: int, *, on_gpu: bool) -> None:
    """Replace "auto" in zero_optimization, and lower buckets that the model cannot fill, in place.

    Args:
        parameters: elements of all trained parameters.
        largest: elements of the largest one.

    DeepSpeed allocates ``reduce_bucket_size`` elements whole, whatever the model's size (5e8 by default: more than a
    ViT-B/32 itself), so a bucket here is never larger than the model, and never smaller than its largest parameter.

    Raises:
        ConfigError: a ZeRO-3 persistence threshold above the largest parameter.
    """
    zero, source = engine_config.deepspeed["zero_optimization"], engine_config.source
    whole = parameters + parameters % 2  # DeepSpeed asserts even buckets, for the alignment of 16-bit elements
    bucket = max(largest, min(parameters, 50_000_000))
    values = {
        **dict.fromkeys(BUCKETS, bucket + bucket % 2),
        "stage3_max_live_parameters": max(2 * largest, parameters // 4),
        "stage3_param_persistence_threshold": min(100_000, max(parameters // 1000, 1)),
        "overlap_comm": on_gpu,
    }
    for key, value in list(zero.items()):
        name = f"zero_optimization.{key}"
        if value == AUTO:
            zero[key] = engine_config.filled[name] = values[key]
        elif key in BUCKETS and value > whole:
            zero[key] = whole
            engine_config.filled[name] = f"{whole} (lowered from {value:g}: the model has no more)"
    threshold = zero.get("stage3_param_persistence_threshold", 100_000)
    if engine_config.zero_stage == 3 and threshold > largest:
        raise ConfigError(
            f"{source}: zero_optimization.stage3_param_persistence_threshold {threshold:g} is above the largest "
            f'parameter ({largest} elements): ZeRO-3 would partition nothing. Lower it, or write "auto"'
        )
