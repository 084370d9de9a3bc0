"""The planner inside a run: what "auto" becomes, and the measurement beside the plan."""

from __future__ import annotations

import pytest
import torch

from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_config import resolve
from disco_ds.errors import ConfigError
from disco_ds.planner.auto import fill_auto
from disco_ds.planner.coefficients import shipped
from disco_ds.planner.compare import Measured, beside_plan, predict_run
from disco_ds.planner.from_ds_config import planned_buckets
from disco_ds.planner.memory import Setup, predict
from disco_ds.planner.tracing.selfcheck import PROBE

CPU = torch.device("cpu")
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
}


def filled(content=AUTO, source="test", **changes):
    fields = {"steps": 1, "data": {"train": "unused"}, "model": {"name": "probe", "config": PROBE}, **changes}
    return fill_auto(RunConfig(**fields), content, world_size=2, device=CPU, source=source, progress=lambda _: None)


def resolved(config, content):
    return resolve(config, content, world_size=2, on_gpu=False, source="test")


def predicted(config, content):
    return predict_run(config, resolved(config, content), device=CPU, progress=lambda _: None)


def test_auto_is_filled_and_what_is_given_stays():
    config, content, plan = filled(global_batch=256)
    assert plan.fits
    assert config.global_batch == content["train_batch_size"] == 256
    assert config.micro_batch * content["gradient_accumulation_steps"] == 128
    assert content["zero_optimization"]["stage"] == 2
    assert content["zero_optimization"]["reduce_bucket_size"] <= plan.prediction.setup.gpus * 1_000_000
    assert config.precision == "fp32"  # on a CPU
    assert AUTO["train_batch_size"] == "auto"
    assert resolved(config, content).batch.per_rank == 128
    assert predicted(config, content).peak_bytes == plan.prediction.peak_bytes


def test_an_open_batch_becomes_the_largest_and_a_policy_that_is_given_stays():
    model = {"name": "probe", "config": PROBE, "checkpointing": "full"}
    config, content, plan = filled(model=model)
    assert config.model.checkpointing == "full"
    assert config.global_batch == plan.global_batch == content["train_batch_size"]
    assert plan.global_batch >= 16
    with pytest.raises(ConfigError, match="does not fit"):
        filled(global_batch=1 << 30, micro_batch=1 << 29)


def test_a_default_is_not_given_after_filling():
    """A ds_config may differ from a default, and not from what was given."""
    content = {**AUTO, "gradient_clipping": 0.5}
    assert resolved(*filled(content, global_batch=64)[:2]).deepspeed["gradient_clipping"] == 0.5
    config, planned, _ = filled(content, global_batch=64, optimizer={"clip_norm": 2.0})
    with pytest.raises(ConfigError, match=r"clip_norm is 2\.0"):
        resolved(config, planned)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"keep_logits": True}},
        {"loss": {"keep_logits": False, "tile": 64}},
        {"micro_batch": 512, "cached": {"reduce": "each"}},
        {"micro_batch": 512, "cached": {"images": "device"}},
        {"micro_batch": 512, "cached": {"reuse_last": True}},
    ],
)
def test_options_of_loss_and_cached_form_are_counted_as_in_the_run_that_follows(changes):
    config, content, plan = filled(global_batch=4096, **changes)
    assert predicted(config, content).moments == plan.prediction.moments


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}, {"stage": 2, "reduce_bucket_size": 123457}])
def test_keys_that_a_ds_config_leaves_out_are_planned_as_they_are_filled_in(zero):
    content = {"zero_optimization": zero}
    config, planned, plan = filled(content, global_batch=64)
    assert predicted(config, planned).peak.bytes == plan.prediction.peak.bytes
    # and on a GPU, where "auto" overlaps, the same buckets
    model = shipped("ViT-B-32")
    planned = planned_buckets(content, model, "cuda", absent="auto")
    assert planned.overlap
    assert planned.reduce == zero.get("reduce_bucket_size", planned.reduce) <= model.parameters + 1


def test_kept_logits_make_the_largest_batch_smaller():
    found = {keep: filled(loss={"keep_logits": keep})[2] for keep in (False, True)}
    assert found[True].global_batch < found[False].global_batch
    assert found[True].prediction.moments["loss"].bytes["loss"] > 4 * 2 * found[True].prediction.per_gpu_batch ** 2


def test_an_accumulation_of_the_ds_config_is_honoured_or_refused():
    content = {**AUTO, "gradient_accumulation_steps": 4}
    for changes in ({"global_batch": 256}, {"micro_batch": 16}, {}):
        config, planned, plan = filled(content, **changes)
        batch = resolved(config, planned).batch
        assert batch.accumulation == plan.prediction.accumulation == 4, changes
        assert batch.micro_batch == config.micro_batch == changes.get("micro_batch", config.micro_batch)
        assert batch.global_batch == changes.get("global_batch", 8 * config.micro_batch)
    with pytest.raises(ConfigError, match="global batch 100 does not divide by 2 ranks x gradient_accumulation_steps"):
        filled(content, global_batch=100)
    with pytest.raises(ConfigError, match=r'write "auto" for one of them in mine\.json'):
        filled(content, source="mine.json", global_batch=256, micro_batch=64)


def test_a_measurement_beside_the_plan_warns_above_five_per_cent():
    prediction = predict(shipped("ViT-B-32"), Setup(gpus=8, zero=2, runtime_bytes=1 << 30, fragmentation=1.1), 256)
    planned = prediction.peak_bytes - (1 << 30) - prediction.peak.bytes["fragmentation"]
    line, warning = beside_plan(
        prediction, Measured(int(planned * 1.03), int(planned * 1.2), {"parameters": 303 << 20})
    )
    assert warning is None
    assert "+3.0%" in line
    assert "parameters" in line
    line, warning = beside_plan(prediction, Measured(int(planned * 1.08), int(planned * 1.2), {}))
    assert "8.0% more memory than planned" in warning
    assert "less" in beside_plan(prediction, Measured(int(planned * 0.9), planned, {}))[1]
