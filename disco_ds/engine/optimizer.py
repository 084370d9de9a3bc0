"""Optimizers by name with CLIP's decay groups, from torch, timm and DeepSpeed; none is written here.

ZeRO 1 to 3 hand an optimizer flat slices of many layers. AdamW and Lion work element by element and do not notice;
LAMB, Adafactor and Muon need whole layers, so they run at stage 0 only.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from disco_ds.config.schema import OptimizerConfig
from disco_ds.errors import ConfigError
from disco_ds.model.activations import find_blocks
from disco_ds.model.towers import TwoTowers

log = logging.getLogger("disco_ds")

WHOLE_LAYERS = ("lamb", "adafactor", "muon")
"""Optimizers that look at a layer as a whole."""


def check_optimizer(config: OptimizerConfig, *, zero_stage: int, offload: bool) -> None:
    """Refuse a combination that cannot work, before anything is built.

    Raises:
        ConfigError: an optimizer that needs whole layers under ZeRO.
    """
    if config.name in WHOLE_LAYERS and zero_stage > 0:
        what = "offload" if offload else f"ZeRO stage {zero_stage}"
        raise ConfigError(
            f"optimizer.name: {config.name} looks at whole layers, and {what} gives it flat slices of many: use "
            f"zero_optimization.stage 0 without offload, or --optimizer.name adamw or lion"
        )


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups by weight decay and learning-rate scale; parameters without gradient and empty groups are left out.

    Decay is CLIP's (Radford et al. 2021, section 2.5, as open_clip has it): matrices decay; gains, biases, the class
    embedding and the temperatures (ndim < 2) do not. ``lr_scale`` is layer_decay to the power of a block's distance
    from the end of its tower: 1 after the last block, smallest for the embeddings before the first.
    """
    scales = _layer_scales(model, config.layer_decay)
    fallback = _embeddings(model)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        decayed, scale = parameter.ndim >= 2, scales.get(id(parameter), 1.0)
        key = (decayed, scale, config.name == "muon" and (not decayed or id(parameter) in fallback))
        group = groups.setdefault(
            key,
            {
                "params": [],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "name": "decay" if decayed else "no_decay",
                "lr_scale": scale,
            },
        )
        if config.name == "muon":
            group["use_fallback"] = key[2]  # embeddings and vectors: AdamW inside Muon, as its authors advise
        group["params"].append(parameter)
    return list(groups.values())


def _embeddings(model: nn.Module) -> set[int]:
    words = ("embed", "logit", "proj")  # looked up by row, or the last map to features: no hidden matrices
    outside = {id(p) for block in find_blocks(model) for p in block.parameters()}
    return {id(p) for name, p in model.named_parameters() if id(p) not in outside and any(w in name for w in words)}


def _layer_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """Learning-rate scale by parameter id; temperatures are not in it."""
    if decay == 1.0:
        return {}
    assert isinstance(model, TwoTowers)
    text = getattr(model.clip, "text", model.clip)
    scales = {}
    for tower, image in ((model.clip.visual, True), (text, False)):
        blocks = find_blocks(tower) if image else [b for c in _text_children(tower) for b in find_blocks(c)]
        depth_of = {id(p): depth for depth, block in enumerate(blocks, 1) for p in block.parameters()}
        tables = {id(m.weight) for m in tower.modules() if isinstance(m, nn.Embedding)}
        depth = 0
        for name, parameter in tower.named_parameters():
            if not image and name.startswith("visual."):
                continue
            depth = depth_of.get(id(parameter), depth)
            own = depth
            if id(parameter) in tables or ("." not in name and "proj" not in name):
                own = 0  # token, class and position embeddings, wherever they are defined
            elif "." not in name or (depth == len(blocks) and id(parameter) not in depth_of):
                own = len(blocks) + 1  # projections, and what follows the last block
            scales[id(parameter)] = decay ** (len(blocks) + 1 - own)
    return scales


def _text_children(text: nn.Module) -> list[nn.Module]:
    return [child for name, child in text.named_children() if name != "visual"]


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, on_gpu: bool, offload: bool) -> torch.optim.Optimizer:
    """The optimizer named in the configuration, over :func:`parameter_groups`."""
    groups = parameter_groups(model, config)
    lr, betas = config.lr, config.betas
    if config.name in WHOLE_LAYERS:
        import timm.optim

        if config.name == "lamb":
            # the engine has clipped already: LAMB's own clipping would clip a second time
            return timm.optim.Lamb(groups, lr=lr, betas=betas, eps=config.eps, max_grad_norm=None)
        if config.name == "muon":
            return timm.optim.Muon(groups, lr=lr, betas=betas, momentum=0.95)
        return timm.optim.AdafactorBigVision(groups, lr=lr, momentum=betas[0], beta2_cap=betas[1])
    if offload and on_gpu:
        host = _host_optimizer(groups, config)
        if host is not None:
            return host
    if config.name == "lion":
        import timm.optim

        return timm.optim.Lion(groups, lr=lr, betas=betas)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=on_gpu and not offload)


def _host_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    """DeepSpeed's vectorised optimizer for states in host memory, or None where it does not build."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, CPULionBuilder

    builder = CPULionBuilder if config.name == "lion" else CPUAdamBuilder
    if not builder().is_compatible(verbose=False):
        log.warning("offload: DeepSpeed's CPU %s does not build here (no compiler?); torch's is slower", config.name)
        return None
    if config.name == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, lr=config.lr, betas=config.betas)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, adamw_mode=True, lr=config.lr, betas=config.betas, eps=config.eps)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group of an optimizer, or of DeepSpeed's wrapper around one, by its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
