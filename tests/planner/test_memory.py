"""The planner's terms: closed forms, partitions, buckets, devices, and what has to hold for every plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_ds.errors import ConfigError
from disco_ds.planner import plan
from disco_ds.planner.coefficients import Coefficients, Point, Trace, from_json, shipped, table, thin
from disco_ds.planner.devices import DEVICES, device_named, device_with
from disco_ds.planner.memory import CATEGORIES, Setup, predict
from disco_ds.planner.models import ModelSource
from disco_ds.planner.partitions import Held, full_buckets, owned_gradients
from disco_ds.planner.search import Planner, Request, cuts
from disco_ds.planner.text import settings_table

DOZEN = (
    "ViT-B-32", "ViT-B-16", "ViT-S-32", "ViT-M-32", "ViT-L-14", "ViT-H-14", "ViT-bigG-14", "RN50", "RN101",
    "convnext_base", "ViT-B-16-SigLIP", "MobileCLIP-B",
)  # fmt: skip
GPUS = (8, 64, 256, 1024)
MEMORY = ("24G", "40G", "80G", "141G")


def silent(_):
    raise AssertionError("a shipped model was traced")


def small(points, **changes):
    entry = {
        "name": "m", "parameters": 100, "image_parameters": 60, "largest": 30, "matrices": [30, 30, 30], "vectors": 10,
        "arrivals": [30, 10, 30, 30], "buffer_bytes": 0, "embed_dim": 4, "image_size": [2, 2], "context_length": 1,
    }  # fmt: skip
    trace = Trace(points, 5, 0, 0, 4, 1000)
    return Coefficients(**{**entry, **changes}, traces={"bf16/none": trace, "fp32/none": trace})


def test_the_shipped_table_has_the_models_and_versions():
    names = set(table()["models"])
    assert len(names) >= 25
    assert set(DOZEN) <= names
    assert set(table()["made_with"]) == {"torch", "open_clip"}
    for name in names:
        model = shipped(name)
        assert {"bf16/none", "bf16/full", "amp/none", "amp/full"} <= set(model.traces)
        assert sum(abs(size) for size in model.arrivals) == model.parameters == sum(model.matrices) + model.vectors
        assert from_json(model.to_json()) == model


def test_the_peak_is_the_highest_of_its_points_and_its_categories_are_its_sum():
    model = small([Point(10, 100, 0, 0, 3), Point(50, 0, 40, 60, 2)])
    held = predict(model, Setup(gpus=1, zero=0, precision="fp32", images_on_device=True), 16)
    assert held.moments["forward and backward"].bytes["activations"] == (50 + model.input_bytes) * 16
    prediction = predict(model, Setup(gpus=1, zero=0, precision="fp32"), 16)
    forward = prediction.moments["forward and backward"].bytes
    assert forward["activations"] == (50 + 2) * 16
    assert forward["gradients"] == 4 * 60
    assert forward["parameters"] == 400
    assert forward["optimizer"] == 800
    assert tuple(prediction.peak.bytes) == CATEGORIES
    assert prediction.peak_bytes == sum(prediction.peak.bytes.values())
    assert prediction.peak_bytes == max(moment.total for moment in prediction.moments.values())


def test_states_are_deepspeeds_estimate_and_what_it_leaves_out():
    """DeepSpeed's estimate_zero2 counts 2P + 18P/N; for a moment the flat gradient is there in bf16 and fp32 (2P/N)."""
    model = shipped("ViT-B-32")
    for gpus in (8, 64):
        optimizer = predict(model, Setup(gpus=gpus, zero=2, precision="bf16"), 1).moments["optimizer"]
        share = model.parameters / gpus
        kept_whole = 2 * (owned_gradients(model, gpus) - share)  # parameters that a partition's edge goes through
        assert optimizer.total - kept_whole == pytest.approx(2 * model.parameters + (18 + 2) * share, rel=0.005)


def test_a_parameter_that_a_cut_goes_through_is_kept_on_both_sides():
    model = small([Point(1, 1, 0, 0, 0)])
    assert owned_gradients(model, 1) == 100
    assert owned_gradients(model, 2) == 60 + 5  # cut at 45, through the second of three
    assert owned_gradients(model, 90) == 30 + 1


