"""The losses in one process: edge cases, autograd, dtypes, memory, and that the peers fail where we do not."""

from __future__ import annotations

import open_clip
import pytest
import torch
import torch.nn.functional as F

from disco_ds.loss import passes as loss_passes
from disco_ds.loss import products as loss_products
from disco_ds.loss import tiles as loss_tiles
from disco_ds.loss.contrastive import ContrastiveLoss, build_loss, contrastive_loss, gather_ahead
from disco_ds.loss.open_clip import ClipLoss
from disco_ds.loss.sigmoid import SigmoidLoss
from tests.helpers.loss_reference import (
    clip_reference,
    fresh_seed,
    leaves,
    make_features,
    relative_error,
    sigmoid_reference,
    streamed_reference,
)


def assert_exact(image, text, scale, loss, bound=2e-6, note=""):
    expected = clip_reference(image, text, scale.detach())
    errors = {"loss": relative_error(loss, expected["loss"])}
    errors["image"] = relative_error(image.grad, expected["image"])
    errors["text"] = relative_error(text.grad, expected["text"])
    assert max(errors.values()) <= bound, f"{errors} {note}"


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["trained", "converged", "anisotropic", "mixed"])
def test_gradients_are_exact_where_plain_float32_is_not(kind, keep):
    seed = fresh_seed()
    image, text, scale = leaves(200, 96, kind, seed)
    loss = contrastive_loss(image, text, scale, keep_logits=keep, tile=64)
    loss.backward()
    assert_exact(image, text, scale, loss, note=f"seed {seed}")
    if kind == "converged":
        assert loss < 1e-3
        plain_image, plain_text, plain_scale = leaves(200, 96, kind, seed)
        open_clip.ClipLoss()(plain_image, plain_text, plain_scale).backward()
        expected = clip_reference(image, text, 100.0)["image"]
        assert relative_error(plain_image.grad, expected) > 4 * relative_error(image.grad, expected)


def test_wide_and_narrow_tiles_are_both_met(monkeypatch):
    seed, met = fresh_seed(), []
    find = loss_passes._wide
    monkeypatch.setattr(
        loss_passes, "_wide", lambda smallest: met.append((len(find(smallest)), len(smallest))) or find(smallest)
    )
    for keep in (True, False):
        image, text, scale = leaves(150, 24, "mixed", seed)
        loss = contrastive_loss(image, text, scale, tile=40, keep_logits=keep)
        loss.backward()
        assert_exact(image, text, scale, loss, note=f"seed {seed}")
    image, text, scale = leaves(150, 24, "random", seed, scale=30.0)
    contrastive_loss(image, text, scale, tile=40)
    assert met[0][0] > 0
    assert met[2] == (0, 4)


def test_small_terms_are_not_lost_beside_large_sums(monkeypatch):
    """The gradient of the scale is what is left of sums over all columns, in which small terms round to nothing."""
    seed, errors = fresh_seed(), []
    image, text = make_features(5000, 16, "trained", seed)
    expected = streamed_reference(image, text, 100.0, torch.arange(1))["scale"]
    for steps in (10**9, loss_products.COLUMN_STEPS_APART):
        monkeypatch.setattr(loss_products, "COLUMN_STEPS_APART", steps)
        scale = torch.tensor(100.0, requires_grad=True)
        contrastive_loss(image.clone().requires_grad_(), text, scale, keep_logits=False, tile=32).backward()
        errors.append(abs(scale.grad.item() / expected.item() - 1))
    assert errors[1] < 0.7 * errors[0], f"{errors}, seed {seed}"
    assert errors[1] < 5e-7, f"{errors}, seed {seed}"


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 5000.0, -20.0])
def test_any_scale(scale):
    seed = fresh_seed()
    image, text, s = leaves(41, 16, "random", seed, scale=scale)
    loss = contrastive_loss(image, text, s, tile=9)
    loss.backward()
    expected = clip_reference(image, text, scale)
    assert relative_error(loss, expected["loss"]) < 2e-6
    for gradient, name in ((image.grad, "image"), (text.grad, "text"), (s.grad, "scale")):
        error = (gradient.double() - expected[name]).norm()
        floor = 0.01 if name == "scale" else 0.0  # a mean of cosines that may cancel
        assert error <= 1e-5 * max(expected[name].norm(), floor), f"{name}, seed {seed}"


