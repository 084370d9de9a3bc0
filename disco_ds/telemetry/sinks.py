"""What a run reports, behind one call: console line, metrics.jsonl, TensorBoard, Weights & Biases.

Every sink gets the same names. The two JSONL files keep their steps unique and increasing over kills and resumes:
:mod:`disco_ds.telemetry.jsonlines`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from disco_ds import run_layout
from disco_ds.errors import ConfigError
from disco_ds.telemetry.console import Console
from disco_ds.telemetry.jsonlines import set_aside_after, write_line


def check_logging(*, tensorboard: bool, wandb: str | None) -> None:
    """Find out before training starts whether the sinks asked for can be had.

    Raises:
        ConfigError: a package is missing; the message names the extra that brings it.
    """
    wanted = {"tensorboard": "torch.utils.tensorboard"} if tensorboard else {}
    for extra, module in (wanted | ({} if wandb is None else {"wandb": "wandb"})).items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"logging.{extra} is set, but {extra} cannot be imported ({error}); "
                f"install it with: pip install 'disco-ds[{extra}]'"
            ) from None


class Telemetry:
    """The sinks of one run; only rank 0 writes, the others' calls do nothing.

    Args:
        run_dir: the run's folder; made if it is not there.
        tensorboard: whether to write TensorBoard events.
        wandb: Weights & Biases project, None for none.
        rank: this process's rank.
        total_steps: length of the run, for "step 10/600" and the time left. None: neither is shown.
        start_step: the step that the run goes on from, 0 for a new one; lines of later steps are set aside.
        run_config: the resolved configuration, for Weights & Biases.
        stream: the console; stdout by default.
        clock: seconds from any origin; for tests.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool = False,
        wandb: str | None = None,
        rank: int = 0,
        total_steps: int | None = None,
        start_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._sinks: dict[str, Any] = {}
        if rank != 0:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._console = Console(stream or sys.stdout, total_steps, start_step, clock)
        self._metrics, self._evals = run_dir / run_layout.METRICS, run_dir / run_layout.EVALS
        set_aside_after(self._metrics, start_step)
        set_aside_after(self._evals, start_step)
        if tensorboard:
            self._sinks["TensorBoard"] = _TensorBoard(run_dir / run_layout.TENSORBOARD, start_step)
        if wandb is not None:
            self._sinks["W&B"] = _WandB(run_dir, wandb, run_config)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One logged step: a console line, a line of metrics.jsonl, the other sinks.

        ``metrics`` holds numbers (0-dim tensors too); the console shows those that it knows, see ``console.py``.
        """
        if self.rank != 0:
            return
        plain = _plain(metrics)
        self._console.log(step, plain)
        with self.log_and_continue(run_layout.METRICS):
            write_line(self._metrics, {"step": step, **plain})
        self._to_sinks(step, plain)

    def log_eval(self, step: int, metrics: Mapping[str, Any], message: str | None = None) -> None:
        """One evaluation: a line of eval.jsonl, the other sinks, and ``message`` on the console.

        A second evaluation of a step, as of a finished run that is started again, takes the place of the first.
        """
        if self.rank != 0:
            return
        plain = _plain(metrics)
        with self.log_and_continue(run_layout.EVALS):
            set_aside_after(self._evals, step - 1)
            write_line(self._evals, {"step": step, **plain})
        if message:
            self.message(message)
        self._to_sinks(step, plain)

    def _to_sinks(self, step: int, plain: dict[str, Any]) -> None:
        numbers = {name: value for name, value in plain.items() if isinstance(value, (int, float))}
        for name, sink in self._sinks.items():
            with self.log_and_continue(name):
                sink.log(step, numbers)

    def message(self, text: str) -> None:
        """Tell the user something, on rank 0's console."""
        if self.rank == 0:
            self._console.message(text)

    @contextmanager
    def log_and_continue(self, what: str) -> Iterator[None]:
        """An OSError inside (a full disk, a lost mount) is a warning: a run can go on without its log."""
        try:
            yield
        except OSError as error:
            self.message(f"WARNING: {what} could not be written: {error}. Training goes on")

    def close(self) -> None:
        """End every sink; calling it again does nothing."""
        sinks, self._sinks = self._sinks, {}
        for name, sink in sinks.items():
            with self.log_and_continue(name):
                sink.close()


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as Python's own: 0-dim tensors and NumPy scalars have item()."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


class _TensorBoard:
    """Scalars under the names of metrics.jsonl; on resume TensorBoard itself hides the steps that are done again."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
        self.close = self._writer.close

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class _WandB:
    """One Weights & Biases run for the run's folder, taken up again on resume; WANDB_MODE=offline works."""

    def __init__(self, run_dir: Path, project: str, run_config: Mapping[str, Any] | None) -> None:
        import wandb

        id_file = run_dir / run_layout.WANDB_ID
        if not id_file.exists():
            id_file.write_text(os.urandom(8).hex())
        self._run = wandb.init(
            project=project, name=run_dir.name, id=id_file.read_text().strip(), resume="allow", dir=str(run_dir),
            config=dict(run_config or {}),
        )  # fmt: skip
        self.close = self._run.finish
        # steps done again after a resume lie behind W&B's own counter, which refuses them; a metric of its own does not
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics})
