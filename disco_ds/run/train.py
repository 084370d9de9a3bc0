"""The training loop: load, step, log, evaluate, save."""

from __future__ import annotations

import json
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from disco_ds.checkpoint.save import save_checkpoint
from disco_ds.data.cursor import merge_states
from disco_ds.data.stream import Batch
from disco_ds.distributed import any_rank, everyones, mean_over_ranks
from disco_ds.engine.deepspeed_engine import gradient_norm
from disco_ds.engine.optimizer import set_learning_rate
from disco_ds.engine.step import StepResult
from disco_ds.errors import CheckpointError
from disco_ds.evaluation.evaluate import evaluate
from disco_ds.evaluation.result import EvalResult, format_result
from disco_ds.model.preprocess import preprocessing
from disco_ds.planner import compare
from disco_ds.report.picture import write_page, write_report
from disco_ds.run.prepare import Run
from disco_ds.run.profiler import Profiler
from disco_ds.run.recorder import record_memory, record_shown, record_start
from disco_ds.run.skipped_steps import Skips

MEMORY_STEP = 3
"""The step after which memory is compared with the plan: allocator and optimizer states have settled."""


def train(run: Run) -> None:
    """Train to the end of the run, or to a SIGTERM, which saves and returns."""
    config, state, result = run.config, run.state, None
    if dist.get_rank() == 0:
        record_start(run)
    window, signals = Window(run), Signals()
    skips = Skips(run.telemetry, run.control, config.optimizer.max_skipped, state.skipped, state.skipped_in_a_row)
    profiler = Profiler(run, config.logging.profile_steps)
    batches = iter(run.stream)
    while state.step < run.schedule.steps:
        run.watchdog.note(f"step {state.step + 1}: waits for data")
        window.started += profiler.step()
        batch = window.timed_next(batches)
        run.watchdog.note(f"step {state.step + 1}: trains")
        set_learning_rate(run.engine.optimizer, run.schedule(state.step))
        outcome = run.train_step(batch.images, batch.texts)
        state.step += 1
        state.samples_seen += run.global_batch
        message = skips.note(state.step, outcome.skipped, outcome.bad_rows, batch.keys)
        state.skipped, state.skipped_in_a_row = skips.total, skips.in_a_row
        if message is not None:
            run.telemetry.message(message)
        if state.step == MEMORY_STEP:
            compare_memory(run)
        last = state.step == run.schedule.steps
        if last or state.step % config.logging.every_steps == 0:
            run.telemetry.log(state.step, window.metrics(outcome))
        every = config.evaluation.every_steps
        if config.data.val is not None and (last or (every is not None and state.step % every == 0)):
            result = run_evaluation(run)
            window.restart()
        stopping, save_due = any_rank(signals.stop, window.save_due() or signals.take_save(), group=run.control)
        if last or save_due or stopping:
            save(run, must_succeed=last or stopping)
            window.saved()
        if stopping or last:
            profiler.close()
        if stopping and not last:
            again = "the same command" if config.resume == "auto" else "the same command with --resume auto"
            run.telemetry.message(f"stopped by SIGTERM at step {state.step}, saved; {again} goes on from here")
            run.telemetry.close()
            run.watchdog.close()
            return
    finish(run, result)


def compare_memory(run: Run) -> None:
    """On a GPU, the memory measured so far beside what the planner predicts; a warning when they are far apart."""
    if run.device.type != "cuda" or dist.get_rank() != 0:
        return
    try:
        prediction = compare.predict_run(run.config, run.engine_config, device=run.device)
    except Exception as error:  # a model that cannot be traced is no reason to stop: this is advice
        run.telemetry.message(f"memory: not predicted ({error})")
        return
    measured = compare.measure(run.engine, run.device)
    record_memory(run, prediction, measured)
    line, warning = compare.beside_plan(prediction, measured)
    run.telemetry.message(line)
    if warning is not None:
        run.telemetry.message(warning)


