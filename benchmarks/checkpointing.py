"""Peak live bytes and time of a step under each activation checkpointing policy, on one CPU process.

    python benchmarks/checkpointing.py --model ViT-B-32 --batch 16

Counted are the bytes that operations return and that are alive at the same time, above weights and inputs, through
forward, loss and backward. Time is the least of the rounds, as a ratio to no checkpointing, policies taking turns.
(``offload`` moves what a block keeps to host memory; on a CPU it is there already, so it shows nothing here.)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
POLICIES = ("none", "every:3", "every:2", "ops", "full")


def build(name, policy):
    """The model of one policy."""
    from disco_ds.config.schema import ModelConfig
    from disco_ds.model.build import build_model

    return build_model(ModelConfig(name=name, checkpointing=policy), seed=0).train()


def step(model, images, texts):
    """One forward and backward."""
    from disco_ds.loss.contrastive import contrastive_loss

    out = model(images, texts)
    contrastive_loss(out.image_features, out.text_features, out.logit_scale).backward()
    for parameter in model.parameters():
        parameter.grad = None


def main():
    """Measure every policy and print the table."""
    from tests.helpers.live_bytes import LiveBytes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {policy: build(arguments.model, policy) for policy in POLICIES}
    size = models["none"].clip.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(arguments.batch, 3, height, width)
    texts = torch.randint(1, 1000, (arguments.batch, models["none"].clip.context_length))
    peaks, times = {}, {policy: [] for policy in POLICIES}
    for policy, model in models.items():
        with LiveBytes(images, texts) as live:
            step(model, images, texts)
        peaks[policy] = live.peak / 2**20
    for _ in range(arguments.rounds):
        for policy, model in models.items():
            start = time.perf_counter()
            step(model, images, texts)
            times[policy].append(time.perf_counter() - start)
    print(f"{arguments.model}, batch {arguments.batch}, fp32, one thread")
    print("| policy | peak MiB | of none | time of none |\n|---|---|---|---|")
    for policy in POLICIES:
        ratio = min(times[policy]) / min(times["none"])
        print(f"| {policy} | {peaks[policy]:.0f} | {peaks[policy] / peaks['none']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
