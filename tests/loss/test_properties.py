"""The loss at any shape, tile and scale that hypothesis comes up with, in float64: only the algebra can be wrong."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_ds import contrastive_loss
from disco_ds.loss.sigmoid import SigmoidLoss
from tests.helpers.loss_reference import KINDS, clip_reference, make_features, relative_error, sigmoid_reference

SHAPES = {
    "pairs": st.integers(1, 45),
    "width": st.integers(1, 40),
    "kind": st.sampled_from(KINDS),
    "seed": st.integers(0, 2**31 - 1),
    "tile": st.one_of(st.none(), st.integers(1, 60)),
}
SCALES = st.one_of(st.floats(0.0, 100.0), st.sampled_from([0.0, 1.0, 100.0, 1000.0]))


def inputs(pairs, width, kind, seed, scale):
    image, text = make_features(pairs, width, kind, seed, torch.float64)
    return image.requires_grad_(), text.requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@settings(max_examples=80, deadline=None)
@given(**SHAPES, scale=SCALES, keep=st.booleans())
def test_loss_and_gradients_at_any_shape(pairs, width, kind, seed, tile, scale, keep):
    image, text, s = inputs(pairs, width, kind, seed, scale)
    found = gradients(contrastive_loss(image, text, s, tile=tile, keep_logits=keep), image, text, s)
    expected = clip_reference(image, text, scale)
    # below, autograd's cross-entropy has lost its digits, and of a sum that cancels few are left
    floor = {"loss": 1e-9, "image": 1e-9 * scale, "text": 1e-9 * scale, "scale": 1e-9}
    for value, name in zip(found, ("loss", "image", "text", "scale"), strict=True):
        error = (value - expected[name]).norm()
        assert error <= 1e-9 * expected[name].norm() + floor[name], (name, error)


@settings(max_examples=40, deadline=None)
@given(**SHAPES, scale=SCALES, order=st.randoms(use_true_random=False))
def test_neither_the_order_of_pairs_nor_which_tower_is_which_matters(pairs, width, kind, seed, tile, scale, order):
    image, text, s = inputs(pairs, width, kind, seed, scale)
    loss, d_image, d_text, d_scale = gradients(contrastive_loss(image, text, s, tile=tile), image, text, s)
    turned = gradients(contrastive_loss(text, image, s, tile=tile), text, image, s)
    rows = list(range(pairs))
    order.shuffle(rows)
    shuffled = gradients(contrastive_loss(image[rows], text[rows], s, tile=tile), image, text, s)
    for other in ([turned[0], turned[2], turned[1], turned[3]], shuffled):
        for value, same in zip((loss, d_image, d_text, d_scale), other, strict=True):
            torch.testing.assert_close(value, same, rtol=1e-9, atol=1e-9 * max(scale, 1.0))


@settings(max_examples=60, deadline=None)
@given(**SHAPES, scale=st.floats(0.0, 200.0), bias=st.floats(-20.0, 5.0))
def test_sigmoid_loss_at_any_shape(pairs, width, kind, seed, tile, scale, bias):
    image, text, s = inputs(pairs, width, kind, seed, scale)
    b = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
    found = gradients(SigmoidLoss(tile=tile)(image, text, s, b), image, text, s, b)
    expected = sigmoid_reference(image, text, scale, bias)
    for value, name in zip(found, ("loss", "image", "text", "scale", "bias"), strict=True):
        assert relative_error(value, expected[name]) < 1e-9 or (value - expected[name]).norm() < 1e-12, name


def test_the_features_are_what_their_names_say():
    """The kinds that hypothesis draws from: a loss near zero, near chance, and between."""
    losses = {kind: clip_reference(*make_features(64, 48, kind, 1), 100.0)["loss"].item() for kind in KINDS}
    assert losses["converged"] < 1e-3 < losses["trained"] < 3 < losses["identical"]
