"""``--profile``: a few steps under torch's profiler, a trace for each rank, and on GPUs what lay in memory when.

They come after a run's first steps, which allocate, tune and wait for loaders to start.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import profiler

from disco_ds.run.run import Run
from disco_ds.run_layout import PROFILE

_log = logging.getLogger(__name__)

WARM_UP_STEPS = 3
"""Steps of a run before the profiler starts; one more passes with it on and is not kept."""
_MEMORY_EVENTS = 200_000  # of the allocator, newest kept: some dozens of steps


class Profiler:
    """Profiles ``count`` steps of a run, once: call :meth:`step` at the end of each step, :meth:`close` after the last.

    A run that is too short for the warm-up is profiled earlier. What goes wrong is a warning and does not end the run.

    Args:
        run: the run; its folder gets ``profile/step-…/``.
        count: steps to profile; 0 for none.
    """

    def __init__(self, run: Run, count: int) -> None:
        self.run = run
        self._profile: Any = None
        left = run.schedule.steps - run.state.step
        kept = min(count, left - 1)
        if kept < 1:
            if count:
                run.telemetry.message(f"no profile: of the {max(left, 0)} steps left the first is for warming up")
            return
        waiting = max(min(WARM_UP_STEPS, left - kept - 1), 0)
        self.first = run.state.step + waiting + 1
        """Steps done when the first one that is kept begins."""
        self.last = self.first + kept
        self.folder = run.folder / PROFILE / f"step-{self.first + 1:08d}"
        self._on_gpu = run.device.type == "cuda"
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its own starts and stops are lines on the console
        activities = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * self._on_gpu
        # the step before those that are kept has the profiler on already: its own start takes time
        when = profiler.schedule(wait=waiting, warmup=1, active=kept, repeat=1)
        self._profile = profiler.profile(activities=activities, schedule=when, record_shapes=True)
        with self._ending_on_error():
            self._profile.start()
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    def step(self) -> float:
        """A step has ended. After the last one to keep the files are written.

        Returns:
            seconds that this took and that are no step time.
        """
        began = time.monotonic()
        if self._profile is not None and self.run.state.step == self.last:
            self.close()
        elif self._profile is not None:
            with self._ending_on_error():
                self._profile.step()
        return time.monotonic() - began

    def close(self) -> None:
        """The run ends: write what there is, if one of the steps to keep has been made."""
        if self._profile is None:
            return
        with self._ending_on_error():
            self._profile.stop()
            if self.run.state.step <= self.first:
                raise RuntimeError("the run was stopped before the steps to profile")
            self._write(self._profile)
            self._end()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._end()
            _log.warning("no profile: %s", error)

    def _end(self) -> None:
        self._profile = None
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profile: Any) -> None:
        self.run.watchdog.progress(f"step {self.run.state.step}: writes its profile")
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank{dist.get_rank()}.json.gz"
        profile.export_chrome_trace(str(trace))
        lines = [f"profile: {self.folder}", f"  {trace.name}, a file a rank: open it at https://ui.perfetto.dev"]
        if self._on_gpu:
            snapshot = self.folder / f"memory-rank{dist.get_rank()}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            lines.append(f"  {snapshot.name}, a file a rank: open it at https://docs.pytorch.org/memory_viz")
        self.run.telemetry.message("\n".join(lines))
