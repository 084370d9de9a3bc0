"""The training loop: load, step, log, evaluate, save."""

from __future__ import annotations

import json
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from disco_ds.checkpoint import RunState, save_checkpoint
from disco_ds.data.stream import Batch, merge_states
from disco_ds.engine import gradient_norm
from disco_ds.errors import ConfigError
from disco_ds.evaluate import EvalResult, evaluate, format_result
from disco_ds.model import preprocessing
from disco_ds.optimizer import set_learning_rate
from disco_ds.planner import live
from disco_ds.report import write_report
from disco_ds.setup import Run, model_identity
from disco_ds.skips import Skips
from disco_ds.step import StepResult, global_mean

MEMORY_STEP = 3
"""The step after which memory is compared with the plan: allocator and optimizer states have settled."""


def train(run: Run) -> None:
    """Train to the end of the run, or to a SIGTERM, which saves and returns."""
    config, state, result = run.config, run.state, None
    window, stop = Window(run), StopSignal()
    skips = Skips(run.folder, run.control, config.optimizer.max_skipped)
    batches = iter(run.stream)
    while state.step < run.schedule.steps:
        run.watchdog.note(f"step {state.step + 1}: waits for data")
        batch = window.timed_next(batches)
        run.watchdog.note(f"step {state.step + 1}: trains")
        set_learning_rate(run.engine.optimizer, run.schedule(state.step))
        outcome = run.train_step(batch.images, batch.texts)
        state.step += 1
        state.samples_seen += run.global_batch
        message = skips.note(state.step, outcome.skipped, outcome.bad_rows, batch.keys)
        if message is not None:
            run.telemetry.say(message)
        if state.step == MEMORY_STEP:
            compare_memory(run)
        last = state.step == run.schedule.steps
        if last or state.step % config.logging.every_steps == 0:
            run.telemetry.log(state.step, window.metrics(outcome, skips.total))
        every = config.evaluation.every_steps
        if config.data.val is not None and (last or (every is not None and state.step % every == 0)):
            result = run_evaluation(run)
            window.restart()
        stopping, save_due = agree(run, stop.requested, window.save_due())
        if last or save_due or stopping:
            save(run)
            window.saved()
        if stopping and not last:
            run.telemetry.say(f"stopped by SIGTERM at step {state.step}, saved; the same command goes on from here")
            run.telemetry.close()
            run.watchdog.close()
            return
    finish(run, result)


def compare_memory(run: Run) -> None:
    """On a GPU, the memory measured so far beside what the planner predicts; a warning when they are far apart."""
    if run.device.type != "cuda" or dist.get_rank() != 0:
        return
    try:
        prediction = live.predict_run(run.config, run.engine_config, device=run.device)
    except ConfigError as error:  # an optimizer or model that the planner does not know is no reason to stop
        run.telemetry.say(f"memory: not predicted ({error})")
        return
    line, warning = live.compare(prediction, live.measure(run.engine, run.device))
    run.telemetry.say(line)
    if warning is not None:
        run.telemetry.say(warning)


def finish(run: Run, result: EvalResult | None) -> None:
    """The end of a run: its result next to chance on the console, in result.json and in report.png."""
    if result is None and run.config.data.val is not None:  # a resumed run that had nothing left to do
        result = run_evaluation(run)
    if dist.get_rank() == 0:
        metrics = {} if result is None else result.metrics
        outcome = {"steps": run.state.step, "samples_seen": run.state.samples_seen, **metrics}
        (run.folder / "result.json").write_text(json.dumps(outcome, indent=1) + "\n")
        report = write_report(run.folder, result)
        run.telemetry.say(f"finished {run.folder}" + (f"; picture: {report}" if report else ""))
    run.telemetry.close()
    run.watchdog.close()
    dist.barrier(group=run.control)


def run_evaluation(run: Run) -> EvalResult:
    """Evaluate on the held-out pairs; the same numbers on every rank."""
    run.watchdog.note(f"step {run.state.step}: evaluates")
    preprocess = preprocessing(run.engine.module)
    result = evaluate(
        run.engine,
        run.heldout(),
        tokenizer=run.tokenizer,
        config=run.config.evaluation,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        seed=run.config.seed,
        mean=preprocess["mean"],
        std=preprocess["std"],
    )
    run.telemetry.log_eval(run.state.step, result.metrics, format_result(result))
    return result


def save(run: Run) -> None:
    """Write a checkpoint, the data stream's position included."""
    run.watchdog.note(f"step {run.state.step}: saves")
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, run.stream.state(), group=run.control)
    state = RunState(run.state.step, run.state.samples_seen, merge_states(states))
    save_checkpoint(
        run.engine,
        run.checkpoints,
        state,
        zero_stage=run.engine_config.zero_stage,
        model=model_identity(run.config),
        keep=run.config.checkpoint.keep,
    )


def agree(run: Run, *wishes: bool) -> list[bool]:
    """What any rank wishes, all ranks do: a signal or a clock may reach one rank a step before another."""
    flags = torch.tensor(wishes, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=run.control)
    return [bool(flag) for flag in flags]


class StopSignal:
    """Remembers SIGTERM, so that the step in hand ends and the run is saved."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self.requested = True


class Window:
    """Counts and times between two log lines, and knows when the next save by minutes is due."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.last_save = time.monotonic()
        self.restart()

    def restart(self) -> None:
        """Begin a new window: what came before (evaluation, say) is no step time."""
        self.run.train_step.timer.read()
        self.started = time.monotonic()
        self.first_step = self.run.state.step
        self.data_wait_s = 0.0
        self.faults: Counter[str] = Counter()

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
        """A checkpoint has just been written."""
        self.last_save = time.monotonic()

    def metrics(self, outcome: StepResult, skipped: int) -> dict[str, Any]:
        """What is logged of the last step and the window that ends with it. A collective; restarts the window."""
        run = self.run
        loss, norm = global_mean(outcome.loss), gradient_norm(run.engine)
        steps = max(run.state.step - self.first_step, 1)
        step_s = (time.monotonic() - self.started) / steps
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, dict(self.faults), group=run.control)
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
            "skipped_steps": skipped,
            "peak_memory_bytes": peak_memory_bytes(run.device),
            "bad_samples": dict(sum((Counter(f) for f in faults), Counter())),
        }
        self.restart()
        return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