def test_a_full_bucket_is_reduced_before_the_gradient_that_does_not_fit():
    model = small([Point(1, 1, 0, 0, 0)])
    assert full_buckets(model, 45, "fp32") == ([(40, Held(0, 40)), (70, Held(0, 30))], Held(0, 30))
    assert full_buckets(model, 100, "fp32") == ([], Held(0, 100))
    low = small([Point(1, 1, 0, 0, 0)], arrivals=[-30, 10, -30, 30])
    assert full_buckets(low, 45, "amp") == ([(40, Held(30, 0))], Held(30, 40))


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 5000), st.integers(0, 100), st.sampled_from([0, 7, 40])),
        min_size=1,
    ),
    st.integers(1, 300),
    st.integers(0, 12),
)
def test_thinning_never_lowers_the_peak(rows, batch, price):
    points = [Point(slope, fixed, done, done, alive) for slope, fixed, done, alive in rows]
    kept = thin(points, 100)

    def highest(those, gradient):
        return max(p.per_pair * batch + p.fixed + price * gradient(p) + batch * p.input for p in those)

    for gradient in (lambda p: p.gradients_max, lambda p: 100 - p.gradients):
        assert highest(kept, gradient) >= highest(points, gradient)
    assert highest(kept, lambda p: 0) == highest(points, lambda p: 0)


def test_sizes_are_those_a_device_is_sold_with():
    assert device_with("40G").usable_gib == 39.39
    assert device_with("39.4GiB").usable_gib == 39.4
    assert device_named("a100-80g") is DEVICES["A100-80G"]
    sizes = [device_with(f"{size}G").usable_gib for size in range(1, 200)]
    assert sizes == sorted(sizes)
    for wrong in ("40M", "G", "-3G", "0"):
        with pytest.raises(ConfigError, match="--mem"):
            device_with(wrong)
    with pytest.raises(ConfigError, match="A100-40G"):
        device_named("A100-40")


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DOZEN), st.integers(0, 3), st.sampled_from(("none", "full", "ops", "every:2")),
    st.sampled_from(("bf16", "amp")), st.sampled_from(("one_block", "disco", "open_clip", "clip", "sigmoid")),
    st.sampled_from(GPUS), st.integers(8, 200), st.sampled_from((None, 16, 64)),
)  # fmt: skip
def test_no_plan_that_fits_is_over_the_device(name, zero, policy, precision, loss, gpus, size, micro):
    request = Request(
        gpus=gpus, gpu=device_with(f"{size}G"), zero=zero, checkpointing=policy, precision=precision, loss=loss,
        micro_batch=micro,
    )  # fmt: skip
    planner = Planner(ModelSource(name, silent))
    best = planner.largest(request)
    if best.fits:
        for moment in best.prediction.moments.values():
            assert sum(moment.bytes.values()) <= request.limit_bytes
            assert min(moment.bytes.values()) >= 0
        again = planner.predict(best.setup, best.prediction.per_gpu_batch, best.prediction.micro_batch)
        assert again.peak_bytes == best.prediction.peak_bytes
        # and it is the largest: eight pairs, or one micro-batch, more do not fit
        more = best.prediction.per_gpu_batch + (micro or 8)
        assert planner.predict(best.setup, more, micro or more).peak_bytes > request.limit_bytes


@pytest.mark.parametrize("name", DOZEN)
def test_more_memory_more_gpus_or_less_precision_never_lower_the_batch(name):
    source = ModelSource(name, silent)
    reached = {}
    for gpus, mem, precision in itertools.product(GPUS, MEMORY, ("bf16", "amp")):
        request = Request(gpus=gpus, gpu=device_with(mem), precision=precision, min_micro_batch=1)
        best = Planner(source).best(request)
        reached[gpus, mem, precision] = best.global_batch if best.fits else 0
    for (gpus, mem, precision), batch in reached.items():
        for other in GPUS[GPUS.index(gpus) + 1 :]:
            assert reached[other, mem, precision] >= batch
        for other in MEMORY[MEMORY.index(mem) + 1 :]:
            assert reached[gpus, other, precision] >= batch
        if precision == "amp":
            assert reached[gpus, mem, "bf16"] >= batch


def test_a_given_batch_gets_settings_that_fit_with_the_least_estimated_time():
    request = Request(gpus=8, gpu=device_with("40G"), global_batch=32768, precision="amp")
    planner = Planner(ModelSource("ViT-B-32", silent))
    best = planner.best(request)
    assert best.fits
    assert best.global_batch == 32768
    for setup in planner.setups(request):
        for micro in (4096, 2048, 1024, 512):
            other = planner.plan(request, setup, 4096, micro)
            assert not other.fits or other.step_s >= best.step_s
    whole = planner.best(replace(request, micro_batch=4096, checkpointing="none"))
    assert not whole.fits


def test_the_python_call_is_the_same_and_says_what_is_wrong():
    best = plan(gpus=64, mem="40G", precision="amp", loss="disco", frag=1.0)
    assert best.fits
    assert best.setup.checkpointing == "full"
    with pytest.raises(ConfigError, match="mem"):
        plan(gpus=8)
    with pytest.raises(ConfigError, match="does not divide by --gpus 8"):
        plan(gpus=8, mem="40G", global_batch=1001)
    with pytest.raises(ConfigError, match="--micro-batch 3"):
        plan(gpus=1, mem="40G", per_gpu_batch=16, micro_batch=3)


