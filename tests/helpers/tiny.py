"""A two-tower model that steps in milliseconds, and batches for it."""

from __future__ import annotations

import torch

TINY = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
"""An open_clip model with open_clip's own vocabulary, so that real captions can be fed to it."""

TINY_RESNET = {**TINY, "vision_cfg": {"layers": [1, 1, 1, 1], "width": 16, "image_size": 32, "patch_size": None}}
"""The same text tower with open_clip's own ResNet, which has batch norms."""

TINY_TIMM = {
    **TINY,
    "vision_cfg": {"timm_model_name": "test_convnext2", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32},
}
"""The same text tower with a timm trunk; its blocks own parameters directly (layer scale)."""

TINY_VOCAB = {**TINY, "text_cfg": {**TINY["text_cfg"], "vocab_size": 100}}
"""The same with 100 tokens, for tests that make up their tokens."""


def tiny_batch(count: int, seed: int | None = None, vocab: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` random images (count, 3, 32, 32) and texts (count, 16); the last token is the end of text."""
    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else seed)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    texts = torch.randint(1, vocab - 2, (count, 16), generator=generator)
    texts[:, -1] = vocab - 1
    return images, texts
