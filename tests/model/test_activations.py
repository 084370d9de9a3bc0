"""Activation checkpointing on one process, without an engine."""

from __future__ import annotations

import pytest
import torch

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.activations import apply_policy
from disco_ds.model.build import build_model
from tests.helpers.tiny import TINY_RESNET, TINY_TIMM, TINY_VOCAB, tiny_batch

MODELS = {
    name: {**config, "text_cfg": TINY_VOCAB["text_cfg"]}
    for name, config in {"vit": TINY_VOCAB, "resnet": TINY_RESNET, "timm": TINY_TIMM}.items()
}


def gradients_and_buffers(name, policy, batch):
    """Of one training step; patch dropout draws random numbers."""
    dropout = 0.5 if name == "vit" else None
    config = ModelConfig(name=name, config=MODELS[name], checkpointing=policy, patch_dropout=dropout)
    model = build_model(config, seed=0).train()
    torch.manual_seed(1)
    out = model(*batch)
    (out.image_features * out.text_features).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_gives_the_same_gradient_and_statistics(name):
    """Patch dropout and batch norm included: random numbers are replayed, running statistics updated once."""
    batch = tiny_batch(4)
    expected = gradients_and_buffers(name, "none", batch)
    for policy in ("full", "every:2", "ops", "offload"):
        found = gradients_and_buffers(name, policy, batch)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda message, policy=policy: f"{policy}: {message}")


def test_checkpointing_needs_blocks():
    with pytest.raises(ConfigError, match="no blocks were recognised in the image tower"):
        apply_policy({"image": [torch.nn.Linear(2, 2)]}, "full")
