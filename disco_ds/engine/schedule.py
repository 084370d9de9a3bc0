"""The learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disco_ds.config.schema import RunConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then cosine, constant, or constant with a linear cooldown. Lengths are in optimizer steps."""

    kind: str
    peak: float
    end: float
    steps: int
    warmup: int
    cooldown: int

    def __call__(self, step: int) -> float:
        """Learning rate of step ``step``, counted from 0; the first step of a warm-up of w has peak / w, not 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / max(self.steps - self.warmup, 1)
            return self.end + (self.peak - self.end) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        left = self.steps - step
        if self.kind == "cooldown" and left <= self.cooldown:
            return self.end + (self.peak - self.end) * max(left, 0) / self.cooldown
        return self.peak


def build_schedule(config: RunConfig, global_batch: int) -> Schedule:
    """The run's schedule; lengths given in samples are rounded up to whole steps of ``global_batch`` samples."""

    def length(in_steps: int | None, in_samples: int | None, default: int) -> int:
        if in_steps is not None:
            return in_steps
        return default if in_samples is None else math.ceil(in_samples / global_batch)

    options, steps = config.schedule, length(config.steps, config.samples, 0)
    warmup = length(options.warmup_steps, options.warmup_samples, min(math.ceil(steps / 10), 2000))
    cooldown = length(options.cooldown_steps, options.cooldown_samples, max(steps // 5, 1))
    return Schedule(options.kind, config.optimizer.lr, options.lr_end, steps, warmup, max(cooldown, 1))
