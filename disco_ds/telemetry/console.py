"""One line a logged step, the same on a terminal and in a log file."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_ETA_INTERVALS = 20
_GIB = 2**30
_PATTERNS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "logit_scale": "logit_scale {:.3f}",
    "grad_norm": "grad_norm {:.3f}",
    "samples_per_s": "{:,.0f} samples/s",
}


class Console:
    """Prints messages and metrics; arguments as :class:`disco_ds.telemetry.sinks.Telemetry` has them."""

    def __init__(self, stream: TextIO, total_steps: int | None, start_step: int, clock: Callable[[], float]) -> None:
        self._stream, self._total, self._clock = stream, total_steps, clock
        # the pace of the last intervals, whatever filled them: evaluations and checkpoints are part of the time left
        self._marks = collections.deque([(start_step, clock())], maxlen=_ETA_INTERVALS + 1)

    def message(self, text: str) -> None:
        """Print ``text`` at once."""
        print(text, file=self._stream, flush=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the line of a step; what is not in ``metrics`` is left out."""
        self._marks.append((step, self._clock()))
        width = len(str(self._total or step))
        parts = [f"step {step:>{width}}/{self._total}" if self._total else f"step {step}"]
        parts += [pattern.format(metrics[name]) for name, pattern in _PATTERNS.items() if metrics.get(name) is not None]
        step_s, wait, peak = (metrics.get(name) for name in ("step_s", "data_wait_s", "peak_memory_bytes"))
        if step_s is not None:
            parts.append(f"{step_s:.3f} s/step" + ("" if wait is None else f" (data {wait:.3f})"))
        if peak is not None:
            parts.append(f"peak {peak / _GIB:.2f} GiB")
        first_step, first_time = self._marks[0]
        if self._total is not None and step > first_step:
            pace = (self._marks[-1][1] - first_time) / (step - first_step)
            parts.append(f"ETA {duration(max(0, self._total - step) * pace)}")
        self.message(" | ".join(parts))


def duration(seconds: float) -> str:
    """Seconds as a person reads them: "42s", "3m05s", "2h07m", "3d04h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"
