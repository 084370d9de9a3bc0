"""Checkpoints of release 0.1 are resumed from, on the ranks that saved them and on others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import build
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.saved_runs import STEP, probe

pytestmark = pytest.mark.ranks
SAVED = ROOT / "tests" / "fixtures" / "saved_0.1"
CASES = {"zero2": (2, "fp32"), "zero3-bf16": (3, "bf16")}


def resumed():
    """Image features, text features and scale by case, after checkpoint and engine have agreed on where they are."""
    import yaml

    from disco_ds.checkpoint.folder import faults, read_manifest
    from disco_ds.checkpoint.save import Identity
    from disco_ds.engine.deepspeed_engine import resume_engine

    given = {}
    for case, (stage, precision) in CASES.items():
        checkpoint = SAVED / case / "checkpoints" / STEP
        assert faults(checkpoint) == []
        model = yaml.safe_load((SAVED / case / "config.yaml").read_text())["model"]["config"]
        engine, _ = build(stage, config=model, precision=precision)
        manifest = read_manifest(checkpoint)
        identity = Identity(dist.get_world_size(), stage, precision, 8, manifest["model"], "adamw")
        state = resume_engine(engine, checkpoint, identity)
        assert (state.step, state.samples_seen, engine.global_steps) == (2, 96, 2)
        engine.eval()
        with torch.no_grad():
            images, texts = probe()
            out = engine(images, texts)
        given[case] = [out.image_features.float().numpy(), out.text_features.float().numpy(), float(out.logit_scale)]
        engine.destroy()
    return given


@pytest.mark.parametrize("ranks", [1, 2])
def test_features_are_those_of_the_run_that_saved(ranks):
    expected = json.loads((SAVED / "features.json").read_text())
    for case, (images, texts, scale) in run_ranks(resumed, ranks)[0].items():
        # bf16: a feature, at most 1, is off by a few roundings of the layers behind it where the CPU's products differ
        within = 1e-6 if CASES[case][1] == "fp32" else 4 * 2**-8
        assert np.abs(images - expected[case]["image"]).max() <= within, case
        assert np.abs(texts - expected[case]["text"]).max() <= within, case
        assert scale == pytest.approx(expected[case]["logit_scale"], rel=1e-6), case