def finish(run: Run, result: EvalResult | None) -> None:
    """The end of a run: its result next to chance on the console, in result.json and in report.png."""
    if result is None and run.config.data.val is not None:  # a resumed run that had nothing left to do
        result = run_evaluation(run)
    if dist.get_rank() == 0:
        metrics = {} if result is None else result.metrics
        outcome = {"steps": run.state.step, "samples_seen": run.state.samples_seen, **metrics}
        with run.telemetry.log_and_continue("result.json"):
            (run.folder / "result.json").write_text(json.dumps(outcome, indent=1) + "\n")
        report = None
        with run.telemetry.log_and_continue("report.png"):
            report = write_report(run.folder, result)
        page = write_page(run.folder)
        made = [f"picture: {report}"] * bool(report) + [f"report: {page}"] * bool(page)
        run.telemetry.message("; ".join([f"finished {run.folder}", *made]))
    run.telemetry.close()
    run.watchdog.close()
    dist.barrier(group=run.control)


def run_evaluation(run: Run) -> EvalResult:
    """Evaluate on the held-out pairs; the same numbers on every rank."""
    run.watchdog.note(f"step {run.state.step}: evaluates")
    preprocess = preprocessing(run.engine.module)
    result = evaluate(
        run.engine,
        Noted(run, run.heldout()),
        tokenizer=run.tokenizer,
        config=run.config.evaluation,
        seed=run.config.seed,
        mean=preprocess["mean"],
        std=preprocess["std"],
    )
    run.telemetry.log_eval(run.state.step, result.metrics, format_result(result))
    if dist.get_rank() == 0:
        record_shown(run, result)
    return result


class Noted(Iterator[Any]):
    """The same batches; asking for one is progress, also on a rank that has no more and keeps others company."""

    def __init__(self, run: Run, batches: Iterable[Any]) -> None:
        self.run, self.batches, self.asked = run, iter(batches), 0

    def __next__(self) -> Any:
        self.asked += 1
        self.run.watchdog.note(f"step {self.run.state.step}: evaluates, batch {self.asked}")
        return next(self.batches)


def save(run: Run, *, must_succeed: bool) -> None:
    """Write a checkpoint, the data stream's position included.

    Args:
        must_succeed: raise when it cannot be written. Else that is said and counted, and training goes on: the disk may
            have room again before the next one is due, and the last good checkpoint is as it was.
    """
    run.watchdog.note(f"step {run.state.step}: saves")
    state = replace(run.state, cursor=merge_states(everyones(run.stream.state(), run.control)))
    kept = run.config.checkpoint
    try:
        save_checkpoint(
            run.engine, run.checkpoints, state, run.identity, keep=kept.keep, keep_every_steps=kept.keep_every_steps
        )
    except CheckpointError as error:
        if must_succeed:
            raise
        run.failed_saves += 1
        run.telemetry.message(f"WARNING: {error}. Training goes on; the checkpoints before it are as they were")


class Signals:
    """Remembers SIGTERM (end the step in hand, save, stop) and SIGUSR1 (save and go on)."""

    def __init__(self) -> None:
        self.stop = self.save = False
        signal.signal(signal.SIGTERM, self._note)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.stop = self.stop or number == signal.SIGTERM
        self.save = self.save or number != signal.SIGTERM

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self.save = self.save, False
        return asked


class Window:
    """Counts and times between two log lines, and knows when the next save by minutes is due."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.last_save = time.monotonic()
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

    def save_due(self) -> bool:
        """Whether a save by steps or by minutes is due now."""
        config = self.run.config.checkpoint
        by_steps = config.every_steps is not None and self.run.state.step % config.every_steps == 0
        elapsed_min = (time.monotonic() - self.last_save) / 60
        return by_steps or (config.every_minutes is not None and elapsed_min >= config.every_minutes)

    def saved(self) -> None:
        """A checkpoint has just been written, or could not be."""
        self.last_save = time.monotonic()

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
            "peak_memory_bytes": peak_memory_bytes(run.device),
            "bad_samples": dict(sum((Counter(f) for f in faults), Counter())),
        }
        self.faults.clear()
        self.restart()
        return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
