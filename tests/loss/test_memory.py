"""What the losses hold: the closed form beside what is counted, and the sizes of tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from disco_ds import build_loss
from disco_ds.loss.memory import KEEP_BUDGET_BYTES, default_tile, keeps_logits, loss_bytes
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.loss_reference import leaves

# Peaks of one process; test_ranks.py has those of several.
MEMORY = [
    (256, 64, None, "float32", True, "one_block"),
    (512, 512, 100, "float32", False, "one_block"),
    (512, 512, 100, "float32", True, "one_block"),
    (2500, 96, None, "float32", False, "one_block"),
    (512, 512, 100, "bfloat16", False, "one_block"),
    (512, 256, 128, "float64", False, "one_block"),
    (1024, 32, 64, "float32", False, "one_block"),
    (512, 256, None, "float32", "auto", "sigmoid"),
    (512, 512, 100, "bfloat16", "auto", "sigmoid"),
]


def measure_peaks(cases, ranks=1):
    """What the form says and what is counted, for each case."""
    results = []
    for b, D, tile, dtype, keep, kind in cases:
        image, text, scale = leaves(b, D, "random", 1, getattr(torch, dtype))
        bias = torch.tensor(-10.0, requires_grad=True) if kind == "sigmoid" else None
        loss = build_loss(kind, tile=tile, **({"keep_logits": keep} if kind == "one_block" else {}))
        loss(image, text, scale, bias).backward()
        image.grad = text.grad = scale.grad = None
        counted = []
        for _ in range(3):  # gloo's threads let go of a collective's buffers when they please: the least counts
            with LiveBytes(image, text, scale) as live:
                value = loss(image, text, scale, bias)
                kept = live.now
                value.backward()
            counted.append((live.peak, kept))
            image.grad = text.grad = scale.grad = value = None
        form = loss_bytes(b, b * ranks, D, tile, dtype, keep, kind, device="cpu")
        results.append((form, min(x for x, _ in counted), min(x for _, x in counted)))
    return results


def test_loss_bytes_is_what_is_counted():
    for case, (form, counted, kept) in zip(MEMORY, measure_peaks(MEMORY), strict=True):
        assert form == pytest.approx(counted, rel=0.01), case
        # from forward to backward: two gradients and a few numbers
        assert kept <= 2 * case[0] * case[1] * max(4, getattr(torch, case[3]).itemsize) + 1000, case


def test_sizes_are_chosen_without_torch():
    code = "import sys; import disco_ds.loss.memory as m; m.loss_bytes(8, 64, 4); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert keeps_logits(1024, KEEP_BUDGET_BYTES // 4096)
    assert not keeps_logits(1025, KEEP_BUDGET_BYTES // 4096)
    for b, B, device in ((1, 1, "cpu"), (3072, 196608, "cuda"), (100000, 100000, "cuda"), (4, 9, "cpu")):
        assert 1 <= default_tile(b, B, device) <= B
    with pytest.raises(ValueError, match="ring"):
        loss_bytes(8, 8, 8, kind="ring")
