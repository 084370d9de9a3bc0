"""What a large-batch run needs of a step: true gradient scale, skipping together, statistics, a plain loop followed."""

from __future__ import annotations

import itertools
import weakref

import open_clip
import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import BATCH, NARROW, build, own_rows, reference_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TINY_RESNET, TINY_TIMM, TINY_VOCAB, tiny_batch

SMALL_VOCAB = {"text_cfg": TINY_VOCAB["text_cfg"]}


def trained(seed, names, stages):
    """Losses, gradient norms and logit_scale of three steps for each optimizer and stage."""
    from disco_ds.distributed import mean_over_ranks
    from disco_ds.engine.deepspeed_engine import gradient_norm

    results = {}
    for name, stage in itertools.product(names, stages):
        engine, step = build(stage, optimizer={"name": name, "lr": 1e-3, "clip_norm": 0.5})
        history = []
        for index in range(3):
            images, texts = tiny_batch(BATCH, seed + index)
            outcome = step(images[own_rows()], texts[own_rows()])
            history += [mean_over_ranks(outcome.loss), gradient_norm(engine), outcome.logit_scale.item()]
        results[name, stage] = history
        engine.destroy()
    return results


def assert_alike(history, expected, case):
    """Loss, gradient norm and scale of three steps.

    Before the first update they are equal to rounding. After it a gradient near zero may have another sign, of which
    Lion makes a whole step, and Adam at its first: 0.9 % of a norm was seen.
    """
    assert history[:2] == pytest.approx(expected[:2], rel=1e-3, abs=1e-5), case
    assert history == pytest.approx(expected, rel=0.05), case


def test_optimizers_see_the_true_gradient_at_every_number_of_ranks(seed):
    """The norm and clipping depend on the gradient's scale: a wrong 1/N would show at once."""
    names = ("adamw", "lion")
    one, two, four = (run_ranks(trained, n, seed, names, (0,), timeout_s=200)[0] for n in (1, 2, 4))
    for key, expected in one.items():
        assert_alike(two[key], expected, key)
        assert_alike(four[key], expected, key)
    norms = {key: history[1] for key, history in one.items()}
    gradients = reference_gradients("none", *tiny_batch(BATCH, seed))[1].values()
    true_norm = torch.sqrt(sum(g.square().sum() for g in gradients)).item()
    assert all(norm == pytest.approx(true_norm, rel=1e-4) for norm in norms.values()), (true_norm, norms)
    losses = [history[6] for history in one.values()]
    assert len(set(losses)) == len(losses), "two optimizers gave the same third loss"


def test_elementwise_optimizers_are_the_same_at_every_stage(seed):
    results = run_ranks(trained, 2, seed, ("adamw", "lion"), (0, 1, 2, 3), timeout_s=200)[0]
    for (name, stage), history in results.items():
        assert_alike(history, results[name, 0], (name, stage))


