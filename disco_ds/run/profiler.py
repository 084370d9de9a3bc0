"""``--profile``: a few steps under torch's profiler, a trace for each rank, and on GPUs what lay in memory when.

Off, a :class:`Profiler` does nothing. The steps profiled come after the first ones, which allocate, tune and wait for
loaders to start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from disco_ds.engine.phases import PhaseTimer
from disco_ds.run_layout import PROFILE

if TYPE_CHECKING:
    from disco_ds.run.prepare import Run

_log = logging.getLogger(__name__)

WARM_UP_STEPS = 3
"""Steps of a run before the profiler starts; one more passes with it on and is not kept."""
_MEMORY_EVENTS = 200_000  # of the allocator, newest kept: some dozens of steps


class Profiler:
    """Profiles ``count`` steps of a run, once: call :meth:`step` at the start of each step, :meth:`close` at the end.

    A run that is too short for the warm-up is profiled earlier. What goes wrong is said and does not end the run.

    Args:
        run: the run; its folder gets ``profile/step-…/``.
        count: steps to profile; 0 for none.
    """

    def __init__(self, run: Run, count: int) -> None:
        left = run.schedule.steps - run.state.step
        self.run, self.count = run, min(count, left - 1)
        # the last step before those that are kept has the profiler on already: its own start takes time
        self.first = run.state.step + max(min(WARM_UP_STEPS, left - self.count - 1), 0)
        self.folder = run.folder / PROFILE / f"step-{self.first + 2:08d}"
        self._torch: Any = None
        self._timer: PhaseTimer | None = None
        self._done = self.count < 1
        if count and self._done:
            run.telemetry.message(f"no profile: the run has {max(left, 0)} steps left, and the first is for warming up")

    def step(self) -> float:
        """A step begins. Before the first one to keep the profiler starts, after the last one it writes its files.

        Returns:
            seconds that this took and that are no step time.
        """
        if self._done:
            return 0.0
        at, began = self.run.state.step, time.monotonic()
        try:
            if self._torch is None:
                if at >= self.first:
                    self._start()
            else:
                self._torch.step()
                if at > self.first + self.count:
                    self._finish()
        except (RuntimeError, OSError) as error:
            self._give_up(error)
        return time.monotonic() - began

    def close(self) -> None:
        """The run ends: write what there is, if one of the steps to keep has been made."""
        if self._torch is None or self._done:
            return
        try:
            self._torch.step()
            if self.run.state.step > self.first + 1:
                self._finish()
            else:
                self._give_up("the run was stopped before the steps to profile")
        except (RuntimeError, OSError) as error:
            self._give_up(error)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its own starts and stops are lines on the console
        gpu = self.run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        self._torch = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=self.count, repeat=1),
            record_shapes=True,
        )  # fmt: skip
        self._torch.start()
        self._timer, self.run.train_step.timer = self.run.train_step.timer, _NamedPhases(self.run.train_step.timer)
        if gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    def _finish(self) -> None:
        self._done = True
        rank = dist.get_rank()
        self.run.watchdog.note(f"step {self.run.state.step}: writes its profile")
        self.folder.mkdir(parents=True, exist_ok=True)
        trace, snapshot = self.folder / f"trace-rank{rank}.json.gz", self.folder / f"memory-rank{rank}.pickle"
        self._stop()
        self._torch.export_chrome_trace(str(trace))
        if self.run.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.run.telemetry.message(_words(self.folder, trace, snapshot if snapshot.exists() else None))

    def _stop(self) -> None:
        if self._timer is not None:
            self.run.train_step.timer, self._timer = self._timer, None
            self._torch.stop()

    def _give_up(self, why: Exception | str) -> None:
        self._done = True
        with contextlib.suppress(RuntimeError):  # it may be what has just failed
            self._stop()
            if self.run.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
        _log.warning("no profile: %s", why)


def _words(folder: Path, trace: Path, snapshot: Path | None) -> str:
    lines = [f"profile: {folder}", f"  {trace.name}, a file a rank: open it at https://ui.perfetto.dev"]
    if snapshot is not None:
        lines.append(f"  {snapshot.name}, a file a rank: open it at https://docs.pytorch.org/memory_viz")
    return "\n".join(lines)


class _NamedPhases(PhaseTimer):
    """The step's phases, timed as ever and with their names in the trace."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"phase: {name}"), self._timer(name):
            yield

    def read(self) -> dict[str, float]:
        """As :meth:`PhaseTimer.read`."""
        return self._timer.read()
