"""The ds_config against the run: the batch, the precision, and what DeepSpeed is handed.

DeepSpeed's three batch keys keep their meaning and gain the contrastive one: ``train_batch_size`` =
``train_micro_batch_size_per_gpu`` x ``gradient_accumulation_steps`` x GPUs, and the negatives of every pair are all
``train_batch_size``. Accumulation here is cached feature gradients (:mod:`disco_ds.engine.step`), exact, so DeepSpeed
itself is handed the rank's whole batch as one micro-batch and never divides a loss by k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from disco_ds.errors import ConfigError

if TYPE_CHECKING:
    from disco_ds.config.schema import RunConfig

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
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


def given(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key of a ds_config or of one of its sections; None where it is absent or "auto"."""
    value = content.get(key)
    return None if value == "auto" else value


def solve_batch(
    world_size: int,
    total: int | None,
    micro: int | None,
    steps: int | None,
    *,
    names: tuple[str, str] = ("global batch", "micro_batch"),
    ranks: str = "{} ranks",
    source: str = "the ds_config",
) -> BatchPlan:
    """Solve total = micro x steps x world_size for what is None; with the total alone, it goes through in one pass.

    Args:
        names, ranks, source: what messages call total and micro-batch, the number of ranks, and the ds_config.

    Raises:
        ConfigError: neither total nor micro-batch is given, or the numbers do not divide.
    """
    if total is None and micro is None:
        raise ConfigError(
            f"the batch is not given: set global_batch (pairs per step over all GPUs; --global_batch 32768), or "
            f"train_batch_size in {source}"
        )
    factors = {ranks.format(world_size): world_size, f"{names[1]} {micro}": micro, f"{BATCH_KEYS[2]} {steps}": steps}
    given_factors = {word: value for word, value in factors.items() if value is not None}
    words, product = " x ".join(filter(None, given_factors)), math.prod(given_factors.values())
    total = product if total is None else total
    if micro is not None and steps is not None and product != total:
        raise ConfigError(f'{names[0]} {total} is not {words} = {product}; write "auto" for one of them in {source}')
    if total % product:
        low = total // product * product
        near = " and ".join(str(value) for value in (low, low + product) if value > 0)
        raise ConfigError(f"{names[0]} {total} does not divide by {words}; nearest that do: {near}")
    micro = micro or total // product
    return BatchPlan(total, micro, steps or total // (micro * world_size), world_size)


def plan_batch(config: RunConfig, content: dict[str, Any], world_size: int, source: str) -> BatchPlan:
    """The batch that run and ds_config give together.

    Raises:
        ConfigError: too little is given, the two files disagree, or the numbers do not divide.
    """
    found: list[int | None] = []
    for key, option in zip(BATCH_KEYS[:2], ("global_batch", "micro_batch"), strict=True):
        there, value = given(content, key), getattr(config, option)
        if None not in (there, value) and there != value:
            raise ConfigError(
                f'{option} is {value} but {key} in {source} is {there}: make them equal, or write "auto" there for '
                f"{BATCH_KEYS[0]}, {BATCH_KEYS[1]} and {BATCH_KEYS[2]}, which run file and flags then decide"
            )
        found.append(there if there is not None else value)
    return solve_batch(world_size, found[0], found[1], given(content, BATCH_KEYS[2]), source=source)


def choose_precision(config: RunConfig, content: dict[str, Any], on_gpu: bool, source: str) -> str:
    """ "bf16", "amp" or "fp32", from RunConfig.precision, the ds_config's sections, and the device.

    Raises:
        ConfigError: both sections are on, or RunConfig and the ds_config disagree.
    """
    sections = {
        "bf16": given(content.get("bf16", {}), "enabled"),
        "amp": given(content.get("torch_autocast", {}), "enabled"),
    }
    on = [name for name, value in sections.items() if value]
    if len(on) == 2:
        raise ConfigError(f"{source}: bf16 and torch_autocast are both enabled; choose one (--precision bf16 or amp)")
    if config.precision == "auto":
        if on:
            return on[0]
        return "bf16" if on_gpu and sections["bf16"] is None else "fp32"
    if (on and on[0] != config.precision) or sections.get(config.precision) is False:
        found = f"enables {on[0]}" if on else f"disables {config.precision}"
        raise ConfigError(f'precision is {config.precision} but {source} {found}: write "enabled": "auto" there')
    return config.precision


def resolve(config: RunConfig, content: dict[str, Any], *, world_size: int, on_gpu: bool, source: str) -> EngineConfig:
    """Check a ds_config against the run and fill all but the buckets, which need the model (:mod:`.buckets`).

    Raises:
        ConfigError: see :func:`~disco_ds.engine.ds_schema.checked`, :func:`plan_batch`, :func:`choose_precision`; a
            clip_norm that disagrees, or DeepSpeed's checkpointing under a policy that does not recompute.
    """
    from disco_ds.engine.ds_schema import checked

    content = checked(content, source)
    batch = plan_batch(config, content, world_size, source)
    precision = choose_precision(config, content, on_gpu, source)
    sizes = (batch.global_batch, batch.micro_batch, batch.accumulation)
    filled: dict[str, Any] = {
        key: value for key, value in zip(BATCH_KEYS, sizes, strict=True) if given(content, key) is None
    }
    ds = content | dict(zip(BATCH_KEYS, (batch.global_batch, batch.per_rank, 1), strict=True))
    zero = ds["zero_optimization"] = {"stage": 0, **ds.get("zero_optimization", {})}
    clip = given(ds, "gradient_clipping")
    if clip is None:
        filled["gradient_clipping"] = ds["gradient_clipping"] = config.optimizer.clip_norm
    elif "clip_norm" in config.optimizer.model_fields_set and clip != config.optimizer.clip_norm:
        raise ConfigError(
            f"optimizer.clip_norm is {config.optimizer.clip_norm} but gradient_clipping in {source} is {clip}: "
            f'write "auto" there, or make them equal'
        )
    if given(content.get("bf16", {}), "enabled") is None:
        filled["bf16.enabled"] = precision == "bf16"
    ds["bf16"] = {**ds.get("bf16", {}), "enabled": precision == "bf16"}
    if precision == "amp":
        ds["torch_autocast"] = {"dtype": "bfloat16", **ds.get("torch_autocast", {}), "enabled": True}
    else:
        ds.pop("torch_autocast", None)
    policy = config.model.checkpointing
    if uses_deepspeed_checkpointing(content) and policy != "full" and not policy.startswith("every:"):
        raise ConfigError(
            f"{source}: activation_checkpointing says how to recompute, model.checkpointing is {policy}: set "
            "--model.checkpointing full or every:K, or take the section out"
        )
    if config.optimizer.name != "adamw":
        ds["zero_allow_untested_optimizer"] = True  # Lion is as element-wise as Adam
    # the optimizer handed over is torch's own where DeepSpeed's CPU Adam is not built
    ds.setdefault("zero_force_ds_cpu_optimizer", False)
    return EngineConfig(ds, batch, precision, zero["stage"], filled, source)


def uses_deepspeed_checkpointing(content: dict[str, Any]) -> bool:
    """Whether the activation_checkpointing section asks for something that only DeepSpeed's own version does."""
    section = content.get("activation_checkpointing", {})
    return any(section.get(key) for key in ("partition_activations", "cpu_checkpointing", "profile"))
