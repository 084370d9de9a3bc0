"""One optimizer step from one global batch, the loss seeing all of it.

Whole: forward, loss, backward, step. Cached (GradCache, arXiv 2101.06983): the rank's batch is cut into k
micro-batches; features first, without gradients; the loss once on all of them; then each micro-batch again, with the
random state of its first pass, and the cached gradient of its features driven through the engine. Both give the same
gradient for every parameter, and every rank calls the engine equally often, which ZeRO-3 needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.activations import frozen_statistics
from disco_ds.engine import note_plain_gradient_norm
from disco_ds.model import Features
from disco_ds.temperature import clamp_temperatures

Loss = Callable[..., Tensor]


@dataclass
class StepResult:
    """What a step leaves behind, still on the device: nothing here has waited for it."""

    loss: Tensor
    """This rank's loss, 0-dim float32; the mean over ranks is the loss of the global batch."""
    logit_scale: Tensor
    """The scale that multiplied the logits, shape (1,)."""


@dataclass
class CachedGradients:
    """Gradient of the loss for each of its inputs over the rank's whole batch; None where a tower is locked."""

    image_features: Tensor | None
    text_features: Tensor | None
    logit_scale: Tensor
    logit_bias: Tensor | None


class RandomState:
    """The random generators of CPU and device as they are now, to be put back for a second pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class TrainStep:
    """Makes one optimizer step a call.

    Args:
        engine: DeepSpeedEngine over a :class:`~disco_ds.model.TwoTowers`.
        loss: its mean over ranks is the global loss; its gradient is exact once the engine has averaged over ranks.
        accumulation: micro-batches per step, k. 1: whole.
        device: where the towers are; batches may still be on the host.
    """

    def __init__(self, engine: Any, loss: Loss, accumulation: int, device: torch.device) -> None:
        self.engine = engine
        self.loss = loss
        self.accumulation = accumulation
        self.device = device

    def __call__(self, images: Tensor, texts: Tensor) -> StepResult:
        """One step from this rank's images (b, 3, H, W) and texts (b, context); b divides by k."""
        result = self.backward(images, texts)
        self.update()
        return result

    def backward(self, images: Tensor, texts: Tensor) -> StepResult:
        """Forward, loss and backward: afterwards the engine holds the gradient of the global batch."""
        return self._whole(images, texts) if self.accumulation == 1 else self._cached(images, texts)

    def update(self) -> None:
        """The optimizer's update from the gradient that the engine holds."""
        note_plain_gradient_norm(self.engine)
        self.engine.step()
        clamp_temperatures(self.engine)

    def _whole(self, images: Tensor, texts: Tensor) -> StepResult:
        out: Features = self.engine(self._on_device(images), self._on_device(texts))
        loss = self.loss(out.image_features, out.text_features, out.logit_scale, out.logit_bias)
        self.engine.backward(loss)
        return StepResult(loss.detach(), out.logit_scale.detach())

    def _cached(self, images: Tensor, texts: Tensor) -> StepResult:
        micro = list(zip(images.chunk(self.accumulation), texts.chunk(self.accumulation), strict=True))
        states, outputs = self._encode_all(micro)
        loss, gradients = self._cache_gradients(outputs)
        logit_scale = outputs[-1].logit_scale.detach()
        del outputs
        after = RandomState(self.device)
        with frozen_statistics(self.engine.module):
            for index, (image, text) in enumerate(micro):
                states[index].restore()
                self.engine.set_gradient_accumulation_boundary(index == self.accumulation - 1)
                self._backward_micro(image, text, gradients, index)
        after.restore()
        return StepResult(loss, logit_scale)

    def _encode_all(self, micro: list[tuple[Tensor, Tensor]]) -> tuple[list[RandomState], list[Features]]:
        states, outputs = [], []
        with torch.no_grad():
            for image, text in micro:
                states.append(RandomState(self.device))
                outputs.append(self.engine(self._on_device(image), self._on_device(text)))
        return states, outputs

    def _cache_gradients(self, outputs: list[Features]) -> tuple[Tensor, CachedGradients]:
        """The loss on all features of the rank, and its gradient for each of its inputs."""
        freeze, last = self.engine.module.freeze, outputs[-1]
        images = torch.cat([out.image_features for out in outputs if out.image_features is not None])
        texts = torch.cat([out.text_features for out in outputs if out.text_features is not None])
        images.requires_grad_(freeze != "image")
        texts.requires_grad_(freeze != "text")
        scale = last.logit_scale.detach().requires_grad_()
        bias = None if last.logit_bias is None else last.logit_bias.detach().requires_grad_()
        loss = self.loss(images, texts, scale, bias)
        loss.backward()
        assert scale.grad is not None
        gradients = CachedGradients(images.grad, texts.grad, scale.grad, None if bias is None else bias.grad)
        return loss.detach(), gradients

    def _backward_micro(self, image: Tensor, text: Tensor, gradients: CachedGradients, index: int) -> None:
        """Forward again, with a graph, and backward of sum(output * cached gradient)."""
        out: Features = self.engine(
            None if gradients.image_features is None else self._on_device(image),
            None if gradients.text_features is None else self._on_device(text),
        )
        # logit_scale and bias belong to the whole batch: each micro-batch brings one k-th of their gradient
        total = (out.logit_scale * gradients.logit_scale).sum() / self.accumulation
        if out.logit_bias is not None and gradients.logit_bias is not None:
            total = total + (out.logit_bias * gradients.logit_bias).sum() / self.accumulation
        for feature, gradient in (
            (out.image_features, gradients.image_features),
            (out.text_features, gradients.text_features),
        ):
            if feature is not None and gradient is not None:
                total = total + (feature.float() * gradient.chunk(self.accumulation)[index].float()).sum()
        self.engine.backward(total)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def global_mean(value: Tensor) -> float:
    """Mean of a 0-dim tensor over ranks, as a number. A collective, and it waits for the device."""
    total = value.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)
