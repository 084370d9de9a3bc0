"""The losses in one process: edge cases, autograd, dtypes; and the benchmarks that tests rest on."""

from __future__ import annotations

import math

import open_clip
import pytest
import torch
import torch.nn.functional as F

from disco_ds import ClipLoss, ContrastiveLoss, SigmoidLoss, build_loss, contrastive_loss
from tests.helpers import loss_reference
from tests.helpers.loss_reference import clip_reference, leaves, make_features, relative_error


def errors_of(loss_of, kind, seed, pairs=1024, width=512, dtype=torch.float32, loss_scale=1.0):
    """Relative errors of loss and gradients against float64, which is given the same features."""
    image, text, scale = leaves(pairs, width, kind, seed, dtype)
    loss = loss_of(image, text, scale)
    (loss * loss_scale).backward()
    expected = clip_reference(image, text, 100.0)
    errors = {"loss": relative_error(loss, expected["loss"])}
    for leaf, name in ((image, "image"), (text, "text"), (scale, "scale")):
        errors[name] = relative_error(leaf.grad.double() / loss_scale, expected[name])
    return errors


@pytest.mark.parametrize("kind", ["random", "anisotropic", "converged"])
def test_gradients_are_as_good_as_float32_allows(kind, seed):
    """At most 1e-5, or half as much again as open_clip's where that is less. It loses all digits near convergence."""
    bound = 1e-5 if kind == "converged" else min(1e-5, 1.5 * errors_of(open_clip.ClipLoss(), kind, seed)["image"])
    for options in ({"keep_logits": True}, {"keep_logits": False, "tile": 77}):
        errors = errors_of(ContrastiveLoss(**options), kind, seed)
        assert errors["loss"] < 1e-6, f"{errors} {options}"
        assert max(errors["image"], errors["text"]) < bound, f"{errors} {options}"
        # what is left of sums over all pairs, which cancel the more the narrower the cone is
        assert errors["scale"] < 1e-4, f"{errors} {options}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "trained", "converged"])
def test_sixteen_bit_features_lose_no_more_than_their_rounding(kind, dtype, seed):
    """The reference takes the same rounded features; a gradient is rounded to their dtype once, at the end."""
    # with loss scaling: a gradient of a converged model is below fp16's smallest number
    errors = errors_of(contrastive_loss, kind, seed, pairs=300, width=96, dtype=dtype, loss_scale=65536.0)
    rounded = clip_reference(*make_features(300, 96, kind, seed, dtype), 100.0)
    exact = clip_reference(*make_features(300, 96, kind, seed, torch.float64), 100.0)
    for name in ("image", "text"):
        of_features = relative_error(rounded[name], exact[name])
        assert errors[name] <= max(of_features, torch.finfo(dtype).eps), f"{name} {errors}"


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 5000.0, -20.0])
def test_any_scale(scale, seed):
    image, text, s = leaves(41, 16, "random", seed, scale=scale)
    loss = contrastive_loss(image, text, s, tile=9)
    loss.backward()
    expected = clip_reference(image, text, scale)
    assert relative_error(loss, expected["loss"]) < 2e-6
    rounding = 8 * abs(scale) * torch.finfo(torch.float32).eps  # of a logit, in units of the gradient it leads to
    for gradient, name in ((image.grad, "image"), (text.grad, "text"), (s.grad, "scale")):
        error = (gradient.double() - expected[name]).norm()
        floor = 0.01 if name == "scale" else 0.0  # a mean of cosines that may cancel
        assert error <= max(1e-5, rounding) * max(expected[name].norm(), floor), name


@pytest.mark.parametrize(("pairs", "rounding"), [(64, 1e-5), (1, 0.0)])
def test_identical_features_and_a_batch_of_one_have_the_loss_of_chance_and_no_gradient(pairs, rounding):
    image, text, scale = leaves(pairs, 16, "identical")
    loss = contrastive_loss(image, text, scale, tile=10)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(pairs), rel=1e-6, abs=0)
    assert all(leaf.grad.abs().max() <= rounding for leaf in (image, text, scale))


@pytest.mark.parametrize(
    ("image", "text", "options", "word"),
    [
        (torch.empty(0, 4), torch.empty(0, 4), {}, "empty"),
        (torch.ones(4), torch.ones(4), {}, "two dimensions"),
        (torch.ones(3, 4), torch.ones(2, 4), {}, "rows"),
        (torch.ones(3, 4), torch.ones(3, 5), {}, "width"),
        (torch.ones(3, 4), torch.ones(3, 4).half(), {}, "float16"),
        (torch.ones(3, 4).int(), torch.ones(3, 4).int(), {}, "float32, bfloat16"),
        (torch.ones(3, 4), torch.ones(3, 4), {"tile": -2}, "tile"),
        (torch.ones(3, 4), torch.ones(3, 4), {"keep_logits": "maybe"}, "keep_logits"),
    ],
)
def test_what_is_wrong_is_refused(image, text, options, word):
    with pytest.raises(ValueError, match=word):
        contrastive_loss(image, text, 1.0, **options)