def test_identical_features_have_the_loss_of_chance_and_no_gradient():
    image, text, scale = leaves(64, 16, "identical")
    loss = contrastive_loss(image, text, scale, tile=10)
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), rel=1e-6)
    assert image.grad.abs().max() < 1e-5
    assert text.grad.abs().max() < 1e-5


def test_a_batch_of_one_has_no_loss_and_no_gradient():
    for kind in ("one_block", "clip", "disco"):
        image, text, scale = leaves(1, 8)
        loss = build_loss(kind)(image, text, scale)
        loss.backward()
        assert loss == 0
        assert scale.grad.abs() + image.grad.abs().sum() + text.grad.abs().sum() == 0


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="empty"):
        contrastive_loss(torch.empty(0, 4), torch.empty(0, 4), 1.0)


def test_upstream_gradients_of_any_size_and_number():
    image, text, scale = leaves()
    once = torch.autograd.grad(contrastive_loss(image, text, scale), (image, text, scale))
    loss = contrastive_loss(image, text, scale)
    ((loss * 65536.0) + loss / 4).backward(retain_graph=True)
    for leaf, gradient in zip((image, text, scale), once, strict=True):
        torch.testing.assert_close(leaf.grad, gradient * 65536.25)
    torch.testing.assert_close(torch.autograd.grad(loss, image)[0], once[0])


def test_float16_gradients_are_scaled_before_they_are_rounded():
    image, text, scale = leaves(300, 32, dtype=torch.float16)
    (contrastive_loss(image, text, scale) * 65536.0).backward()
    expected = clip_reference(image, text, 100.0)["image"]
    assert relative_error(image.grad.double() / 65536.0, expected) < 1e-3


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
        assert bias.grad.shape == (1,)
        assert bias.grad == 0
        if isinstance(scale, torch.Tensor) and scale.requires_grad:
            assert scale.grad.shape == (1,)


