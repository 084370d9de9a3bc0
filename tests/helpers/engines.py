"""Engines over a tiny model, and the gradient that they have to give: plain torch, float64, one process."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.helpers.tiny import TINY_VOCAB

BATCH = 48
NARROW = {
    "embed_dim": 32,
    "vision_cfg": {**TINY_VOCAB["vision_cfg"], "width": 32, "head_width": 16},
    "text_cfg": {**TINY_VOCAB["text_cfg"], "width": 32},
}
"""The towers of engines, where a test names no others: what costs here is the number of operations and buckets."""


def reference_gradients(freeze, images, texts, *, config=NARROW, chunks=None, bias=None, seeds=(0,)):
    """Name → gradient in float64: open_clip's model and open_clip's loss, one process, no engine.

    ``chunks``: the batch is encoded in pieces of so many pairs, each after the random state of its rank; ``seeds`` are
    the ranks' seeds. Patch dropout is the only randomness, and only the image tower draws it.
    """
    torch.manual_seed(0)
    model = open_clip.model.CLIP(**config, init_logit_bias=bias).double().train()
    if freeze == "image":
        model.visual.requires_grad_(False).eval()
    outputs = []
    for seed, *shares in zip(seeds, images.chunk(len(seeds)), texts.chunk(len(seeds)), strict=True):
        torch.manual_seed(seed)
        for image, text in zip(*(share.split(chunks or BATCH) for share in shares), strict=True):
            outputs.append(model(image.double(), text))
    features = [torch.cat([out[i] for out in outputs]) for i in (0, 1)]
    if bias is None:
        loss = open_clip.loss.ClipLoss()(*features, outputs[0][2])
    else:
        loss = open_clip.loss.SigLipLoss()(*features, outputs[0][2], outputs[0][3])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rounding_error(expected, images, texts, precision):
    """The largest error that ``precision`` alone makes in a parameter's gradient, over the norm of the whole gradient.

    It is that of open_clip's model in one process, without an engine: whole and in four pieces, whose bf16 gradients
    are added up, and with linear layers whose bias is added at once or after the product has been rounded, as ZeRO 3's.
    """
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in expected.values()))
    worst = 0.0
    for pieces, linear in itertools.product((1, 4), (F.linear, _linear_in_two_steps)):
        torch.manual_seed(0)
        model = open_clip.model.CLIP(**NARROW).train()
        model = model.bfloat16() if precision == "bf16" else model
        with mock.patch.object(F, "linear", linear), torch.autocast("cpu", torch.bfloat16, precision == "amp"):
            dtype = model.logit_scale.dtype
            chunks = zip(images.to(dtype).chunk(pieces), texts.chunk(pieces), strict=True)
            outputs = [model(image, text) for image, text in chunks]
        features = [torch.cat([out[i] for out in outputs]).float() for i in (0, 1)]
        open_clip.loss.ClipLoss()(*features, outputs[0][2].float()).backward()
        for name, parameter in model.named_parameters():
            worst = max(worst, float((parameter.grad.double() - expected[name]).norm()) / norm)
    return worst


def _linear_in_two_steps(x, weight, bias=None):
    product = x @ weight.t()
    return product if bias is None else product + bias.to(product.dtype)


def build(stage, *, accumulation=1, policy="none", freeze="none", config=NARROW, precision="fp32", loss="one_block",
          dropout=None, zero=None, optimizer=None, by_deepspeed=None, **step_options):  # fmt: skip
    """A DeepSpeed engine and a TrainStep over it, through the project's own functions.

    ``zero``: more keys of zero_optimization; ``by_deepspeed``: an activation_checkpointing section; ``optimizer``:
    fields of OptimizerConfig; ``step_options`` go to TrainStep.
    """
    from disco_ds.config.schema import ModelConfig, RunConfig
    from disco_ds.engine.deepspeed_engine import build_engine, configure_checkpointing, start_distributed
    from disco_ds.engine.ds_config import resolve
    from disco_ds.engine.step import TrainStep
    from disco_ds.loss.contrastive import build_loss
    from disco_ds.model.build import build_model

    device = start_distributed()
    world_size = dist.get_world_size()
    model = ModelConfig(name="t", config=config, freeze=freeze, checkpointing=policy, patch_dropout=dropout)
    run = RunConfig(
        data={"train": "x"}, steps=1, global_batch=BATCH, micro_batch=BATCH // world_size // accumulation,
        precision=precision, model=model, optimizer=optimizer or {},
    )  # fmt: skip
    section = {"stage": stage, "reduce_bucket_size": 5000, **(zero or {})}  # many buckets
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0  # everything is partitioned
    content = {"zero_optimization": section}
    if by_deepspeed is not None:
        content["activation_checkpointing"] = by_deepspeed
        configure_checkpointing(by_deepspeed)
    engine_config = resolve(run, content, world_size=world_size, on_gpu=False, source="test")
    towers = build_model(model, 0, deepspeed_checkpointing=by_deepspeed is not None)
    engine = build_engine(towers, run.optimizer, engine_config)
    return engine, TrainStep(engine, build_loss(loss), accumulation, device, **step_options)


def gradient_error(engine, expected, floor=1e-4):
    """Largest relative error over parameters (norm of the difference over the norm), and the parameter's name.

    A gradient that is zero but for rounding (the bias of attention keys) is measured against ``floor`` of the norm of
    the whole gradient; with a floor of 1 every parameter is.
    """
    from deepspeed.utils import safe_get_full_grad

    floor *= math.sqrt(sum(float(g.norm()) ** 2 for g in expected.values()))
    worst, found = (0.0, ""), set()
    for name, parameter in engine.module.named_parameters():
        gradient = parameter.grad if engine.zero_optimization_stage() == 0 else safe_get_full_grad(parameter)
        short = name.removeprefix("clip.")
        if short not in expected:
            continue
        found.add(short)
        reference = expected[short].reshape(gradient.shape)
        error = float((gradient.double() - reference).norm() / max(float(reference.norm()), floor))
        worst = max(worst, (error if math.isfinite(error) else math.inf, short))
    missing = set(expected) - found
    return (math.inf, f"no gradient: {missing}") if missing else worst


def own_rows():
    """The rows of a global batch that are this rank's."""
    share = BATCH // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
