"""One optimizer step from one global batch, the loss seeing all of it.

Whole: forward, loss, backward, step. Cached (GradCache, arXiv 2101.06983): the rank's batch is cut into k
micro-batches; features first, without gradients; the loss once on all of them; then each micro-batch again, with the
random state of its first pass, and the cached gradient of its features driven through the engine. Both give the same
gradient for every parameter, and every rank calls the engine equally often, which ZeRO-3 needs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disco_ds.engine.deepspeed_engine import update_or_skip
from disco_ds.engine.temperature import clamp_temperatures
from disco_ds.model.activations import batch_norms, frozen_statistics
from disco_ds.model.towers import Features
from disco_ds.random_state import random_states, set_random_states


@dataclass
class StepResult:
    """What a step leaves behind, still on the device: nothing here has waited for it."""

    loss: Tensor
    """This rank's loss, 0-dim float32; the mean over ranks is the loss of the global batch."""
    logit_scale: Tensor
    """The scale that multiplied the logits, shape (1,)."""
    bad_rows: Tensor
    """(b,) bool: pairs of this rank with a feature that is not finite."""
    skipped: bool = False
    """Whether all ranks left the update out, because the gradient was not finite. Known after the update only."""


class PhaseTimer:
    """Sums the time of a step's named phases until it is read, without making the step wait for the device.

    On a GPU a phase is a pair of CUDA events, looked at when the sums are read; on a CPU it is wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Everything inside counts as phase ``name``, and is called so in a profile."""
        with torch.profiler.record_function(f"phase: {name}"):
            if self.on_gpu:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                yield
                end.record()
                self._events.append((name, begin, end))
            else:
                start = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading; waits for the device."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class TrainStep:
    """Makes one optimizer step a call.

    Args:
        engine: DeepSpeedEngine over a :class:`~disco_ds.model.build.TwoTowers`.
        loss: its mean over ranks is the global loss; its gradient is exact once the engine has averaged over ranks.
        accumulation: micro-batches per step, k. 1: whole.
        device: where the towers are.
        on_host: cached form: images wait on the host between their two passes; else on the device.
        reduce_once: cached form: one gradient reduction a step, with whole local gradients in the meantime; else one
            after each micro-batch. Stage 0 always reduces once.
        reuse_last: cached form: keep the graph of the last micro-batch's first pass for its second one, which saves a
            forward and holds its activations while the loss is computed.
    """

    def __init__(
        self,
        engine: Any,
        loss: Callable[..., Tensor],
        accumulation: int,
        device: torch.device,
        *,
        on_host: bool = True,
        reduce_once: bool = True,
        reuse_last: bool = False,
    ) -> None:
        self.engine, self.loss, self.accumulation, self.device = engine, loss, accumulation, device
        self.on_host, self.reuse_last = on_host, reuse_last
        # DeepSpeed's wrapper for bf16 with fp32 accumulation at stage 1 has no such switch (0.19.8)
        self.coalesced = reduce_once and hasattr(engine.optimizer, "_coalesce_grad_reduction")
        self.timer = PhaseTimer(device)

    def __call__(self, images: Tensor, texts: Tensor) -> StepResult:
        """One step from this rank's images (b, 3, H, W) and texts (b, context); b divides by k."""
        statistics = [(b, b.clone()) for norm in batch_norms(self.engine.module) for b in norm.buffers()]
        result = self.backward(images, texts)
        result.skipped = not self.update()
        if result.skipped:  # running statistics have already seen the bad batch
            for buffer, before in statistics:
                buffer.copy_(before)
        return result

    def backward(self, images: Tensor, texts: Tensor) -> StepResult:
        """Forward, loss and backward: afterwards the engine holds the gradient of the global batch."""
        if self.accumulation == 1:
            return self._whole(images, texts)
        if not self.on_host:
            images = self._on_device(images)
        return self._cached(images, self._on_device(texts))

    def update(self) -> bool:
        """The optimizer's update from the gradient that the engine holds; False if all ranks left it out."""
        with self.timer("step"):
            updated = update_or_skip(self.engine)
            clamp_temperatures(self.engine)
        return updated

    def _whole(self, images: Tensor, texts: Tensor) -> StepResult:
        with self.timer("forward"):
            # nothing here holds the device's copies: in bf16, autograd has no use for them once forward is over
            out: Features = self.engine(self._on_device(images), self._on_device(texts))
        with self.timer("loss"):
            loss = self.loss(out.image_features, out.text_features, out.logit_scale, out.logit_bias)
        with self.timer("backward"):
            self.engine.backward(loss)
        return StepResult(loss.detach(), out.logit_scale.detach(), _not_finite(out.image_features, out.text_features))

    def _cached(self, images: Tensor, texts: Tensor) -> StepResult:
        micro = list(zip(images.chunk(self.accumulation), texts.chunk(self.accumulation), strict=True))
        with self.timer("forward"):
            states, outputs = self._encode_all(micro)
        with self.timer("loss"):
            loss, gradients, bad_rows = self._differentiate_loss(outputs)
        last = outputs[-1]
        del outputs
        after = random_states(self.device)
        reduction = self.engine.coalesce_grad_reduction() if self.coalesced else nullcontext()
        with self.timer("backward"), reduction:
            for index, (image, text) in enumerate(micro):
                final = index == self.accumulation - 1
                if not self.coalesced:
                    self.engine.set_gradient_accumulation_boundary(final)
                if final and self.reuse_last:
                    out = last
                else:
                    set_random_states(states[index], self.device)
                    inputs = (
                        None if gradients.image_features is None else self._on_device(image),
                        None if gradients.text_features is None else text,
                    )
                    with frozen_statistics(self.engine.module):
                        out = self.engine(*inputs)
                self._backward(out, gradients, index)
        set_random_states(after, self.device)
        return StepResult(loss, last.logit_scale.detach(), bad_rows)

    def _encode_all(self, micro: list[tuple[Tensor, Tensor]]) -> tuple[list[dict[str, Any]], list[Features]]:
        states, outputs = [], []
        for index, (image, text) in enumerate(micro):
            states.append(random_states(self.device))
            with torch.set_grad_enabled(self.reuse_last and index == len(micro) - 1):
                outputs.append(self.engine(self._on_device(image), text))
        return states, outputs

    def _differentiate_loss(self, outputs: list[Features]) -> tuple[Tensor, Features, Tensor]:
        """The loss on all features of the rank, its gradients (None for a locked tower), and the rows not finite."""
        freeze, last = self.engine.module.freeze, outputs[-1]
        images = torch.cat([out.image_features.detach() for out in outputs if out.image_features is not None])
        texts = torch.cat([out.text_features.detach() for out in outputs if out.text_features is not None])
        images.requires_grad_(freeze != "image")
        texts.requires_grad_(freeze != "text")
        scale = last.logit_scale.detach().requires_grad_()
        bias = None if last.logit_bias is None else last.logit_bias.detach().requires_grad_()
        loss = self.loss(images, texts, scale, bias)
        loss.backward()
        assert scale.grad is not None
        gradients = Features(images.grad, texts.grad, scale.grad, None if bias is None else bias.grad)
        return loss.detach(), gradients, _not_finite(images, texts)

    def _backward(self, out: Features, gradients: Features, index: int) -> None:
        """Backward of sum(output * cached gradient)."""
        # logit_scale and bias belong to the whole batch: each micro-batch brings one k-th of their gradient
        total = (out.logit_scale * gradients.logit_scale).sum() / self.accumulation
        if out.logit_bias is not None and gradients.logit_bias is not None:
            total = total + (out.logit_bias * gradients.logit_bias).sum() / self.accumulation
        for feature, gradient in zip(out[:2], gradients[:2], strict=True):
            if feature is not None and gradient is not None:
                total = total + (feature.float() * gradient.chunk(self.accumulation)[index].float()).sum()
        self.engine.backward(total)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _not_finite(*features: Tensor | None) -> Tensor:
    finite = [feature.detach().isfinite().all(dim=1) for feature in features if feature is not None]
    return ~torch.stack(finite).all(dim=0)
