"""The towers against open_clip's own model; locked ones; the temperature in bf16."""

from __future__ import annotations

import math

import open_clip
import pytest
import torch

from disco_ds.config.schema import ModelConfig, OptimizerConfig
from disco_ds.engine.optimizer import parameter_groups
from disco_ds.model.build import build_model
from tests.helpers.tiny import TINY_VOCAB, tiny_batch


def tiny(**fields):
    return build_model(ModelConfig(name="tiny", config=TINY_VOCAB, **fields), seed=0)


def test_features_equal_open_clips():
    torch.manual_seed(0)
    clip = open_clip.model.CLIP(**TINY_VOCAB).eval()
    model = tiny().eval()
    images, texts = tiny_batch(5)
    with torch.no_grad():
        expected = clip(images, texts)
        out = model(images, texts)
    assert torch.equal(out.image_features, expected[0])  # same seed, same initial weights
    assert torch.equal(out.text_features, expected[1])
    assert out.logit_scale.shape == (1,)
    torch.testing.assert_close(out.logit_scale[0], expected[2])
    assert out.logit_bias is None
    assert model(images).text_features is None
    assert model(texts=texts).image_features is None


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_locked_tower_is_out_of_everything(tower):
    model = tiny(freeze=tower, patch_dropout=0.5).train()
    trained = {id(p) for group in parameter_groups(model, OptimizerConfig()) for p in group["params"]}
    other = {"image": "text", "text": "image"}[tower]
    assert not trained & {id(p) for p in model.tower_parameters(tower)}
    assert trained >= {id(p) for p in model.tower_parameters(other)}
    out = model(*tiny_batch(3))
    assert getattr(out, f"{tower}_features").requires_grad is False
    assert getattr(out, f"{other}_features").requires_grad is True
    if tower == "image":  # evaluation mode: no patch is dropped, so two passes agree
        images, _ = tiny_batch(3)
        assert torch.equal(model(images).image_features, model(images).image_features)


def test_the_master_value_is_what_multiplies():
    """In bf16 the working copy of ln 100 gives 98.86; forward takes the fp32 value, the gradient goes to the copy."""
    model = tiny().to(torch.bfloat16)
    model.logit_scale.data.fill_(math.log(100.0))
    assert model(texts=tiny_batch(2)[1]).logit_scale.item() == pytest.approx(98.86, abs=0.01)
    model.set_master("logit_scale", torch.tensor([math.log(100.0)]))
    scale = model(texts=tiny_batch(2)[1]).logit_scale
    assert scale.dtype == torch.float32
    assert scale.item() == pytest.approx(100.0, rel=1e-6)
    scale.sum().backward()
    assert model.logit_scale.grad.item() == pytest.approx(100.0, rel=4e-3)  # d exp(x) / dx, rounded to bf16
