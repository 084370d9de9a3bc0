"""Small runs saved on real ranks, and the features that their engines gave: material for export and evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.helpers.engines import BATCH, build, own_rows
from tests.helpers.tiny import TINY, TINY_RESNET, TINY_TIMM, TINY_VOCAB, tiny_batch

_TEXT = {"text_cfg": {**TINY_VOCAB["text_cfg"], "width": 32, "layers": 1}}
_VISION = {"vision_cfg": {**TINY["vision_cfg"], "width": 32, "layers": 1}}
SMALL = {**TINY, **_VISION, **_TEXT}
SIGMOID = {**SMALL, "custom_text": True, "init_logit_bias": -10.0, "init_logit_scale": 2.3}
WORDS = {**SMALL, "text_cfg": {**_TEXT["text_cfg"], "vocab_size": 49408}}
RUNS = {
    "zero0": {"stage": 0},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3-bf16": {"stage": 3, "precision": "bf16"},
    "zero2-locked": {"stage": 2, "freeze": "image"},
    "zero3-locked": {"stage": 3, "freeze": "image"},
    "zero2-resnet": {"stage": 2, "config": {**TINY_RESNET, **_TEXT}},
    "zero3-resnet": {"stage": 3, "config": {**TINY_RESNET, **_TEXT}},
    "zero2-bias": {"stage": 2, "config": SIGMOID, "loss": "sigmoid"},
    "zero2-words": {"stage": 2, "config": WORDS},
    "zero3-timm": {"stage": 3, "config": {**TINY_TIMM, **_TEXT}},
}
"""zero2-words has open_clip's vocabulary; real captions can be fed to it, the others know 100 tokens."""
STEP = "step-00000002"


def model_of(case):
    """The model section of a case's run file."""
    return {"name": "t", "config": RUNS[case].get("config", SMALL), "freeze": RUNS[case].get("freeze", "none")}


def probe():
    """The images and texts whose features are compared."""
    return tiny_batch(6, 77)


def assert_engines(found, engine, within=1e-5):
    """The features that a model gave for ``probe()`` are those of an engine: (image and text features, scale, bias)."""
    features, scale, bias = engine
    for part, expected in zip(found[:2], features, strict=True):
        torch.testing.assert_close(part, torch.as_tensor(expected), rtol=0, atol=within)
    assert float(found[2]) == pytest.approx(scale, rel=1e-6)
    assert (None if len(found) < 4 or found[3] is None else found[3].item()) == pytest.approx(bias)


def save_runs(folder, cases):
    """Two steps, a checkpoint and a config.yaml for each case; (image features, text features, scale, bias) by case."""
    from disco_ds.checkpoint.save import Identity, RunState, save_checkpoint

    given = {}
    for case in cases:
        engine, step = build(**{"config": SMALL, **RUNS[case]})
        for seed in (1, 2):
            images, texts = tiny_batch(BATCH, seed)
            step(images[own_rows()], texts[own_rows()])
        identity = Identity(dist.get_world_size(), RUNS[case]["stage"], "fp32", 8, model_of(case), "adamw")
        run = Path(folder) / case
        save_checkpoint(engine, run / "checkpoints", RunState(2, 2 * BATCH, None), identity, keep=1)
        if dist.get_rank() == 0:
            content = {"name": case, "steps": 2, "data": {"train": "gone"}, "model": model_of(case)}
            (run / "config.yaml").write_text(yaml.safe_dump(content))
        engine.eval()
        with torch.no_grad():
            images, texts = probe()
            found = [engine(images, None).image_features, engine(None, texts).text_features]
            out = engine(images, texts)
        bias = None if out.logit_bias is None else float(out.logit_bias)
        given[case] = ([part.float().numpy() for part in found], float(out.logit_scale), bias)
        engine.destroy()
    return given
