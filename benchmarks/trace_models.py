"""Trace the models of the planner's shipped table anew; minutes a large model, without a GPU.

    python benchmarks/trace_models.py
    python benchmarks/trace_models.py --models ViT-B-32 RN50 --out some.json

A model that cannot be built here is left out, with a message.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import TABLE, Coefficients
from disco_ds.planner.models import ModelSource, to_stderr

MODELS = (
    "ViT-S-32", "ViT-S-16", "ViT-M-32", "ViT-M-16", "ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-16", "ViT-B-16-plus-240",
    "ViT-L-14", "ViT-L-14-336", "ViT-H-14", "ViT-g-14", "ViT-bigG-14", "RN50", "RN101", "RN50x4", "convnext_base",
    "convnext_base_w", "convnext_large_d", "ViT-B-16-SigLIP", "ViT-L-16-SigLIP-256", "ViT-SO400M-14-SigLIP",
    "MobileCLIP-S1", "MobileCLIP-B", "EVA02-B-16", "EVA02-L-14", "ViTamin-S", "ViTamin-B", "ViTamin-L",
    "coca_ViT-B-32", "coca_ViT-L-14",
)  # fmt: skip
TRACES = tuple(
    (precision, checkpointing, "flash")
    for precision in ("bf16", "amp")
    for checkpointing in ("none", "full", "every:2", "ops")
)

MATH = ("ViT-B-32", "ViT-B-16", "ViT-B-16-plus-240", "ViT-L-14")
"""Also traced with the attention of torch before 2.0, under amp: the published runs of 2021 and 2022 were made so."""


def traced(name: str) -> Coefficients | None:
    """A model with all its traces; None if it cannot be built."""
    source = ModelSource(name)
    source.known = None
    extra = [("amp", "none", "math"), ("amp", "full", "math")] if name in MATH else []
    try:
        for wanted in [*TRACES, *extra]:
            source.get(*wanted)
    except (ConfigError, RuntimeError, ValueError) as error:
        to_stderr(f"{name}: left out: {error}")
        return None
    return source.known


def write_table(models: Iterable[Coefficients], versions: dict[str, str], self_check: dict[str, list[int]], path: Path):
    """Write the table, one model a line, sorted by name; ``self_check`` are the probe's figures."""
    lines = [
        f"{json.dumps(model.name)}: {json.dumps(model.to_json(), separators=(',', ':'))}"
        for model in sorted(models, key=lambda model: model.name)
    ]
    head = json.dumps({"version": 2, "made_with": versions, "self_check": self_check})[:-1]
    path.write_text(f'{head}, "models": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    import open_clip
    import torch

    from disco_ds.planner.tracing.selfcheck import cuda_figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--out", type=Path, default=TABLE, metavar="FILE", help="default: the shipped table")
    arguments = parser.parse_args()
    made = [model for model in map(traced, arguments.models) if model is not None]
    versions = {"torch": torch.__version__, "open_clip": open_clip.__version__}
    write_table(made, versions, cuda_figures(), arguments.out)
    print(f"{len(made)} models in {arguments.out}")