def test_cached_gradients_take_the_memory_of_a_micro_batch():
    model = shipped("ViT-L-14")
    setup = Setup(gpus=8, zero=2, precision="bf16")
    whole, cached = predict(model, setup, 1024), predict(model, setup, 1024, 128)
    assert cached.accumulation == 8
    assert cached.moments["forward and backward"].total < whole.moments["forward and backward"].total / 3
    with pytest.raises(ValueError, match="cannot be cut"):
        predict(model, setup, 100, 33)


@pytest.mark.parametrize(
    ("option", "moment", "added"),
    [
        ({"keep_logits": True}, "loss", 4 * 4096 * 8 * 4096 * 0.9),
        ({"tile": 32768}, "loss", 4 * 4096 * 32768),
        ({"reuse_last": True}, "loss", 1 << 30),  # what a micro-batch's forward leaves
        ({"images_on_device": "cached"}, "loss", 4096 * 3 * 224 * 224 * 4),
        ({"reduce_once": False}, "forward and backward", -2 * 50_000_000),  # no whole gradients while it goes on
    ],
)
def test_a_request_hands_on_what_changes_the_memory(option, moment, added):
    planner = Planner(ModelSource("ViT-B-32", silent))
    request = Request(
        gpus=8, gpu=device_with("80G"), global_batch=32768, micro_batch=512, zero=2, checkpointing="none",
        keep_logits=False, tile=256,
    )  # fmt: skip
    before, after = (planner.best(r).prediction.moments[moment].total for r in (request, replace(request, **option)))
    assert (after - before) / added > 0.9, (before, after)
    assert planner.best(replace(request, **option)).setup.checkpointing == "none"


def test_one_reduction_a_step_is_estimated_to_be_faster_than_several():
    planner = Planner(ModelSource("ViT-B-32", silent))
    once = Request(gpus=8, gpu=device_with("80G"), global_batch=32768, micro_batch=512, checkpointing="none")
    for zero in (2, 3):
        request = replace(once, zero=zero)
        assert planner.best(request).step_s < planner.best(replace(request, reduce_once=False)).step_s


def test_images_that_wait_between_two_passes_do_not_wait_where_there_is_one():
    model = shipped("ViT-B-32")
    setups = [Setup(gpus=8, images_on_device=where) for where in (False, "cached", True)]
    whole, cached = ([predict(model, setup, 512, micro).peak_bytes for setup in setups] for micro in (None, 64))
    assert whole[0] == whole[1] < whole[2]
    assert cached[0] < cached[1] == cached[2]


def test_a_number_of_micro_batches_is_kept():
    planner = Planner(ModelSource("ViT-B-32", silent))
    four = Request(gpus=8, gpu=device_with("24G"), accumulation=4)
    largest = planner.best(four)
    assert largest.fits
    assert largest.prediction.accumulation == 4
    more = largest.prediction.micro_batch + 8
    assert planner.predict(largest.setup, 4 * more, more).peak_bytes > four.limit_bytes
    assert planner.best(replace(four, global_batch=32 * 64)).prediction.micro_batch == 64
    assert planner.best(replace(four, micro_batch=32)).global_batch == 32 * 4 * 8
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 4; nearest that do: 128 and 132"):
        planner.best(replace(four, per_gpu_batch=130))
    with pytest.raises(ConfigError, match="128 is not --micro-batch 16 x gradient_accumulation_steps 4 = 64"):
        planner.best(replace(four, per_gpu_batch=128, micro_batch=16))


def test_a_batch_is_cut_by_its_divisors_from_the_whole_down():
    request = Request(gpus=2, gpu=device_with("24G"), global_batch=400, min_micro_batch=30)
    assert [(cut.micro_batch, cut.accumulation) for cut in cuts(request)] == [(200, 1), (100, 2), (50, 4), (40, 5)]
    assert [cut.micro_batch for cut in cuts(replace(request, min_micro_batch=1000))] == [200]
    assert [cut.accumulation for cut in cuts(replace(request, micro_batch=10))] == [20]


def test_offload_leaves_the_stages_that_there_are():
    planner = Planner(ModelSource("ViT-B-32", silent))
    for offload, columns in (("none", "0123"), ("optimizer", "123"), ("all", "3")):
        for batch in (None, 4096):
            request = Request(gpus=8, gpu=device_with("24G"), offload=offload, global_batch=batch)
            head, row = settings_table(planner, request).splitlines()[1:3]
            assert [word for word in head.split() if word.isdigit()] == list(columns)
            assert len(row.split()) == 2 + len(columns)
            assert batch is None or planner.best(request).fits
    for wrong in ({"zero": 0, "offload": "optimizer"}, {"zero": 2, "offload": "all"}, {"offload": "some"}, {"zero": 4}):
        with pytest.raises(ConfigError, match="--offload" if "offload" in wrong else "--zero"):
            plan(gpus=8, mem="24G", **wrong)
