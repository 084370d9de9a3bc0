"""The losses on real ranks, against float64 in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.live_bytes import LiveBytes
from tests.helpers.loss_reference import (
    KINDS,
    clip_reference,
    fresh_seed,
    make_features,
    relative_error,
    sigmoid_reference,
)
from tests.helpers.ranks import run_ranks

# Pairs of each rank, for each number of ranks: even, uneven, a rank without any, a batch of one.
SPLITS = {
    2: [(33, 33), (40, 9), (0, 21), (1, 0)],
    3: [(20, 20, 20), (17, 0, 30), (1, 1, 1)],
    4: [(16, 16, 16, 16), (5, 31, 0, 12)],
    8: [(8,) * 8, (9, 1, 0, 4, 12, 3, 7, 2)],
}
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float64: 1e-11}


def share_of(rank: int, counts: tuple[int, ...], *towers: torch.Tensor) -> list[torch.Tensor]:
    """A rank's own rows of each tower, as leaves."""
    start = sum(counts[:rank])
    return [x[start : start + counts[rank]].clone().requires_grad_() for x in towers]


def errors_after_engine(
    loss: torch.Tensor,
    counts: tuple[int, ...],
    leaves: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    mean: bool,
) -> dict[str, float]:
    """Relative errors of loss and gradients after an engine that averages (or adds) over ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    start = sum(counts[:rank])
    own = slice(start, start + counts[rank])
    value = loss.detach().double().clone()
    dist.all_reduce(value)
    errors = {"loss": relative_error(value / size, expected["loss"])}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype, name
        gradient = leaf.grad.double()
        if name in ("image", "text"):
            # A parameter of the tower gets the average over ranks of what each rank's features pass on: each 1/N here.
            whole = torch.zeros_like(expected[name])
            whole[own] = gradient
        else:
            whole = gradient.clone().reshape(expected[name].shape)
        dist.all_reduce(whole)
        errors[name] = relative_error(whole / size if mean else whole, expected[name])
        if name == "scale":  # where the terms of this sum cancel, its error is to be seen beside them
            errors[name] *= min(1.0, expected[name].abs().item() / (0.05 * expected["loss"].item() + 1e-300))
    if leaves["image"].dtype == torch.float64:
        return errors
    return {name: error for name, error in errors.items() if float32_can_hold(expected[name])}


def float32_can_hold(expected: torch.Tensor) -> bool:
    """Above its denormal numbers, which have few bits (one converged pair: e**-100), or nothing at all."""
    return expected.norm().item() > 1e-35 or not expected.any()


def check(errors: dict[str, float], dtype: torch.dtype, case: Any, failures: list[str], least: float = 0.0) -> None:
    """Note what is off by more than the bound of the dtype, or than ``least`` where that is more."""
    for name, error in errors.items():
        bound = max(BOUND[dtype], least)
        if name in ("scale", "bias") or (name == "loss" and dtype != torch.float64):
            bound = 2e-6 if dtype.itemsize > 2 else 1e-5  # of a float32 number, even where features have 16 bits
        if not error <= bound:
            failures.append(f"{name} is off by {error:.1e} (bound {bound:.0e}) in {case}")


def sweep(seed: int, kinds: tuple[str, ...], dtypes: tuple[str, ...]) -> list[str]:
    """Every kind of features and loss over this number of ranks; returns what is wrong."""
    from disco_ds.loss.contrastive import build_loss

    size, rank = dist.get_world_size(), dist.get_rank()
    failures: list[str] = []
    options = itertools.cycle([(None, True), (None, False), (7, True), (13, False), (1000, "auto"), (1, False)])
    reductions = itertools.cycle(["mean", "mean", "sum"])
    for counts, kind, dtype_name in itertools.product(SPLITS[size], kinds, dtypes):
        if dtype_name != "float32" and kind not in ("trained", "converged"):
            continue
        if kind == "duplicated" and sum(counts) < 8:
            continue  # of two equal pairs and one other nothing is left that float32 could hold: all cancels
        dtype = getattr(torch, dtype_name)
        all_images, all_texts = make_features(sum(counts), 48, kind, seed, dtype)
        expected = clip_reference(all_images, all_texts, 100.0)
        tile, keep = next(options)
        for name in ("one_block", "clip", "disco") if kind == "trained" else ("one_block",):
            reduction = next(reductions)
            image, text = share_of(rank, counts, all_images, all_texts)
            scale = torch.tensor([100.0], requires_grad=True)
            extra = {"tile": tile, "keep_logits": keep} if name == "one_block" else {}
            loss = build_loss(name, grad_reduction=reduction, **extra)(image, text, scale)
            assert loss.shape == ()
            assert loss.dtype == torch.promote_types(dtype, torch.float32)
            (loss * 4.0).backward()  # a power of two: a division of bf16 gradients that rounds nothing once more
            for leaf in (image, text, scale):
                leaf.grad /= 4.0
            leaves = {"image": image, "text": text, "scale": scale}
            if name == "one_block":
                case = f"{name} {kind} {dtype_name} {counts} tile={tile} keep={keep} {reduction} seed={seed}"
                errors = errors_after_engine(loss, counts, leaves, expected, reduction == "mean")
                check(errors, dtype, case, failures)
            elif dtype == torch.float64 and expected["loss"] > 1e-3:  # below, cross-entropy has lost its digits
                errors = errors_after_engine(loss, counts, leaves, expected, reduction == "mean")
                check(errors, dtype, f"{name} {counts} {reduction} seed={seed}", failures)
    return failures


def sigmoid_sweep(seed: int) -> list[str]:
    from disco_ds.loss.contrastive import build_loss

    size, rank = dist.get_world_size(), dist.get_rank()
    failures: list[str] = []
    cases = itertools.product(SPLITS[size], [(10.0, -10.0), (100.0, -60.0), (117.0, 3.0)], ["float32", "bfloat16"])
    for (counts, (s, b), dtype_name), tile in zip(cases, itertools.cycle([None, 5, 64]), strict=False):
        dtype = getattr(torch, dtype_name)
        all_images, all_texts = make_features(sum(counts), 40, "trained", seed, dtype)
        expected = sigmoid_reference(all_images, all_texts, s, b)
        image, text = share_of(rank, counts, all_images, all_texts)
        scale, bias = torch.tensor(s, requires_grad=True), torch.tensor([b], requires_grad=True)
        loss = build_loss("sigmoid", tile=tile)(image, text, scale, bias)
        loss.backward()
        leaves = {"image": image, "text": text, "scale": scale, "bias": bias}
        errors = errors_after_engine(loss, counts, leaves, expected, True)
        # one pair's gradient goes with the sigmoid of its logit: off by the rounding of the logit, which goes up to s
        rounding = s * 2.0**-24 if dtype == torch.float32 else 0.0
        check(errors, dtype, f"sigmoid {s} {b} {dtype_name} {counts} tile={tile} seed={seed}", failures, rounding)
    return failures


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_loss_and_gradients_equal_float64(ranks):
    seed = fresh_seed()
    kinds = tuple(k for k in KINDS if k != "identical")
    dtypes = ("float32", "bfloat16", "float64") if ranks < 8 else ("float32",)
    for failures in run_ranks(sweep, ranks, seed, kinds, dtypes, timeout_s=180):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sigmoid_loss_equals_float64(ranks):
    for failures in run_ranks(sigmoid_sweep, ranks, fresh_seed()):
        assert not failures, "\n".join(failures)


def disagreements() -> list[str]:
    """Calls that differ between ranks: the message each raises."""
    from disco_ds.loss.contrastive import build_loss, contrastive_loss, gather_ahead

    rank = dist.get_rank()
    one = rank == 1
    plain = torch.randn(4, 8)
    odd = plain.bfloat16() if one else plain
    calls = [
        lambda: contrastive_loss(torch.randn(4, 9 if one else 8), torch.randn(4, 9 if one else 8), 1.0),
        lambda: contrastive_loss(odd, odd, 1.0),
        lambda: contrastive_loss(plain, plain, 1.0, tile=3 if one else 4),
        lambda: contrastive_loss(plain, plain, 1.0, keep_logits=one),
        lambda: contrastive_loss(plain, plain, 1.0, grad_reduction="sum" if one else "mean"),
        lambda: contrastive_loss(plain, plain, 2.0 if one else 1.0),
        lambda: contrastive_loss(plain, torch.randn(5 if one else 4, 8), 1.0),
        lambda: contrastive_loss(plain[0] if one else plain, plain, 1.0),
        lambda: contrastive_loss(plain, plain, 1.0, tile=-2 if one else None),
        lambda: contrastive_loss(plain[:0], plain[:0], 1.0),
        lambda: contrastive_loss(plain, plain, 1.0, keep_logits="maybe"),
        lambda: (build_loss("sigmoid") if one else build_loss("one_block"))(plain, plain, 1.0),
        lambda: build_loss("sigmoid")(plain, plain, 1.0, 2.0 if one else 1.0),
        lambda: gather_ahead(torch.randn(4, 9 if one else 8)),
        lambda: contrastive_loss(plain, gather_ahead(plain) if not one else gather_ahead(plain) + 0.0, 1.0),
    ]  # fmt: skip
    messages = []
    for i, call in enumerate(calls):
        try:
            call()
            messages.append(f"call {i} went through")
        except ValueError as error:
            messages.append(str(error))
    contrastive_loss(plain, plain, 1.0)  # the ranks are still in step
    return messages


def test_ranks_that_differ_all_raise_the_same_error():
    first, *others = run_ranks(disagreements, 3)
    assert all(messages == first for messages in others)
    expected = ["width", "dtype", "tile", "keep_logits", "grad_reduction", "logit_scale", "rows", "two dimensions",
                "tile", "empty", "keep_logits", "kind", "logit_bias", "width", "gathered ahead"]  # fmt: skip
    for message, word in zip(first, expected, strict=True):
        assert word in message, f"{word!r} not in {message!r}"


def bad_values() -> list[str]:
    """One rank's input is not finite: every rank's loss must show it."""
    from disco_ds.loss.contrastive import build_loss

    rank, failures = dist.get_rank(), []
    for kind, bad, where, keep in itertools.product(
        ("one_block", "sigmoid"),
        (float("nan"), float("inf"), -float("inf")),
        ("image", "text", "scale", "bias"),
        (True, False),
    ):
        image, text = make_features(10, 8, "random", 3)
        scale, bias = torch.tensor(5.0), torch.tensor(1.0)
        if rank == 1:
            {"image": image[3], "text": text[3], "scale": scale.view(1), "bias": bias.view(1)}[where][0] = bad
        image.requires_grad_(), text.requires_grad_()
        options = {"keep_logits": keep} if kind == "one_block" else {}
        loss = build_loss(kind, tile=4, **options)(image, text, scale, bias)
        loss.backward()
        if loss.isfinite():
            failures.append(f"{kind} {bad} in {where}: rank {rank} has {loss.item()}")
    return failures


def test_a_value_that_is_not_finite_shows_on_every_rank():
    for failures in run_ranks(bad_values, 3):
        assert not failures, "\n".join(failures)


def groups_and_frozen(seed: int) -> list[str]:
    """Sub-groups, frozen towers, gather_ahead in all its uses, no_grad; returns what is wrong."""
    from disco_ds.loss.contrastive import contrastive_loss, gather_ahead

    rank, failures = dist.get_rank(), []
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    group, members = (groups[0], (1, 3)) if rank in (1, 3) else (groups[1], (0, 2))
    counts = (12, 7)
    me = members.index(rank)
    images, texts = make_features(19, 24, "trained", seed + members[0])
    expected = clip_reference(images, texts, 100.0)
    own = slice(sum(counts[:me]), sum(counts[: me + 1]))

    def compare(name: str, gradient: torch.Tensor | None, tower: str, factor: float = 1.0) -> None:
        error = relative_error(gradient / (2 * factor), expected[tower][own])
        if not error < 3e-5:  # of the wiring: a rank's few rows alone may hang on one float32 logit
            failures.append(f"{name}: {tower} off by {error:.1e}, seed {seed}")

    image, text = share_of(me, counts, images, texts)
    contrastive_loss(image, text, 100.0, group=group, tile=5).backward()
    compare("sub-group", image.grad, "image"), compare("sub-group", text.grad, "text")

    for frozen in ("image", "text"):
        leaves = dict(zip(("image", "text"), share_of(me, counts, images, texts), strict=True))
        leaves[frozen].requires_grad_(False)
        scale = torch.tensor(100.0, requires_grad=True)
        with LiveBytes() as live:
            contrastive_loss(leaves["image"], leaves["text"], scale, group=group, tile=5, keep_logits=False).backward()
        if live.collectives.count("alltoall_base") != 1:  # that of the column sums; gloo's reduce-scatter is another
            failures.append(f"frozen {frozen}, yet a gradient was sent: {live.collectives}")
        trained = "text" if frozen == "image" else "image"
        compare(f"frozen {frozen}", leaves[trained].grad, trained)
        if leaves[frozen].grad is not None:
            failures.append(f"frozen {frozen} has a gradient")

    for ahead in ("image", "text"):
        leaves = dict(zip(("image", "text"), share_of(me, counts, images, texts), strict=True))
        passed = dict(leaves)
        passed[ahead] = gather_ahead(leaves[ahead], group=group)
        loss = contrastive_loss(passed["image"], passed["text"], 100.0, group=group)
        again = contrastive_loss(passed["image"], passed["text"], 100.0, group=group)  # gathers for itself
        only = torch.autograd.grad(loss, leaves["image" if ahead == "text" else "text"], retain_graph=True)[0]
        compare("grad of one tower", only, "image" if ahead == "text" else "text")
        (5.0 * loss + 2.0 * again).backward(retain_graph=True)
        for tower in ("image", "text"):
            compare(f"{ahead} ahead, two losses", leaves[tower].grad, tower, 7.0)
            leaves[tower].grad = None
        loss.backward()
        for tower in ("image", "text"):
            compare(f"{ahead} ahead, backward again", leaves[tower].grad, tower)

    # Ahead and then something else: other features, changed features, or no loss at all; nobody hangs.
    image, text = share_of(me, counts, images, texts)
    held = gather_ahead(text, group=group)
    contrastive_loss(image, held * 1.0, 100.0, group=group).backward()
    compare("other features", text.grad, "text")
    held = gather_ahead(text, group=group)
    held.sum().backward()
    with torch.no_grad():
        held = gather_ahead(text, group=group)
        loss = contrastive_loss(image, held, 100.0, group=group)
        if loss.requires_grad:
            failures.append("no_grad, yet the loss has a graph")
    dist.barrier()
    return failures


def test_groups_frozen_towers_and_overlap():
    for failures in run_ranks(groups_and_frozen, 4, fresh_seed()):
        assert not failures, "\n".join(failures)


def outsider() -> str:
    from disco_ds.loss.contrastive import contrastive_loss

    group = dist.new_group([0])
    if dist.get_rank() == 0:
        contrastive_loss(torch.ones(2, 3), torch.ones(2, 3), 1.0, group=group)
        return "not a member"
    try:
        contrastive_loss(torch.ones(2, 3), torch.ones(2, 3), 1.0, group=group)
    except ValueError as error:
        return str(error)
    return "went through"


def test_a_rank_outside_the_group_is_told_so():
    assert all("not a member" in said for said in run_ranks(outsider, 2))
