"""Does tracing still work on this torch? Three comparisons on a model of two layers, in about two seconds.

Fake against real tensors on the CPU: the counting. The Python walk against torch's engine: the order of backward.
Fake CUDA against the shipped table's own figures: attention, autocast, the CUDA forms of the operations.
"""

from __future__ import annotations

import torch

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import table
from disco_ds.planner.tracing.trace import Timeline, build_meta, free_loss, trace

PROBE = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 96, "width": 64, "heads": 2, "layers": 2},
}
BATCH = 64
CASES = (("bf16", "none"), ("amp", "none"), ("amp", "full"), ("bf16", "ops"))


class TraceError(ConfigError):
    """Tracing gives other figures than it has to; the message says which, and with which torch."""


def probe(checkpointing: str = "none") -> ModelConfig:
    """The model of two layers."""
    return ModelConfig(name="probe", config=PROBE, checkpointing=checkpointing)


def cuda_figures() -> dict[str, list[int]]:
    """A(64) and E(64) of the probe on fake CUDA for each case: what the shipped table keeps."""
    figures = {}
    for precision, checkpointing in CASES:
        _, found = trace(probe(checkpointing), precision)
        figures[f"{precision}/{checkpointing}"] = [found.peak(BATCH), found.end(BATCH)]
    return figures


def real_peak(config: ModelConfig, batch: int) -> int:
    """Bytes of activations at the highest moment of a real step on the CPU in fp32, the batch included."""
    model = build_meta(config).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.clip.logit_scale = torch.zeros(())
    live = Timeline(batch, "cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        live.count(tensor, "states")
    size = PROBE["vision_cfg"]["image_size"]  # type: ignore[index]
    images, texts = torch.randn(batch, 3, size, size), torch.ones(batch, model.clip.context_length, dtype=torch.long)
    for tensor in (images, texts):
        live.count(tensor, "input")
    with live.gradients_of(model), live:
        free_loss(model(images, texts)).backward()
    return max((p.per_pair + p.input) * batch + p.fixed for p in live.points)


def counting() -> float:
    """Largest relative difference of bytes on fake and on real tensors, on the CPU."""

    def error(config: ModelConfig) -> float:
        sizes, fake = trace(config, "fp32", device="cpu")
        return abs(fake.peak(BATCH, sizes.input_bytes) / real_peak(config, BATCH) - 1)

    return max(error(probe("none")), error(probe("full")))


def order() -> float:
    """... of the Python walk and torch's own engine."""

    def error(config: ModelConfig) -> float:
        own, walked = (trace(config, "fp32", device="cpu", walk=walk)[1].peak(BATCH, 0) for walk in (False, True))
        return abs(walked / own - 1)

    return max(error(probe("none")), error(probe("full")))


def cuda() -> float:
    """... of fake CUDA here and where the shipped table was made."""
    expected = table().get("self_check", {})
    found = (
        (now, before)
        for case, figures in cuda_figures().items()
        for now, before in zip(figures, expected.get(case, figures), strict=True)
    )
    return max(abs(now / before - 1) for now, before in found)


CHECKS = {"counting": (counting, 0.002), "order": (order, 0.01), "cuda": (cuda, 0.01)}
"""The three comparisons, each with what it may be off."""


def self_check() -> dict[str, float]:
    """Run the three comparisons.

    Returns:
        The largest relative difference of each.

    Raises:
        TraceError: one is beyond its tolerance.
    """
    found = {name: check() for name, (check, _) in CHECKS.items()}
    wrong = [
        f"{name} {value:.1%} (at most {CHECKS[name][1]:.1%})"
        for name, value in found.items()
        if value > CHECKS[name][1]
    ]
    if wrong:
        raise TraceError(
            f"tracing does not work as it should with torch {torch.__version__}: {', '.join(wrong)}. The shipped table "
            f"was made with torch {table().get('made_with', {}).get('torch', '?')} and still holds for its models"
        )
    return found
