"""Tracing: reference coefficients, the walk, fake CUDA and CPU, every policy, a self-check that fails loudly."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from benchmarks.trace_models import write_table
from disco_ds.cli.plan import main
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.towers import Features, TwoTowers
from disco_ds.planner import coefficients as table_module
from disco_ds.planner import plan
from disco_ds.planner.coefficients import shipped
from disco_ds.planner.models import ModelSource
from disco_ds.planner.tracing import fake_cuda, selfcheck
from disco_ds.planner.tracing.trace import trace

MIB = 2**20
REFERENCE = [  # A and E in MiB, slope and intercept, of an independent tracer: amp; full checkpointing; bf16 the same
    ("ViT-B-32", "amp", "none", (34.81, 241), None),
    ("ViT-B-32", "amp", "full", (5.72, 13), (4.07, 6)),
    ("ViT-B-32", "bf16", "full", (3.87, 2), None),
    ("RN50", "amp", "none", (66.0, 147), None),
]


def affine(bytes_of):
    low, high = bytes_of(2000) / MIB, bytes_of(4000) / MIB
    return (high - low) / 2000, 2 * low - high


def image_first(self, images=None, texts=None):
    """open_clip's own order of the towers, in which the reference was traced; the project encodes texts first."""
    out = self.clip(images.to(next(self.clip.visual.parameters()).dtype), texts)
    return Features(out[0], out[1], self._exact("logit_scale", self.logit_scale).exp(), None)


@pytest.mark.parametrize(("name", "precision", "policy", "peak", "end"), REFERENCE)
def test_reference_coefficients(monkeypatch, name, precision, policy, peak, end):
    monkeypatch.setattr(TwoTowers, "forward", image_first)
    sizes, found = trace(ModelConfig(name=name, checkpointing=policy), precision)
    image = 3 * 224 * 224 * 4
    # the reference was given its images in the weights' type, and kept no second copy of them
    held = sizes.input_bytes - (image if precision == "bf16" else 0)
    slope, fixed = affine(lambda b: found.peak(b, held))
    assert slope == pytest.approx(peak[0], rel=0.01)
    assert slope * 1000 + fixed == pytest.approx(peak[0] * 1000 + peak[1], rel=0.01)
    if end is not None:
        assert affine(lambda b: found.end(b, held)) == pytest.approx(end, rel=0.01, abs=0.6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("ViT-B-16", 82.5), ("ViT-L-14", 247.3), ("ViT-B-16-SigLIP", 85.4), ("convnext_base", 140), ("RN50", 66.0),
     ("ViT-B-32-quickgelu", 42.2)],
)  # fmt: skip
def test_shipped_coefficients_without_checkpointing_are_those_of_the_reference(name, peak):
    """The order of the towers moves the peak by less than one per cent here; docs/planner.md has all figures."""
    model = shipped(name)
    found = model.traces["amp/none"]
    assert affine(lambda b: found.peak(b, model.input_bytes))[0] == pytest.approx(peak, rel=0.015)


def test_the_self_check_passes_here():
    found = selfcheck.self_check()
    assert set(found) == {"counting", "order", "cuda"}