def poisoned():
    """A NaN pixel on rank 1 in the second of four steps, everywhere it could hide."""
    from disco_ds.engine.temperature import master_value

    cases = [(stage, precision, 1, NARROW) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16", "amp")]
    cases += [(2, "fp32", 2, NARROW), (3, "fp32", 2, NARROW), (0, "fp32", 1, {**TINY_RESNET, **SMALL_VOCAB})]
    for stage, precision, accumulation, config in cases:
        engine, step = build(stage, precision=precision, accumulation=accumulation, config=config)
        buffers = dict(engine.module.named_buffers())
        outcomes = []
        for index in range(4):
            images, texts = tiny_batch(BATCH, index)
            if index == 1 and dist.get_rank() == 1:
                images[own_rows()][2, 0, 3, 3] = float("nan")
            before = [master_value(engine, p).clone() for p in engine.module.parameters()]
            kept = [buffer.clone() for buffer in buffers.values()]
            outcome = step(images[own_rows()], texts[own_rows()])
            after = [master_value(engine, p) for p in engine.module.parameters()]
            unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            unchanged = unchanged and all(torch.equal(a, b) for a, b in zip(kept, buffers.values(), strict=True))
            finite = all(bool(torch.isfinite(value).all()) for value in after)
            outcomes.append((outcome.skipped, unchanged, finite, outcome.bad_rows.nonzero().flatten().tolist()))
        skipped, unchanged, finite, bad = map(list, zip(*outcomes, strict=True))
        case = (stage, precision, accumulation, config)
        assert skipped == unchanged == [False, True, False, False], case  # unchanged: weights and statistics
        assert all(finite), case
        if config is NARROW:  # batch norm spreads a NaN over the batch: there all rows of the rank are bad
            assert bad == [[], [2] if dist.get_rank() == 1 else [], [], []], case
        engine.destroy()


def test_a_non_finite_step_is_skipped_on_all_ranks_and_leaves_nothing():
    run_ranks(poisoned, 2, timeout_s=300)


def plain_loop(config, steps, seed):
    """open_clip's model, open_clip's loss, torch's AdamW: a loop as its users write it."""
    torch.manual_seed(0)
    model = open_clip.model.CLIP(**config).train()
    exempt = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": exempt, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    loss_function, losses = open_clip.loss.ClipLoss(), []
    for index in range(steps):
        loss = loss_function(*model(*tiny_batch(BATCH, seed + index)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        losses.append(loss.item())
    return losses


def followed(config, plans, steps, seed, off=1e-4):
    """Steps of each engine, of these stages and micro-batches, beside the plain loop; ``off``: of a loss."""
    from disco_ds.distributed import mean_over_ranks

    plain = plain_loop(config, steps, seed)
    for stage, accumulation in plans:
        engine, step = build(stage, accumulation=accumulation, config=config)
        losses = []
        for index in range(steps):
            images, texts = tiny_batch(BATCH, seed + index)
            losses.append(mean_over_ranks(step(images[own_rows()], texts[own_rows()]).loss))
        assert losses == pytest.approx(plain, rel=0, abs=off), (stage, accumulation)
        engine.destroy()


@pytest.mark.parametrize(
    ("config", "plans"),
    [(NARROW, [(0, 1), (1, 4), (2, 1), (2, 2), (3, 1), (3, 4)]), ({**TINY_TIMM, **SMALL_VOCAB}, [(2, 1), (3, 2)])],
    ids=["vit", "timm"],
)
def test_ten_steps_follow_a_plain_loop(config, plans, seed):
    run_ranks(followed, 2, config, plans, 10, seed, timeout_s=300)


def images_after_forward():
    """Whether the device's copy of the images (a clone here) is still there when the loss begins.

    In fp32 the first convolution keeps them for its gradient; else nobody does, and the planner counts on it.
    """
    for stage, precision in itertools.product((0, 2, 3), ("bf16", "amp", "fp32")):
        engine, step = build(stage, precision=precision)
        copies, found = [], []

        def on_device(tensor, copies=copies):
            copy = tensor.clone()
            copies.append(weakref.ref(copy.untyped_storage()))
            return copy

        def loss(*args, found=found, copies=copies, loss=step.loss):
            found.append(copies[0]() is not None)
            return loss(*args)

        step._on_device, step.loss = on_device, loss
        images, texts = tiny_batch(BATCH, 0)
        step(images[own_rows()], texts[own_rows()])
        assert found == [precision == "fp32"], (stage, precision)
        engine.destroy()


def test_images_leave_the_device_after_forward():
    run_ranks(images_after_forward, 2, timeout_s=200)


def resnet(seed):
    """A tower with batch norm on one rank: whole against the plain loop; cached: statistics move once a sample."""
    config = {**TINY_RESNET, **SMALL_VOCAB}
    # a ReLU near its kink can turn a small gradient round, and Adam makes whole steps of small gradients: the plain
    # loop itself is up to 6e-4 from its float64 (25 seeds); a tenth more learning rate shows as 3e-2
    followed(config, [(2, 1)], 5, seed, off=3e-3)
    images, texts = tiny_batch(BATCH, seed)
    for accumulation in (1, 4):
        torch.manual_seed(0)
        model = open_clip.model.CLIP(**config).train()
        with torch.no_grad():
            for chunk in images.chunk(accumulation):
                model.encode_image(chunk)
        engine, step = build(0, accumulation=accumulation, config=config, policy="full")
        norm, expected = engine.module.clip.visual.bn1, model.visual.bn1
        step.backward(images, texts)
        torch.testing.assert_close(norm.running_mean, expected.running_mean)
        assert norm.num_batches_tracked == expected.num_batches_tracked == accumulation
        step.update()
        engine.destroy()


def test_batch_norm_statistics_count_each_sample_once(seed):
    run_ranks(resnet, 1, seed, timeout_s=200)
