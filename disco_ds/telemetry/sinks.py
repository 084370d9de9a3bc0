"""What a run says about itself, behind one call: console line, metrics.jsonl, TensorBoard, Weights & Biases.

Every sink gets the same names. The two JSONL files keep their steps unique and increasing over kills and resumes:
:mod:`disco_ds.telemetry.jsonlines`.
"""

from __future__ import annotations

import collections
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from disco_ds.config.schema import LoggingConfig
from disco_ds.errors import ConfigError
from disco_ds.telemetry.jsonlines import JsonLines

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"

_ETA_INTERVALS = 20
_GIB = 2**30


def check_logging(config: LoggingConfig) -> None:
    """Find out before training starts whether the sinks asked for can be had.

    Raises:
        ConfigError: a package is missing; the message names the extra that brings it.
    """
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for extra, asked in wanted.items():
        if not asked:
            continue
        try:
            importlib.import_module(modules[extra])
        except ImportError as error:
            raise ConfigError(
                f"logging.{extra} is set, but {extra} cannot be imported ({error}); "
                f"install it with: pip install 'disco-ds[{extra}]'"
            ) from None


class Telemetry:
    """The sinks of one run; only rank 0 writes, the others' calls do nothing.

    Args:
        run_dir: the run's folder; made if it is not there.
        config: the sinks wanted.
        rank: this process's rank.
        total_steps: length of the run, for "step 10/600" and the time left. None: neither is shown.
        start_step: the step that the run goes on from, 0 for a new one; lines of later steps are set aside.
        name: the run's name, for Weights & Biases.
        run_config: the resolved configuration, for Weights & Biases.
        stream: the console; stdout by default.
        clock: seconds from any origin; for tests.

    Raises:
        ConfigError: as :func:`check_logging`, on every rank.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: LoggingConfig,
        *,
        rank: int = 0,
        total_steps: int | None = None,
        start_step: int = 0,
        name: str | None = None,
        run_config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_logging(config)
        self.run_dir = Path(run_dir)
        self.rank = rank
        self._sinks: list[Any] = []
        if rank != 0:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._console = _Console(stream or sys.stdout, total_steps, start_step, clock)
        self._metrics = JsonLines(self.run_dir / METRICS_FILE, start_step)
        self._evals = JsonLines(self.run_dir / EVAL_FILE, start_step)
        if config.tensorboard:
            self._sinks.append(_TensorBoard(self.run_dir / "tensorboard", start_step))
        if config.wandb is not None:
            self._sinks.append(_WandB(self.run_dir, config.wandb, name or self.run_dir.name, run_config))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One logged step: a console line, a line of metrics.jsonl, the other sinks.

        ``metrics`` holds numbers (0-dim tensors too) under the names of metrics.jsonl: samples_seen, loss, lr,
        logit_scale, grad_norm, samples_per_s, step_s, data_wait_s, peak_memory_bytes; others are written as they are.
        """
        if self.rank != 0:
            return
        plain = _plain(metrics)
        self._console.line(step, plain)
        with self.surviving(METRICS_FILE):
            self._metrics.write({"step": step, **plain})
        self._to_sinks(step, plain)

    def log_eval(self, step: int, metrics: Mapping[str, Any], message: str | None = None) -> None:
        """One evaluation: a line of eval.jsonl, the other sinks, and ``message`` on the console.

        A second evaluation of a step, as of a finished run that is started again, takes the place of the first.
        """
        if self.rank != 0:
            return
        plain = _plain(metrics)
        with self.surviving(EVAL_FILE):
            self._evals.rewind(step - 1)
            self._evals.write({"step": step, **plain})
        if message:
            self.say(message)
        self._to_sinks(step, plain)

    def say(self, message: str) -> None:
        """A message to the user, on rank 0's console."""
        if self.rank == 0:
            self._console.say(message)

    def close(self) -> None:
        """End every sink; calling it again does nothing."""
        if self.rank != 0:
            return
        for name, lines in ((METRICS_FILE, self._metrics), (EVAL_FILE, self._evals)):
            with self.surviving(name):
                lines.close()
        while self._sinks:
            sink = self._sinks.pop()
            with self.surviving(type(sink).__name__.strip("_")):
                sink.close()

    def _to_sinks(self, step: int, plain: dict[str, Any]) -> None:
        for sink in self._sinks:
            with self.surviving(type(sink).__name__.strip("_")):
                sink.log(step, plain)

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """A full disk or a lost mount is said, and does not end a run that can go on without its log."""
        try:
            yield
        except OSError as error:
            self.say(f"WARNING: {what} could not be written: {error}. Training goes on")

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as Python's own: 0-dim tensors and NumPy scalars have item()."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


class _Console:
    """One line a logged step, the same on a terminal and in a log file."""

    def __init__(self, stream: TextIO, total_steps: int | None, start_step: int, clock: Callable[[], float]) -> None:
        self._stream, self._total, self._clock = stream, total_steps, clock
        # the pace of the last intervals, whatever filled them: evaluations and checkpoints are part of the time left
        self._marks = collections.deque([(start_step, clock())], maxlen=_ETA_INTERVALS + 1)

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)

    def line(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._marks.append((step, self._clock()))
        width = len(str(self._total or step))
        parts = [f"step {step:>{width}}/{self._total}" if self._total else f"step {step}"]
        parts += [pattern.format(metrics[name]) for name, pattern in _PATTERNS.items() if metrics.get(name) is not None]
        if metrics.get("step_s") is not None:
            wait = metrics.get("data_wait_s")
            parts.append(f"{metrics['step_s']:.3f} s/step" + ("" if wait is None else f" (data {wait:.3f})"))
        if metrics.get("peak_memory_bytes") is not None:
            parts.append(f"peak {metrics['peak_memory_bytes'] / _GIB:.2f} GiB")
        eta = self._eta(step)
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        self.say(" | ".join(parts))

    def _eta(self, step: int) -> float | None:
        first_step, first_time = self._marks[0]
        if self._total is None or step <= first_step:
            return None
        return max(0, self._total - step) * (self._marks[-1][1] - first_time) / (step - first_step)


_PATTERNS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "logit_scale": "logit_scale {:.3f}",
    "grad_norm": "grad_norm {:.3f}",
    "samples_per_s": "{:,.0f} samples/s",
}


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


class _TensorBoard:
    """Scalars under the names of metrics.jsonl; on resume TensorBoard itself hides the steps that are done again."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """One Weights & Biases run for the run's folder, taken up again on resume; WANDB_MODE=offline works."""

    def __init__(self, run_dir: Path, project: str, name: str, run_config: Mapping[str, Any] | None) -> None:
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(os.urandom(8).hex())
        self._run = wandb.init(
            project=project,
            name=name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config or {}),
        )
        # steps done again after a resume lie behind W&B's own counter, which refuses them; a metric of its own does not
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **{k: v for k, v in metrics.items() if isinstance(v, (int, float))}})

    def close(self) -> None:
        self._run.finish()
