"""Decay groups and layer decay; no engine."""

from __future__ import annotations

import pytest

from disco_ds.config.schema import ModelConfig, OptimizerConfig
from disco_ds.engine.optimizer import parameter_groups
from disco_ds.model.build import build_model
from tests.helpers.tiny import TINY_VOCAB


@pytest.fixture(scope="module")
def model():
    return build_model(ModelConfig(name="tiny", config=TINY_VOCAB), seed=0)


def test_decay_groups_are_clips(model):
    """The rule of open_clip's own training script: no decay for ndim < 2, which covers gains, biases, logit_scale."""
    made = parameter_groups(model, OptimizerConfig(weight_decay=0.2))
    groups = {group["name"]: {id(p) for p in group["params"]} for group in made}
    assert sorted((group["name"], group["weight_decay"]) for group in made) == [("decay", 0.2), ("no_decay", 0.0)]
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name
        assert id(parameter) in groups["no_decay" if exempt else "decay"], name
    assert sum(map(len, groups.values())) == len(list(model.parameters()))


def test_layer_decay_falls_towards_the_input(model):
    groups = parameter_groups(model, OptimizerConfig(layer_decay=0.5))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    by_name = {name.removeprefix("clip."): scale[id(p)] for name, p in model.named_parameters()}
    for tower in ("visual.", ""):  # two blocks each
        assert by_name[f"{tower}transformer.resblocks.1.ln_1.weight"] == 0.5
        assert by_name[f"{tower}transformer.resblocks.0.mlp.c_fc.weight"] == 0.25
        assert by_name[f"{tower}positional_embedding"] == 0.125
    for name in ("visual.conv1.weight", "visual.class_embedding", "token_embedding.weight"):
        assert by_name[name] == 0.125, name
    for name in ("visual.proj", "text_projection", "visual.ln_post.weight", "ln_final.bias", "logit_scale"):
        assert by_name[name] == 1.0, name
