"""logit_scale and logit_bias, exact in fp32 in every copy that a ZeRO stage keeps.

DeepSpeed holds a parameter up to twice: the working copy that forward uses, and an fp32 master that the optimizer
updates and that the working copy is made from after each step. Where the master lies differs by stage and precision:
as read in deepspeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.model.towers import TwoTowers

NAMES = ("logit_scale", "logit_bias")


def has_no_masters(engine: Any) -> bool:
    """Whether the optimizer works on the parameters themselves: no ZeRO, no lower-precision copies."""
    return engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled()


def exact_temperatures(model: TwoTowers) -> dict[str, Tensor]:
    """The fp32 values by name, before an engine casts the model."""
    return {n: p.detach().float().clone() for n in NAMES if (p := getattr(model, n)) is not None}


def clamp_temperatures(engine: Any, values: dict[str, Tensor] | None = None) -> None:
    """Keep logit_scale in [0, ln 100] in master and working copy, and tell the model the exact values for forward.

    The next step starts from the master, and the next forward from the working copy. A collective: call it on every
    rank, after each step.

    Args:
        values: values to set instead of the masters' own, by name.
    """
    towers: TwoTowers = engine.module
    for name in NAMES:
        parameter = getattr(towers, name)
        if parameter is None:
            continue
        limits = towers.clamp_range(name)
        value = values[name].to(engine.device) if values else master_value(engine, parameter)
        if limits is not None:
            value = value.clamp(*limits)
        if limits is not None or values:
            set_value(engine, parameter, value)
        towers.set_master(name, value)


def master_value(engine: Any, parameter: nn.Parameter) -> Tensor:
    """The fp32 value of a whole parameter, as the optimizer holds it. A collective: call it on every rank."""
    if has_no_masters(engine):
        return parameter.detach().float()
    if engine.zero_optimization_stage() == 0:
        return _unpartitioned_master(engine, parameter).detach()
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter).detach()


def set_value(engine: Any, parameter: nn.Parameter, value: Tensor) -> None:
    """Write a parameter in all its copies. A collective: call it on every rank, with the same value."""
    with torch.no_grad():
        if engine.zero_optimization_stage() == 3:
            _set_partitioned(parameter, value)
            return
        if engine.zero_optimization_stage() > 0:
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(parameter, value)
        elif not has_no_masters(engine):
            _unpartitioned_master(engine, parameter).copy_(value)
        parameter.data.copy_(value)


def _unpartitioned_master(engine: Any, parameter: nn.Parameter) -> Tensor:
    """Stage 0 in bf16: DeepSpeed's optimizer keeps two parallel lists of lists."""
    groups = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    pairs = (pair for working, masters in groups for pair in zip(working, masters, strict=True))
    return next(master for candidate, master in pairs if candidate is parameter)


def _set_partitioned(parameter: nn.Parameter, value: Tensor) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    local = safe_get_local_fp32_param(parameter)
    if local is not None and local.numel():  # a rank whose part is padding only holds none
        safe_set_local_fp32_param(parameter, value.to(local.dtype).reshape(-1)[: local.numel()])
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.data.copy_(value)
