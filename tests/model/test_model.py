"""The towers, their decay groups, the schedules; one process, no engine."""

from __future__ import annotations

import json
import math

import open_clip
import pytest
import torch

from disco_ds.checkpoint.saved import open_clip_state_dict
from disco_ds.config.schema import ModelConfig, OptimizerConfig, ScheduleConfig
from disco_ds.engine.optimizer import check_optimizer, parameter_groups
from disco_ds.engine.schedule import build_schedule
from disco_ds.errors import ConfigError
from disco_ds.model.activations import apply_policy
from disco_ds.model.build import build_model
from disco_ds.model.preprocess import build_tokenizer, build_transform
from tests.helpers.tiny import TINY, TINY_RESNET, TINY_TIMM, tiny_batch


def tiny(**fields):
    return build_model(ModelConfig(name="tiny", config=TINY, **fields), seed=0)


def test_features_equal_open_clips():
    torch.manual_seed(0)
    clip = open_clip.model.CLIP(**TINY).eval()
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


def test_state_dict_goes_back_to_open_clip():
    model = build_model(ModelConfig(name="tiny", config={**TINY, "init_logit_bias": -10.0}), seed=0)
    clip = open_clip.model.CLIP(**TINY, init_logit_bias=0.0)
    clip.load_state_dict(open_clip_state_dict(model.state_dict()), strict=True)
    assert clip.logit_scale.shape == ()
    assert float(clip.logit_bias.detach()) == -10.0


def test_decay_groups_are_clips():
    """The rule of open_clip's own training script: no decay for ndim < 2, which covers gains, biases, logit_scale."""
    model = tiny()
    made = parameter_groups(model, OptimizerConfig(weight_decay=0.2))
    groups = {group["name"]: {id(p) for p in group["params"]} for group in made}
    assert sorted((group["name"], group["weight_decay"]) for group in made) == [("decay", 0.2), ("no_decay", 0.0)]
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name
        assert id(parameter) in groups["no_decay" if exempt else "decay"], name
    assert sum(map(len, groups.values())) == len(list(model.parameters()))


def test_layer_decay_falls_towards_the_input():
    model = tiny()
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


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_optimizers_of_whole_layers_are_refused_under_zero(name):
    config = OptimizerConfig(name=name)
    check_optimizer(config, zero_stage=0, offload=False)
    with pytest.raises(ConfigError, match=f"{name} looks at whole layers, and ZeRO stage 2"):
        check_optimizer(config, zero_stage=2, offload=False)


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


@pytest.mark.parametrize("policy", ["full", "every:2", "ops", "offload"])
@pytest.mark.parametrize("name", ["tiny", "resnet", "timm"])
def test_checkpointing_gives_the_same_gradient_and_statistics(policy, name):
    """Patch dropout and batch norm included: random numbers are replayed, running statistics updated once."""
    config = {"tiny": TINY, "resnet": TINY_RESNET, "timm": TINY_TIMM}[name]
    dropout = 0.5 if name == "tiny" else None
    results, batch = [], tiny_batch(4)
    for chosen in ("none", policy):
        model = build_model(
            ModelConfig(name=name, config=config, checkpointing=chosen, patch_dropout=dropout), 0
        ).train()
        torch.manual_seed(1)
        out = model(*batch)
        (out.image_features * out.text_features).sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers()))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_needs_blocks():
    with pytest.raises(ConfigError, match="no blocks were recognised in the image tower"):
        apply_policy({"image": [torch.nn.Linear(2, 2)]}, "full")


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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "ViT-B32"}, ["ViT-B32", "'ViT-B-32'"]),
        ({"name": "none.json"}, ["none.json", "cannot be read"]),
        ({"name": "t", "config": {"embed_dim": 3}}, ["model.config", "vision_cfg"]),
        ({"name": "coca_ViT-B-32"}, ["CoCa"]),
        ({"name": "RN50", "pretrained": "no-such-tag"}, ["RN50", "no-such-tag"]),
        ({"name": "convnext_base", "patch_dropout": 0.5}, ["patch_dropout", "timm"]),
    ],
)
def test_named_errors(config, words):
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(**config), seed=0)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_json_file_is_a_model(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(TINY))
    config = ModelConfig(name=str(path))
    model = build_model(config, seed=0)
    tokens = build_tokenizer(config)(["a cat", "a longer caption " * 20])
    assert tokens.shape == (2, TINY["text_cfg"]["context_length"])
    size = TINY["vision_cfg"]["image_size"]
    from PIL import Image

    for training in (True, False):
        transform = build_transform(model, training=training)
        assert transform(Image.new("RGB", (50, 70))).shape == (3, size, size)


@pytest.mark.parametrize("kind", ["cosine", "constant", "cooldown"])
def test_schedules(kind):
    config = ScheduleConfig(kind=kind, warmup_samples=95, cooldown_steps=20, lr_end=0.1)
    lr = build_schedule(config, peak=1.0, steps=100, global_batch=10)
    values = [lr(step) for step in range(101)]
    assert lr.warmup == 10  # 95 samples are ten steps of ten
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[10] == 1.0
    assert all(0.1 <= value <= 1.0 for value in values)
    if kind == "cosine":
        assert values[55] == pytest.approx(0.55)
        assert values[100] == pytest.approx(0.1)
    if kind == "constant":
        assert set(values[10:]) == {1.0}
    if kind == "cooldown":
        assert set(values[10:81]) == {1.0}
        assert values[90] == pytest.approx(0.55)
        assert values[100] == pytest.approx(0.1)


def test_schedule_defaults():
    lr = build_schedule(ScheduleConfig(), peak=1.0, steps=101, global_batch=10)
    assert (lr.warmup, lr.cooldown) == (11, 20)
    assert build_schedule(ScheduleConfig(), peak=1.0, steps=10**6, global_batch=10).warmup == 2000
    assert build_schedule(ScheduleConfig(warmup_steps=0), peak=1.0, steps=5, global_batch=1)(0) == 1.0
