"""The losses on real ranks, against float64 in one process: values, errors, groups, memory and what is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.live_bytes import LiveBytes
from tests.helpers.loss_reference import KINDS, clip_reference, leaves, make_features, relative_error, sigmoid_reference
from tests.helpers.ranks import run_ranks
from tests.loss.test_memory import MEMORY, measure_peaks

Tensors = dict[str, torch.Tensor]
PAIRS = (1, 9, 33)
"""Pairs of each rank: no tile divides them."""


def share_of(rank: int, b: int, *towers: torch.Tensor) -> list[torch.Tensor]:
    """A rank's own rows of each tower, as leaves."""
    return [x[rank * b : rank * b + b].clone().requires_grad_() for x in towers]


def bound_of(dtype: torch.dtype, s: float, name: str) -> float:
    """What the dtype allows: of float32, eight roundings of a logit; of 16 bits, that of the gradient at the end.

    The loss and the scale are float32 numbers even where the features have 16 bits.
    """
    if dtype == torch.float64:
        return 1e-10
    logit = 8 * s * torch.finfo(torch.float32).eps
    return max(logit, torch.finfo(dtype).eps) if name in ("image", "text") else logit


def errors_after_engine(loss: torch.Tensor, leaves: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative errors of loss and gradients after an engine that averages over ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    value = loss.detach().double().clone()
    dist.all_reduce(value)
    errors = {"loss": relative_error(value / size, expected["loss"])}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype, name
        whole = torch.zeros_like(expected[name])
        if name in ("image", "text"):
            # a parameter of the tower gets the average over ranks of what each rank's features pass on: each 1/N here
            b = len(leaf)
            whole[rank * b : rank * b + b] = leaf.grad.double()
        else:
            whole += leaf.grad.double().reshape(whole.shape)
        dist.all_reduce(whole)
        errors[name] = relative_error(whole / size, expected[name])
        if name in ("scale", "bias"):  # where the terms of this sum cancel, its error is to be seen beside them
            errors[name] *= min(1.0, expected[name].abs().item() / (0.05 * expected["loss"].item() + 1e-300))
    if leaves["image"].dtype == torch.float64:
        return errors
    # above float32's denormal numbers, which have few bits (one converged pair: e**-100), or nothing at all
    return {name: e for name, e in errors.items() if expected[name].norm().item() > 1e-35 or not expected[name].any()}


def check(loss: torch.Tensor, leaves: Tensors, expected: Tensors, s: float, case: str) -> None:
    """Nothing is off by more than its dtype explains."""
    for name, error in errors_after_engine(loss, leaves, expected).items():
        assert error <= bound_of(leaves["image"].dtype, s, name), f"{name} is off by {error:.1e} in {case}"


def sweep(seed: int) -> None:
    """Every kind of features, dtype and loss over this number of ranks."""
    from disco_ds import build_loss

    size, rank = dist.get_world_size(), dist.get_rank()
    options = itertools.cycle([(None, True), (None, False), (7, True), (13, False), (1000, "auto"), (1, False)])
    for b, kind, dtype in itertools.product(PAIRS, KINDS, (torch.float32, torch.bfloat16, torch.float64)):
        if kind == "identical" or (kind == "duplicated" and b * size < 8):
            continue  # of equal pairs, or two equal ones and one other, nothing is left that float32 could hold
        if dtype == torch.bfloat16 and kind not in ("trained", "converged"):
            continue
        all_images, all_texts = make_features(b * size, 48, kind, seed, dtype)
        tile, keep = next(options)
        image, text = share_of(rank, b, all_images, all_texts)
        scale = torch.tensor([100.0], dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
        loss = build_loss(tile=tile, keep_logits=keep)(image, text, scale)
        assert loss.shape == ()
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        loss.backward()
        case = f"{kind} {dtype} {size} x {b} tile={tile} keep={keep} seed={seed}"
        longest = 6.25 if kind == "mixed" else 1.0  # features of lengths up to 2.5
        check(
            loss,
            {"image": image, "text": text, "scale": scale},
            clip_reference(all_images, all_texts, 100.0),
            100.0 * longest,
            case,
        )
    for b, (s, beta), dtype in itertools.product(
        PAIRS, [(10.0, -10.0), (100.0, -60.0), (117.0, 3.0)], (torch.float32, torch.bfloat16)
    ):
        tile = next(options)[0]
        all_images, all_texts = make_features(b * size, 40, "trained", seed, dtype)
        image, text = share_of(rank, b, all_images, all_texts)
        scale, bias = torch.tensor(s, requires_grad=True), torch.tensor([beta], requires_grad=True)
        loss = build_loss("sigmoid", tile=tile)(image, text, scale, bias)
        loss.backward()
        found = {"image": image, "text": text, "scale": scale, "bias": bias}
        case = f"sigmoid {s} {beta} {dtype} {size} x {b} tile={tile} seed={seed}"
        check(loss, found, sigmoid_reference(all_images, all_texts, s, beta), s + abs(beta), case)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_loss_and_gradients_equal_float64(ranks, seed):
    run_ranks(sweep, ranks, seed, timeout_s=180)


def disagreements() -> dict[str, str]:
    """Calls that are wrong or differ between ranks: the message each raises, by words that have to be in it."""
    from disco_ds import build_loss, contrastive_loss

    one = dist.get_rank() == 1
    plain = torch.randn(4, 8)
    odd, longer = plain.bfloat16() if one else plain, torch.randn(4 + one, 8)
    calls = {
        "pairs is 4 on rank 0 and 5 on rank 1": lambda: contrastive_loss(
            torch.randn(4 + one, 8), torch.randn(4 + one, 8), 1.0
        ),
        "width is 8": lambda: contrastive_loss(torch.randn(4, 8 + one), torch.randn(4, 8 + one), 1.0),
        "dtype is torch.float32": lambda: contrastive_loss(odd, odd, 1.0),
        "tile is 4": lambda: contrastive_loss(plain, plain, 1.0, tile=4 - one),
        "keep_logits": lambda: contrastive_loss(plain, plain, 1.0, keep_logits=one),
        "logit_scale is 1": lambda: contrastive_loss(plain, plain, 1.0 + one),
        "wanted gradients": lambda: contrastive_loss(plain.clone().requires_grad_(one), plain, 1.0),
        "on rank 1 of 3, image and text": lambda: contrastive_loss(plain, longer, 1.0),
        "two dimensions": lambda: contrastive_loss(plain[0] if one else plain, plain, 1.0),
        "tile must": lambda: contrastive_loss(plain, plain, 1.0, tile=-2 if one else None),
        "empty": lambda: contrastive_loss(plain[: 4 - 4 * one], plain[: 4 - 4 * one], 1.0),
        "the loss": lambda: build_loss("sigmoid" if one else "one_block")(plain, plain, 1.0),
        "logit_bias": lambda: build_loss("sigmoid")(plain, plain, 1.0, 1.0 + one),
    }
    messages = {}
    for words, call in calls.items():
        try:
            call()
            messages[words] = "it went through"
        except ValueError as error:
            messages[words] = str(error).partition("; here")[0]
    contrastive_loss(plain, plain, 1.0)  # the ranks are still in step
    return messages


def test_ranks_that_differ_all_raise_the_same_error():
    first, *others = run_ranks(disagreements, 3)
    assert all(messages == first for messages in others)
    assert not {words: message for words, message in first.items() if words not in message}


def bad_values() -> None:
    """One rank's input is not finite: every rank's loss must show it."""
    from disco_ds import build_loss

    rank = dist.get_rank()
    for kind, bad, where, keep in itertools.product(
        ("one_block", "sigmoid"),
        (float("nan"), float("inf"), -float("inf")),
        ("image", "text", "scale", "bias"),
        (True, False),
    ):
        if (kind, where) == ("one_block", "bias"):
            continue  # a softmax does not see it
        image, text = make_features(15, 8, "random", 3)
        image, text = share_of(rank, 5, image, text)
        scale, bias = torch.tensor(5.0), torch.tensor(1.0)
        if rank == 1:
            with torch.no_grad():
                {"image": image[3], "text": text[3], "scale": scale.view(1), "bias": bias.view(1)}[where][0] = bad
        options = {"keep_logits": keep} if kind == "one_block" else {}
        loss = build_loss(kind, tile=4, **options)(image, text, scale, bias)
        loss.backward()
        assert not loss.isfinite(), (kind, bad, where, keep)


def test_a_value_that_is_not_finite_shows_on_every_rank():
    run_ranks(bad_values, 3)


def groups_and_frozen(seed: int) -> None:
    """Sub-groups, frozen towers, no_grad, a rank outside of its group."""
    from disco_ds import contrastive_loss

    rank = dist.get_rank()
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    group, other, members = (*groups, (1, 3)) if rank in (1, 3) else (*groups[::-1], (0, 2))
    me = members.index(rank)
    images, texts = make_features(18, 24, "trained", seed + members[0])
    expected = clip_reference(images, texts, 100.0)
    own = slice(9 * me, 9 * me + 9)

    def compare(name: str, gradient: torch.Tensor | None, tower: str) -> None:
        assert gradient is not None, (name, tower)
        error = (gradient.double() / 2 - expected[tower][own]).norm() / expected[tower].norm()
        assert error < bound_of(torch.float32, 100.0, tower), (name, tower, seed)

    image, text = share_of(me, 9, images, texts)
    contrastive_loss(image, text, 100.0, group=group, tile=5).backward()
    compare("sub-group", image.grad, "image"), compare("sub-group", text.grad, "text")
    for frozen in ("image", "text"):
        towers = dict(zip(("image", "text"), share_of(me, 9, images, texts), strict=True))
        towers[frozen].requires_grad_(False)
        scale = torch.tensor(100.0, requires_grad=True)
        with LiveBytes() as live:
            contrastive_loss(towers["image"], towers["text"], scale, group=group, tile=5, keep_logits=False).backward()
        assert not any("reduce_scatter" in name for name in live.collectives), (frozen, live.collectives)
        trained = "text" if frozen == "image" else "image"
        compare(f"frozen {frozen}", towers[trained].grad, trained)
        assert towers[frozen].grad is None, frozen
    with torch.no_grad():
        assert not contrastive_loss(image, text, 100.0, group=group).requires_grad
    with pytest.raises(ValueError, match="not a member"):
        contrastive_loss(image, text, 1.0, group=other)


def test_groups_and_frozen_towers(seed):
    run_ranks(groups_and_frozen, 4, seed)


def peaks_and_collectives() -> tuple[list[Any], list[str], int]:
    from disco_ds import contrastive_loss

    peaks = measure_peaks(MEMORY, dist.get_world_size())
    image, text, scale = leaves(512, 128)
    with LiveBytes() as live:
        contrastive_loss(image, text, scale).backward()
    return peaks, live.collectives, live.sent


def test_what_is_held_and_sent_is_what_is_said():
    for peaks, names, sent in run_ranks(peaks_and_collectives, 3):
        for case, (form, counted, _) in zip(MEMORY, peaks, strict=True):
            assert form == pytest.approx(counted, rel=0.02), case
        # the agreement, texts, the pairs' logits; column maxima and sums; the gradient of the texts
        assert sorted(name.split("_base")[0].strip("_") for name in names) == sorted(
            ["allgather"] * 3 + ["allreduce"] * 2 + ["reduce_scatter"]
        ), names
        tower = 3 * 512 * 128 * 4 * 2 / 3
        assert 2 * tower <= sent <= 2 * tower + 6 * 8 * 3 * 512
