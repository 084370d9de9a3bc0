"""Steps left out because a loss or gradient was not finite: counted, named, and too many in a row end the run."""

from __future__ import annotations

import json

from disco_ds import run_layout
from disco_ds.distributed import everyones
from disco_ds.engine.step import StepResult
from disco_ds.errors import DivergedError
from disco_ds.files import append_line
from disco_ds.run.run import Run

_KEYS_SHOWN = 8


def count_skipped(run: Run, outcome: StepResult, keys: list[str]) -> None:
    """Count the step just made if its update was left out, write its samples down and tell the user of them.

    A collective when it was left out.

    Args:
        keys: this rank's b sample keys.

    Raises:
        DivergedError: more steps in a row than optimizer.max_skipped, on every rank.
    """
    state, allowed = run.state, run.config.optimizer.max_skipped
    if not outcome.skipped:
        state.skipped_in_a_row = 0
        return
    state.skipped += 1
    state.skipped_in_a_row += 1
    bad = [key for key, is_bad in zip(keys, outcome.bad_rows.tolist(), strict=True) if is_bad]
    by_rank = {rank: found for rank, found in enumerate(everyones(bad, run.control)) if found}
    path = run.folder / run_layout.SKIPPED
    if run.telemetry.rank == 0:
        with run.telemetry.log_and_continue(path.name):
            append_line(path, json.dumps({"step": state.step, "samples": by_rank}))
    named = [f"{key} (rank {rank})" for rank, found in by_rank.items() for key in found]
    what = "all features are finite, the gradient is not"
    if named:
        shown = ", ".join(named[:_KEYS_SHOWN]) + " …" * (len(named) > _KEYS_SHOWN)
        what = f"features of {len(named)} samples are not finite: {shown}"
    message = f"step {state.step} was left out on all ranks: {what}; see {path}"
    if state.skipped_in_a_row > allowed:
        raise DivergedError(
            f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite (optimizer.max_skipped "
            f"{allowed}); the last one: {message}. Weights and checkpoints hold nothing of it: look at these "
            f"samples, lower optimizer.lr, or go back with --resume PATH/OF/AN/EARLIER/CHECKPOINT"
        )
    run.telemetry.message(message)
