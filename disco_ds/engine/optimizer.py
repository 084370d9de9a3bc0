"""AdamW and Lion with CLIP's decay groups, from torch, timm and DeepSpeed; none is written here.

ZeRO 1 to 3 hand an optimizer flat slices of many layers: these two work element by element and do not notice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from disco_ds.config.schema import OptimizerConfig
from disco_ds.model.activations import find_blocks
from disco_ds.model.towers import TwoTowers

log = logging.getLogger("disco_ds")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups by weight decay and learning-rate scale; parameters without gradient and empty groups are left out.

    Decay is CLIP's (Radford et al. 2021, section 2.5, as open_clip has it): matrices decay; gains, biases, the class
    embedding and the temperatures (ndim < 2) do not. ``lr_scale`` is layer_decay to the power of a block's distance
    from the end of its tower: 1 after the last block, smallest for the embeddings before the first.
    """
    scales = _layer_scales(model, config.layer_decay)
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        decayed, scale = parameter.ndim >= 2, scales.get(id(parameter), 1.0)
        group = {
            "params": [],
            "weight_decay": config.weight_decay if decayed else 0.0,
            "name": "decay" if decayed else "no_decay",
            "lr_scale": scale,
        }
        groups.setdefault((decayed, scale), group)["params"].append(parameter)
    return list(groups.values())


def _layer_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """Learning-rate scale by parameter id; temperatures are not in it."""
    if decay == 1.0:
        return {}
    assert isinstance(model, TwoTowers)
    text = getattr(model.clip, "text", model.clip)
    text_children = [child for name, child in text.named_children() if name != "visual"]
    scales = {}
    for tower, children in ((model.clip.visual, [model.clip.visual]), (text, text_children)):
        blocks = [block for child in children for block in find_blocks(child)]
        depth_of = {id(p): depth for depth, block in enumerate(blocks, 1) for p in block.parameters()}
        tables = {id(m.weight) for m in tower.modules() if isinstance(m, nn.Embedding)}
        depth = 0
        for name, parameter in tower.named_parameters():
            if tower is text and name.startswith("visual."):
                continue
            depth = depth_of.get(id(parameter), depth)
            own = depth
            if id(parameter) in tables or ("." not in name and "proj" not in name):
                own = 0  # token, class and position embeddings, wherever they are defined
            elif "." not in name or (depth == len(blocks) and id(parameter) not in depth_of):
                own = len(blocks) + 1  # projections, and what follows the last block
            scales[id(parameter)] = decay ** (len(blocks) + 1 - own)
    return scales


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, on_gpu: bool, offload: bool) -> torch.optim.Optimizer:
    """The optimizer named in the configuration, over :func:`parameter_groups`."""
    groups, lion = parameter_groups(model, config), config.name == "lion"
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas}
    if offload and on_gpu:  # DeepSpeed's vectorised optimizers for states in host memory
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion
        from deepspeed.ops.op_builder import CPUAdamBuilder, CPULionBuilder

        if (CPULionBuilder if lion else CPUAdamBuilder)().is_compatible(verbose=False):
            if lion:
                return DeepSpeedCPULion(groups, **common)
            return DeepSpeedCPUAdam(groups, adamw_mode=True, eps=config.eps, **common)
        log.warning("offload: DeepSpeed's CPU %s does not build here (no compiler?); torch's is slower", config.name)
    if lion:
        import timm.optim

        return timm.optim.Lion(groups, **common)
    return torch.optim.AdamW(groups, eps=config.eps, fused=on_gpu and not offload, **common)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group of an optimizer, or of DeepSpeed's wrapper around one, by its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
