"""The steps between two log lines: their times and faults, and the metrics that are logged of them."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from disco_ds.data.stream import Batch
from disco_ds.distributed import everyones, mean_over_ranks
from disco_ds.engine.deepspeed_engine import gradient_norm
from disco_ds.engine.step import StepResult
from disco_ds.run.run import Run


class Window:
    """Counts and times between two log lines."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.faults: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """Begin a new window: what came before (evaluation, say) is no step time. Faults stay until they are logged."""
        self.run.train_step.timer.read()
        self.started = time.monotonic()
        self.first_step = self.run.state.step
        self.data_wait_s = 0.0

    def timed_next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time it took is data wait."""
        begin = time.monotonic()
        batch = next(batches)
        self.data_wait_s += time.monotonic() - begin
        self.faults.update(batch.faults)
        return batch

    def metrics(self, outcome: StepResult) -> dict[str, Any]:
        """What is logged of the last step and the window that ends with it. A collective; restarts the window."""
        run = self.run
        loss, norm = mean_over_ranks(outcome.loss), gradient_norm(run.engine)
        steps = max(run.state.step - self.first_step, 1)
        step_s = (time.monotonic() - self.started) / steps
        faults = everyones(dict(self.faults), run.control)
        metrics = {
            "samples_seen": run.state.samples_seen,
            "loss": loss,
            "lr": run.schedule(run.state.step - 1),
            "logit_scale": float(outcome.logit_scale),
            "grad_norm": norm,
            "samples_per_s": run.global_batch / step_s,
            "step_s": step_s,
            "data_wait_s": self.data_wait_s / steps,
            **{f"time_in_{name}": seconds / steps / step_s for name, seconds in run.train_step.timer.read().items()},
            "time_in_data": self.data_wait_s / steps / step_s,
            "skipped_steps": run.state.skipped,
            "failed_saves": run.failed_saves,
            "peak_memory_bytes": _peak_memory_bytes(run.device),
            "bad_samples": dict(sum((Counter(f) for f in faults), Counter())),
        }
        self.faults.clear()
        self.restart()
        return metrics


def _peak_memory_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