def test_upstream_gradients_of_any_size_and_number():
    image, text, scale = leaves()
    once = torch.autograd.grad(contrastive_loss(image, text, scale), (image, text, scale))
    loss = contrastive_loss(image, text, scale)
    ((loss * 65536.0) + loss / 4).backward(retain_graph=True)
    for leaf, gradient in zip((image, text, scale), once, strict=True):
        torch.testing.assert_close(leaf.grad, gradient * 65536.25)
    torch.testing.assert_close(torch.autograd.grad(loss, image)[0], once[0])


@pytest.mark.parametrize("kind", ["one_block", "sigmoid"])
def test_a_second_derivative_is_refused(kind):
    image, text, scale = leaves()
    loss = build_loss(kind)(image, text, scale, torch.tensor(0.0))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, image, create_graph=True)


def test_scale_and_bias_of_every_form():
    image, text, _ = leaves()
    expected = contrastive_loss(image, text, 20.0).item()
    for scale in (torch.tensor(20.0), torch.tensor([20.0], requires_grad=True), torch.tensor(20.0).bfloat16(), 20):
        bias = torch.tensor([1.0], requires_grad=True)
        loss = contrastive_loss(image, text, scale, bias)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert torch.equal(bias.grad, torch.zeros(1))
        assert not getattr(scale, "requires_grad", False) or scale.grad.shape == (1,)


def test_features_that_are_not_contiguous():
    image, text, scale = leaves()
    expected = torch.autograd.grad(contrastive_loss(image, text, scale), (image, text))
    turned = [x.detach().T.contiguous().T.requires_grad_() for x in (image, text)]
    assert not turned[0].is_contiguous()
    for got, want in zip(torch.autograd.grad(contrastive_loss(*turned, scale), turned), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inputs_are_left_alone(dtype):
    image, text, scale = leaves(dtype=dtype)
    for kind in ("one_block", "sigmoid"):
        build_loss(kind)(image, text, scale).backward()
    assert all(map(torch.equal, (image, text), make_features(37, 24, "trained", 0, dtype)))


def test_no_grad_and_frozen_towers_skip_the_work(monkeypatch):
    made = []
    monkeypatch.setattr("disco_ds.loss.contrastive.Gradients", lambda *a: made.append(a))
    image, text, scale = leaves()
    with torch.no_grad():
        assert not contrastive_loss(image, text, scale).requires_grad
    assert not contrastive_loss(image.detach(), text.detach(), 5.0).requires_grad
    assert not made


def test_autocast_is_off_inside():
    image, text, scale = leaves()
    for loss in (ContrastiveLoss(), SigmoidLoss()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss(image, text, scale, 0.0)
        assert torch.equal(found, loss(image, text, scale, 0.0))


def test_under_torch_compile_the_loss_is_an_opaque_call():
    image, text, scale = leaves()
    module = torch.nn.Linear(24, 24)

    def step(x, y):
        return ContrastiveLoss()(F.normalize(module(x), dim=1), F.normalize(module(y), dim=1), scale)

    expected = torch.autograd.grad(step(image, text), module.weight)[0]
    got = torch.autograd.grad(torch.compile(step, backend="aot_eager")(image, text), module.weight)[0]
    torch.testing.assert_close(got, expected)


def test_clip_loss_takes_the_place_of_open_clips():
    image, text, scale = leaves()
    options = {"local_loss": True, "gather_with_grad": True, "cache_labels": True, "rank": 0, "world_size": 1}
    ours, theirs = ClipLoss(**options), open_clip.ClipLoss(**options)
    torch.testing.assert_close(ours(image, text, scale), theirs(image, text, scale))
    bias = torch.tensor(-3.0)
    got = ours(image, text, scale, logit_bias=bias, output_dict=True)
    torch.testing.assert_close(got, theirs(image, text, scale, logit_bias=bias, output_dict=True))
    with pytest.raises(ValueError, match="horovod"):
        ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="rank 1 of 2"):
        ClipLoss(rank=1, world_size=2)(image, text, scale)


def test_sigmoid_loss_equals_open_clips_and_float64(seed):
    image, text, _ = leaves(50, 24, "trained", seed)
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
    loss = SigmoidLoss(tile=13)(image, text, scale, bias)
    torch.testing.assert_close(loss, open_clip.loss.SigLipLoss()(image, text, scale, bias))
    loss.backward()
    expected = loss_reference.sigmoid_reference(image, text, 10.0, -10.0)
    for leaf, name in ((image, "image"), (text, "text"), (scale, "scale"), (bias, "bias")):
        assert relative_error(leaf.grad, expected[name]) < 5e-6, name


def test_the_scale_benchmark_at_a_small_size(seed):
    from benchmarks.scale import run

    results = run(ranks=6, b=40, dim=32, features="trained", seed=seed, checked=50, threads=2)
    for name in ("loss_error", "image_gradient_error", "text_gradient_error", "scale_error_beside_loss"):
        rounding = 8 * 100 * torch.finfo(torch.float32).eps  # eight roundings of a logit
        assert results[name] < rounding, f"{name}: {results[name]}"


def test_the_streamed_reference_is_the_reference(seed):
    image, text = make_features(150, 40, "trained", seed)
    streamed = loss_reference.streamed_reference(image, text, 100.0, chunk=37)
    for name, value in clip_reference(image, text, 100.0).items():
        assert relative_error(streamed[name], value) < 1e-8, name


def test_build_loss_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"'ring'.*'one_block'"):
        build_loss("ring")
    with pytest.raises(TypeError):
        build_loss("sigmoid", keep_logits=True)