def test_features_that_are_not_contiguous():
    image, text, scale = leaves()
    expected = torch.autograd.grad(contrastive_loss(image, text, scale), (image, text))
    turned = [x.detach().T.contiguous().T.requires_grad_() for x in (image, text)]
    assert not turned[0].is_contiguous()
    for got, want in zip(torch.autograd.grad(contrastive_loss(*turned, scale), turned), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_inputs_are_left_alone():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        image, text, scale = leaves(dtype=dtype)
        before = image.detach().clone(), text.detach().clone()
        for kind in ("one_block", "sigmoid"):
            build_loss(kind)(image, text, scale).backward()
        assert torch.equal(image, before[0])
        assert torch.equal(text, before[1])


def test_no_grad_and_frozen_towers_skip_the_work(monkeypatch):
    calls = []
    monkeypatch.setattr("disco_ds.loss.contrastive.second_pass", lambda *a: calls.append(a))
    image, text, scale = leaves()
    with torch.no_grad():
        assert not contrastive_loss(image, text, scale).requires_grad
    assert not contrastive_loss(image.detach(), text.detach(), 5.0).requires_grad
    assert not calls


def test_autocast_is_off_inside():
    image, text, scale = leaves()
    expected = contrastive_loss(image, text, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrastive_loss(image, text, scale)
        sigmoid = SigmoidLoss()(image, text, scale, 0.0)
    assert torch.equal(loss, expected)
    assert torch.equal(sigmoid, SigmoidLoss()(image, text, scale, 0.0))


def test_reduced_precision_of_matrix_products_is_off_inside():
    image, text, scale = leaves(64, 64)
    expected = contrastive_loss(image, text, scale)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(contrastive_loss(image, text, scale), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_under_torch_compile_the_loss_is_an_opaque_call():
    image, text, scale = leaves()
    module = torch.nn.Linear(24, 24)

    def step(x, y):
        return ContrastiveLoss()(F.normalize(module(x), dim=1), F.normalize(module(y), dim=1), scale)

    expected = torch.autograd.grad(step(image, text), module.weight)[0]
    got = torch.autograd.grad(torch.compile(step, backend="aot_eager")(image, text), module.weight)[0]
    torch.testing.assert_close(got, expected)


def test_sixteen_bit_products_as_cuda_makes_them(monkeypatch):
    """The path of CUDA with its product replaced by one that rounds alike: operands in 16 bits, sums in float32."""

    def product(a, b, out=None):
        assert a.dtype == b.dtype != torch.float32
        result = a.float() @ b.float()
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(loss_tiles, "multiplies_16_bit", lambda features: features.dtype != torch.float32)
    monkeypatch.setattr(loss_tiles, "mm_16_bit", product)
    monkeypatch.setattr("disco_ds.loss.products.mm_16_bit", product)
    for dtype, kind in ((torch.bfloat16, "trained"), (torch.bfloat16, "converged"), (torch.float16, "converged")):
        seed = fresh_seed()
        image, text, scale = leaves(200, 64, kind, seed, dtype)
        loss = contrastive_loss(image, text, scale, tile=64) * 65536.0
        loss.backward()
        expected = clip_reference(image, text, 100.0)
        for leaf, name in ((image, "image"), (text, "text"), (scale, "scale")):
            # a feature's gradient is rounded to bf16 at the end: half a unit of 8 bits, and no more than that
            bound = 2.0**-9 + 1e-4 if name != "scale" else 3e-3
            assert relative_error(leaf.grad.double() / 65536.0, expected[name]) < bound, f"{dtype} {kind} {name} {seed}"


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


def test_sigmoid_loss_equals_open_clips_and_float64():
    seed = fresh_seed()
    image, text, _ = leaves(50, 24, "trained", seed)
    scale, bias = torch.tensor(10.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
    loss = SigmoidLoss(tile=13)(image, text, scale, bias)
    torch.testing.assert_close(loss, open_clip.loss.SigLipLoss()(image, text, scale, bias))
    loss.backward()
    expected = sigmoid_reference(image, text, 10.0, -10.0)
    for leaf, name in ((image, "image"), (text, "text"), (scale, "scale"), (bias, "bias")):
        assert relative_error(leaf.grad, expected[name]) < 2e-6, f"{name}, seed {seed}"


def test_the_scale_benchmark_at_a_small_size():
    from benchmarks.scale import run

    seed = fresh_seed()
    results = run(ranks=6, b=40, dim=32, features="trained", seed=seed, checked=50, threads=2)
    for name in ("loss_error", "image_gradient_error", "text_gradient_error", "scale_error_beside_loss"):
        # of 50 pairs: the error of few and small gradients is not averaged away
        assert results[name] < (2e-6 if name == "loss_error" else 2e-5), f"{name}: {results[name]}, seed {seed}"


def test_the_streamed_reference_is_the_reference():
    seed = fresh_seed()
    image, text = make_features(150, 40, "trained", seed)
    whole, streamed = clip_reference(image, text, 100.0), streamed_reference(image, text, 100.0, chunk=37)
    for name, value in whole.items():
        assert relative_error(streamed[name], value) < 1e-8, f"{name}, seed {seed}"


def test_gather_ahead_of_one_process_is_nothing():
    text = leaves()[1]
    assert gather_ahead(text) is text


def test_build_loss_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"'ring'.*'one_block'"):
        build_loss("ring")
    with pytest.raises(TypeError):
        build_loss("clip", tile=3)
