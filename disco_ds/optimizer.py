"""AdamW with CLIP's decay groups, in the implementation that suits device and offload."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from disco_ds.config import OptimizerConfig

log = logging.getLogger("disco_ds")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with decay; gains, biases, class embedding and temperatures (ndim < 2) without.

    This is the rule of the CLIP paper (section 2.5) as open_clip has it. Parameters without gradient are left out, and
    so is an empty group, which DeepSpeed would drop with its place in the list.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "name": "decay"},
        {"params": free, "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, on_gpu: bool, offload: bool) -> torch.optim.Optimizer:
    """AdamW over :func:`decay_groups`: torch's, fused on a GPU; with offload DeepSpeed's CPU Adam, where it builds."""
    groups = decay_groups(model, config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if offload and on_gpu:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        if CPUAdamBuilder().is_compatible(verbose=False):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        log.warning(
            "offload: DeepSpeed's CPU Adam cannot be built here (no compiler?); using torch's, about 5 x slower"
        )
    return torch.optim.AdamW(groups, fused=on_gpu and not offload, **options)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group of an optimizer, or of DeepSpeed's wrapper around one."""
    for group in optimizer.param_groups:
        group["lr"] = lr