@pytest.mark.parametrize("what", ["order", "cuda", "counting"])
def test_the_self_check_fails_loudly(monkeypatch, capsys, what):
    if what == "order":  # a walk that runs nodes as they become ready: all recomputed blocks are alive at once
        ready = itertools.count()
        monkeypatch.setattr(fake_cuda, "_priority", lambda node: next(ready))
    elif what == "cuda":  # attention that keeps its weights, as when fused attention is not chosen
        monkeypatch.setattr(fake_cuda, "_fused_attention", fake_cuda._math_attention)
    else:  # operations that are not seen
        monkeypatch.setattr(selfcheck, "real_peak", lambda config, batch: 123_456_789)
    monkeypatch.setattr(selfcheck, "CHECKS", {what: selfcheck.CHECKS[what]})
    assert main(["trace", "ViT-B-32"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"tracing does not work as it should with torch {torch.__version__}" in captured.err
    assert f"{what} " in captured.err


def test_an_answer_that_needs_a_trace_is_given_after_the_self_check_only(monkeypatch, capsys):
    before = torch.get_rng_state()
    monkeypatch.setattr(selfcheck, "CHECKS", {"counting": selfcheck.CHECKS["counting"]})  # which draws weights
    assert plan(gpus=2, mem="24G", model="small", model_config=selfcheck.PROBE, checkpointing="none").fits
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().err.count("self-check first") == 1
    monkeypatch.setattr(selfcheck, "real_peak", lambda config, batch: 123_456_789)
    assert main(["--gpus", "2", "--mem", "24G", "--model", "ViT-B-32", "--precision", "fp32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("disco-plan: tracing does not work as it should with torch")
    with pytest.raises(ConfigError, match="tracing does not work"):
        plan(gpus=2, mem="24G", model="small", model_config=selfcheck.PROBE)
    assert main(["--gpus", "2", "--mem", "24G"]) == 0  # the shipped table holds


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "amp", "fp32"])
def test_policies_are_ordered_and_reach_every_gradient(device, precision):
    peaks = {}
    for policy in ("none", "every:2", "ops", "full", "offload"):
        sizes, found = trace(selfcheck.probe(policy), precision, device=device)
        peaks[policy] = found.peak(256)
        assert max(p.gradients_max for p in found.points) <= sizes.parameters
        assert sum(abs(size) for size in sizes.arrivals) == sizes.parameters
        assert found.forward_flops > 0
        assert found.peak(512) > found.peak(256) > found.end(256) > 0 or policy in ("full", "offload")
    assert peaks["full"] < peaks["every:2"] < peaks["none"]
    assert peaks["full"] <= peaks["ops"] < peaks["none"]
    if device == "cuda":
        assert peaks["offload"] < peaks["none"]  # on a CPU there is nowhere to go
    else:
        assert peaks["offload"] == peaks["none"]


def test_one_pass_is_exact_for_every_batch(monkeypatch):
    from disco_ds.planner.tracing import trace as trace_module

    one = trace(selfcheck.probe("full"), "amp")[1]
    monkeypatch.setattr(trace_module, "PRIMES", (1031,))
    two = trace(selfcheck.probe("full"), "amp")[1]
    for batch in (1, 7, 64, 1000, 100_000):
        assert one.peak(batch, 10) == two.peak(batch, 10)
        assert one.end(batch, 10) == two.end(batch, 10)


def test_the_cpu_fallback_is_close_to_fake_cuda():
    """In bf16 within a tenth on two layers: attention differs in what it saves."""
    config = selfcheck.probe()
    assert trace(config, "bf16", device="cpu")[1].peak(256) == pytest.approx(
        trace(config, "bf16")[1].peak(256), rel=0.1
    )


def test_tracing_leaves_torch_as_it_was():
    def state():
        return (torch.nn.functional.scaled_dot_product_attention, torch.cuda.is_bf16_supported,
                torch._C._current_graph_task_id, torch.is_autocast_enabled("cuda"))  # fmt: skip

    before = state()
    trace(selfcheck.probe("full"), "amp")
    assert state() == before


def test_a_model_that_is_not_in_the_table_is_traced_and_says_so(tmp_path, capsys, unchecked):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(selfcheck.PROBE))
    assert main(["--gpus", "2", "--mem", "24G", "--model", str(path), "--precision", "fp32"]) == 0
    captured = capsys.readouterr()
    assert "largest batch" in captured.out.splitlines()[0]
    assert captured.err.count("tracing") == captured.err.count("traced in") == 2  # none and full
    assert main(["trace", str(path), "--no-self-check", "--image-size", "64", "--checkpointing", "full"]) == 0
    assert "A = " in capsys.readouterr().out


def test_what_cannot_be_traced_says_why():
    with pytest.raises(ConfigError, match="no model 'ViT-B-33'"):
        ModelSource("ViT-B-33", lambda _: None).get("bf16", "none")
    with pytest.raises(ConfigError, match="could not build"):
        ModelSource("roberta-ViT-B-32", lambda _: None).get("bf16", "none")


def test_a_table_is_written_and_read_back(tmp_path, monkeypatch):
    model = ModelSource("small", lambda _: None, {"config": selfcheck.PROBE}).get("amp", "full")
    path = tmp_path / "coefficients.json"
    write_table([model], {"torch": "0", "open_clip": "0"}, {}, path)
    monkeypatch.setattr(table_module, "TABLE", path)
    table_module.table.cache_clear()
    try:
        assert shipped("small") == model
        assert shipped("other") is None
    finally:
        monkeypatch.undo()
        table_module.table.cache_clear()
