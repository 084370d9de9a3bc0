"""Names, JSON files and mistakes in them."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.build import build_model
from disco_ds.model.preprocess import build_tokenizer, build_transform
from tests.helpers.tiny import TINY


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
    for training in (True, False):
        transform = build_transform(model, training=training)
        assert transform(Image.new("RGB", (50, 70))).shape == (3, size, size)
