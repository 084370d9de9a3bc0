"""Where the time of a step goes, without making the step wait for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Sums the time of named phases until it is read.

    On a GPU a phase is a pair of CUDA events; they are looked at when the sums are read, between log lines nothing
    waits. On a CPU it is wall time.
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
