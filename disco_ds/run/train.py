"""The training loop: load, step, log, evaluate, save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from disco_ds import run_layout
from disco_ds.checkpoint.save import save_checkpoint
from disco_ds.data.cursor import merge_states
from disco_ds.data.heldout import read_heldout
from disco_ds.distributed import any_rank, everyones
from disco_ds.engine.optimizer import set_learning_rate
from disco_ds.errors import CheckpointError
from disco_ds.evaluation.evaluate import evaluate
from disco_ds.evaluation.result import EvalResult
from disco_ds.model.preprocess import build_transform, preprocessing
from disco_ds.run.profiler import Profiler
from disco_ds.run.recorder import compare_memory, record_end, record_evaluation
from disco_ds.run.run import Run
from disco_ds.run.skipped_steps import count_skipped
from disco_ds.run.window import Window

MEMORY_STEP = 3
"""The step after which memory is compared with the plan: allocator and optimizer states have settled."""


def train(run: Run) -> None:
    """Train to the end of the run, or to a SIGTERM, which saves and returns."""
    config, state, result = run.config, run.state, None
    window, signals, profiler = Window(run), _receive_signals(), Profiler(run, config.logging.profile_steps)
    batches, last_save = iter(run.stream), time.monotonic()
    while state.step < run.schedule.steps:
        run.watchdog.progress(f"step {state.step + 1}: waits for data")
        batch = window.timed_next(batches)
        run.watchdog.progress(f"step {state.step + 1}: trains")
        set_learning_rate(run.engine.optimizer, run.schedule(state.step))
        outcome = run.train_step(batch.images, batch.texts)
        state.step += 1
        state.samples_seen += run.global_batch
        count_skipped(run, outcome, batch.keys)
        if state.step == MEMORY_STEP:
            compare_memory(run)
        last = state.step == run.schedule.steps
        if last or state.step % config.logging.every_steps == 0:
            run.telemetry.log(state.step, window.metrics(outcome))
        if config.data.val is not None and (last or _is_due(config.evaluation.every_steps, state.step)):
            result = evaluate_heldout(run)
            window.restart()
        save_due = signal.SIGUSR1 in signals or _save_is_due(run, last_save)
        signals.discard(signal.SIGUSR1)
        stopping, save_due = any_rank(signal.SIGTERM in signals, save_due, group=run.control)
        if last or save_due or stopping:
            save(run, must_succeed=last or stopping)
            last_save = time.monotonic()
        window.started += profiler.step()
        if stopping:
            break
    profiler.close()
    if state.step < run.schedule.steps:
        again = "the same command" if config.resume == "auto" else "the same command with --resume auto"
        run.telemetry.message(f"stopped by SIGTERM at step {state.step}, saved; {again} goes on from here")
    else:
        if result is None and config.data.val is not None:  # a resumed run that had nothing left to do
            result = evaluate_heldout(run)
        record_end(run, result)
    run.telemetry.close()
    run.watchdog.close()
    dist.barrier(group=run.control)


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def _save_is_due(run: Run, last_save: float) -> bool:
    every_minutes = run.config.checkpoint.every_minutes
    by_time = every_minutes is not None and time.monotonic() - last_save >= 60 * every_minutes
    return by_time or _is_due(run.config.checkpoint.every_steps, run.state.step)


def evaluate_heldout(run: Run) -> EvalResult:
    """Evaluate on the held-out pairs and write down what was found; the same numbers on every rank."""
    run.watchdog.progress(f"step {run.state.step}: evaluates")
    preprocess = preprocessing(run.engine.module)
    batches = read_heldout(
        run.config.data, transform=build_transform(run.engine.module, training=False), tokenizer=run.tokenizer,
        rank=dist.get_rank(), world_size=dist.get_world_size(), batch=run.config.evaluation.batch,
    )  # fmt: skip
    result = evaluate(
        run.engine, ProgressNotes(run, batches), tokenizer=run.tokenizer, config=run.config.evaluation,
        seed=run.config.seed, mean=preprocess["mean"], std=preprocess["std"],
    )  # fmt: skip
    record_evaluation(run, result)
    return result


def _receive_signals() -> set[int]:
    """Those received from now on: SIGTERM ends the step in hand, saves and stops, SIGUSR1 saves and goes on."""
    received: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.add(number))
    return received


class ProgressNotes(Iterator[Any]):
    """The same batches; asking for one is progress, also on a rank that has no more and keeps others company."""

    def __init__(self, run: Run, batches: Iterable[Any]) -> None:
        self.run, self.batches, self.asked = run, iter(batches), 0

    def __next__(self) -> Any:
        self.asked += 1
        self.run.watchdog.progress(f"step {self.run.state.step}: evaluates, batch {self.asked}")
        return next(self.batches)


def save(run: Run, *, must_succeed: bool) -> None:
    """Write a checkpoint, the data stream's position included.

    Args:
        must_succeed: raise when it cannot be written. Else that is said and counted, and training goes on.
    """
    run.watchdog.progress(f"step {run.state.step}: saves")
    state = replace(run.state, cursor=merge_states(everyones(run.stream.state(), run.control)))
    keep, keep_every_steps = run.config.checkpoint.keep, run.config.checkpoint.keep_every_steps
    folder = run.folder / run_layout.CHECKPOINTS
    try:
        save_checkpoint(run.engine, folder, state, run.identity, keep=keep, keep_every_steps=keep_every_steps)
    except CheckpointError as error:
        if must_succeed:
            raise
        run.failed_saves += 1
        run.telemetry.message(f"WARNING: {error}. Training goes on; the checkpoints before it are as they were")
