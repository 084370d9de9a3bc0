"""The gradient of every engine, memory plan and policy against one process with the full batch in plain torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import BATCH, NARROW, build, gradient_error, own_rows, reference_gradients, rounding_error
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_batch

POLICIES = ("none", "full", "every:2", "ops", "offload")


def matrix(seed):
    """Every case of one world size; returns (case, error, worst parameter) of all."""
    from disco_ds.engine.optimizer import set_learning_rate

    images, texts = tiny_batch(BATCH, seed)
    rows = own_rows()
    results = []
    expected = {freeze: reference_gradients(freeze, images, texts)[1] for freeze in ("none", "image")}
    for freeze, policy, stage in itertools.product(("none", "image"), POLICIES, (0, 1, 2, 3)):
        engine, step = build(stage, policy=policy, freeze=freeze)
        set_learning_rate(engine.optimizer, 0.0)  # updates clear the gradient and leave the weights for the next case
        for accumulation in (1, 2, 4):
            step.accumulation = accumulation
            step.backward(images[rows], texts[rows])
            case = (freeze, policy, stage, accumulation)
            results.append((case, *gradient_error(engine, expected[freeze])))
            step.update()
        engine.destroy()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_engine_gives_the_full_batch_gradient(world_size, seed):
    results = run_ranks(matrix, world_size, seed, timeout_s=580)
    assert len(results[0]) == 120
    wrong = [case for case in results[0] if not case[1] <= 2e-5]
    assert not wrong, f"{len(wrong)} of {len(results[0])}: {wrong}"
    assert all(result == results[0] for result in results)  # the engines hold one gradient, whichever rank is asked


def precision_and_models(seed):
    """bf16, autocast, dropout with replay, SigLIP with its bias, ZeRO options."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, texts = tiny_batch(BATCH, seed)
    rows, wrong = own_rows(), []

    def case(limit, expected, *, before=None, floor=1e-4, **options):
        engine, step = build(**options)
        if before is not None:
            torch.manual_seed(before[rank])
        step.backward(images[rows], texts[rows])
        error, name = gradient_error(engine, expected, floor)
        if not error <= limit:
            wrong.append((options, limit, error, name))
        step.update()
        engine.destroy()

    plain = reference_gradients("none", images, texts)[1]
    # At the start all features are close together and their gradient is a small difference: bf16 puts it off by one to
    # eight percent, with the batch, alike in all parameters; the embedding of tokens has two thirds of the norm and
    # shows it first. That is the dtype's doing: without engine and ranks it is the same. What an engine may add is
    # another order of sums, and bf16's reduction over ranks.
    limits = {precision: 1.5 * rounding_error(plain, images, texts, precision) for precision in ("bf16", "amp")}
    for stage, accumulation, precision in itertools.product((0, 1, 2, 3), (1, 4), limits):
        options = {"stage": stage, "accumulation": accumulation, "precision": precision}
        case(limits[precision], plain, floor=1.0, **options)
    seeds = [1000 + rank for rank in range(world_size)]
    dropped = {**NARROW, "vision_cfg": {**NARROW["vision_cfg"], "patch_dropout": 0.5}}
    for accumulation in (1, 2, 4):
        chunks = BATCH // world_size // accumulation
        expected = reference_gradients("none", images, texts, config=dropped, chunks=chunks, seeds=seeds)[1]
        for stage, policy in ((0, "none"), (2, "full"), (3, "none"), (3, "ops")):
            options = {"stage": stage, "accumulation": accumulation, "policy": policy, "dropout": 0.5}
            case(2e-5, expected, before=seeds, **options)
    biased = {**NARROW, "init_logit_bias": -2.0}
    expected = reference_gradients("none", images, texts, bias=-2.0)[1]
    for stage, accumulation in itertools.product((0, 2, 3), (1, 2)):
        case(2e-5, expected, config=biased, stage=stage, accumulation=accumulation, loss="sigmoid")
    # (contiguous_gradients: false and round_robin_gradients are left out: safe_get_full_grad cannot read them)
    for options in (
        {"stage": 1, "accumulation": 4, "reuse_last": True},
        {"stage": 2, "accumulation": 4, "reduce_once": False},
        {"stage": 3, "accumulation": 2, "reduce_once": False},
        {"stage": 3, "accumulation": 2, "reuse_last": True, "on_host": False},
        {"stage": 2, "policy": "full", "by_deepspeed": {"partition_activations": True, "cpu_checkpointing": True}},
        {"stage": 3, "policy": "every:2", "by_deepspeed": {"partition_activations": True}},
    ):
        case(2e-5, plain, **options)
    for zero in ({"overlap_comm": True}, {"reduce_scatter": False}, {"reduce_bucket_size": 10_000_000}):
        case(2e-5, plain, stage=2, accumulation=2, zero=zero)
    return wrong


def test_precisions_dropout_sigmoid_and_zero_options(seed):
    assert run_ranks(precision_and_models, 2, seed, timeout_s=400)[0] == []


def clamp_everywhere():
    """logit_scale pushed out of its range: after the step the master, the working copy and forward agree."""
    from disco_ds.engine.temperature import master_value, set_value

    images, texts = (part[own_rows()] for part in tiny_batch(BATCH, 0))
    for precision, stage, pushed in itertools.product(("fp32", "bf16"), (0, 1, 2, 3), (5.0, -3.0)):
        case, clamped = (precision, stage, pushed), math.log(100.0) if pushed > 0 else 0.0
        engine, step = build(stage, precision=precision)
        towers = engine.module
        start = master_value(engine, towers.logit_scale).item()
        assert start == pytest.approx(math.log(1 / 0.07), rel=1e-6), case  # exact, though bf16 would round it
        set_value(engine, towers.logit_scale, torch.tensor([pushed]))
        towers.set_master("logit_scale", torch.tensor([pushed]))
        assert step(images, texts).logit_scale.item() == pytest.approx(math.exp(pushed), rel=1e-5), case
        master = master_value(engine, towers.logit_scale).item()
        assert master == pytest.approx(clamped, abs=1e-6), case  # one step moves it by 5e-4 at most
        assert step(images, texts).logit_scale.item() == pytest.approx(math.exp(clamped), rel=1e-5), case
        after = engine(None, texts).logit_scale.item()
        assert math.exp(clamped) / 1.01 <= after <= math.exp(clamped) * 1.01, case
        assert 1.0 <= after <= 100.0 * (1 + 1e-6), case
        engine.destroy()


def test_logit_scale_is_clamped_in_every_copy():
    run_ranks(clamp_everywhere, 2)


def first_updates():
    """Adam's first update is the learning rate, whatever the gradient; DeepSpeed's own start gives 0.74 at stage 0."""
    from disco_ds.engine.temperature import master_value

    images, texts = (part[own_rows()] for part in tiny_batch(BATCH, 1))
    for precision, stage in itertools.product(("fp32", "bf16", "amp"), (0, 1, 2, 3)):
        engine, step = build(stage, precision=precision, optimizer={"clip_norm": 0})
        parameter = engine.module.clip.ln_final.bias
        before = master_value(engine, parameter).clone()
        step(images, texts)
        moved = (master_value(engine, parameter) - before).abs() / 5e-4
        assert moved.median().item() == pytest.approx(1.0, abs=0.02), (precision, stage)
        engine.destroy()


def test_the_first_update_is_a_whole_one():
    run_ranks(first_updates, 2)
