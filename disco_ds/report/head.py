"""What stands on top of the page for a run: how it stands, its facts, and what a reader should not miss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from disco_ds.report.memory import memory_error
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.tables import DIRECTIONS
from disco_ds.telemetry.console import duration


def head(run: RunFolder) -> dict[str, Any]:
    """What stands on top of the page for a run: how it stands, facts, and what a reader should know of."""
    return {"label": run.label, "state": _state(run), "facts": _facts(run), "warnings": _warnings(run)}


def _state(run: RunFolder) -> str:
    if run.finished:
        return f"finished after {run.step:,} steps"
    if not run.metrics and not run.evals:
        return "no step logged"
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    return f"not finished: last logged step {run.step:,}{of}"


def _facts(run: RunFolder) -> dict[str, str]:
    start, seconds = run.starts[-1] if run.starts else {}, _seconds_of_steps(run)
    facts = {"model": str(run.option("model.name") or ""), "loss": str(run.option("loss.kind") or "")}
    if run.global_batch:
        facts["global batch"] = f"{run.global_batch:,} pairs"
    if start:
        parts = f"{start.get('device')}, ZeRO {start.get('zero_stage')}, {start.get('precision')}"
        facts["ranks"] = f"{start.get('ranks')} × {parts}"
    if run.last("samples_seen"):
        facts["pairs seen"] = f"{run.last('samples_seen'):,.0f}"
    if seconds:
        facts["time in steps"] = duration(seconds)
    reached = {f"{words} R@1": f"val/{key}_R@1" for key, words in DIRECTIONS.items()}
    for words, name in {**reached, "zero-shot top-1": "val/zero_shot_top1"}.items():
        value, chance = run.last(name), run.last(f"{name}_chance")
        if value is not None:
            facts[words] = f"{value:.3f}" + (f" (chance {chance:.3f})" if chance is not None else "")
    return {name: value for name, value in facts.items() if value}


def _warnings(run: RunFolder) -> list[str]:
    found = []
    skipped, failed = int(run.last("skipped_steps") or 0), int(run.last("failed_saves") or 0)
    if skipped:
        found.append(f"{_count(skipped, 'step')} skipped for a loss or gradient that was not finite")
    if failed:
        found.append(f"{_count(failed, 'checkpoint')} could not be written")
    if run.metrics and not math.isfinite(number(run.metrics[-1].get("loss"))):
        found.append(f"the last logged loss (step {run.metrics[-1]['step']:,}) is not finite")
    error = memory_error(run)
    if error is not None and abs(error) > 0.05:
        found.append(f"memory: {abs(error):.1%} {'more' if error > 0 else 'less'} allocated than planned")
    seen, faulty = run.last("samples_seen") or 0, run.faults().total()
    if faulty > 0.01 * seen:
        found.append(f"{_count(faulty, 'data fault')} for {seen:,.0f} pairs seen")
    return found


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def _seconds_of_steps(run: RunFolder) -> float:
    steps, seconds = run.series("step_s")  # the mean step of each logged window
    return float(np.nansum(np.diff(steps, prepend=0) * seconds))
