"""What the page holds: how each run stands, and the sections below."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from disco_ds.report import bars, curves, tables
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import Chart
from disco_ds.report.tables import Table
from disco_ds.run_layout import CONFIG, HELDOUT, METRICS, SKIPPED, STARTS
from disco_ds.telemetry.console import duration

Runs = Sequence[RunFolder]


@dataclass
class Section:
    """A heading and what stands below it, in this order."""

    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    heldout: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Held-out images of runs, by the run's name."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Long texts, folded away behind their names."""

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return re.sub(r"[^a-z]+", "-", self.title.lower())


def sections(runs: Runs) -> list[Section]:
    """All sections of a report over one run or several; call inside :func:`chart_settings`."""
    makers = (_training, _evaluation, _speed, _memory, _data, _skipped, _starts, _settings)
    compared = [Section("Results", tables=[tables.results(runs)]), _differences(runs)] if len(runs) > 1 else []
    return compared + [make(runs) for make in makers]


def _charts(title: str, charts: Sequence[Chart | None], empty: str) -> Section:
    """The charts that there is something for; ``empty`` says so where there is none."""
    found = [chart for chart in charts if chart is not None]
    return Section(title, charts=found, notes=[] if found else [empty])


def _there(made: Iterable[Table | None]) -> list[Table]:
    return [table for table in made if table is not None]


def _training(runs: Runs) -> Section:
    charts = [
        curves.loss(runs),
        curves.metric(runs, "lr", "Learning rate", "learning rate", digits="", from_zero=True),
        curves.metric(runs, "logit_scale", "logit_scale", "logit_scale (1 / temperature)", digits=".2f"),
        curves.gradient_norm(runs),
    ]
    section = _charts("Training", charts, f"No step is logged: {METRICS} is missing or empty.")
    if len(runs) == 1 and section.charts and curves.resumes(runs[0]):
        section.notes.append("Thin vertical lines: the run was resumed there.")
    silent = [run.label for run in runs if not run.metrics]
    if section.charts and silent:
        section.notes.append(f"No step is logged of {', '.join(silent)}.")
    return section


def _evaluation(runs: Runs) -> Section:
    several = len(runs) > 1
    charts = [*(curves.retrieval(runs, k) for k in ((1, 10) if several else (None,))), curves.zero_shot(runs)]
    empty = "No evaluation: data.val is not set, or the run has not come to its first one."
    section = _charts("Evaluation", charts, empty)
    without = [run.label for run in runs if not run.evals]
    if section.charts and without:
        section.notes.append(f"No evaluation of {', '.join(without)}.")
    section.tables = [] if several else _there([tables.last_evaluation(runs[0])])
    section.heldout = [(run.label, run.heldout) for run in runs if run.heldout]
    if section.charts and not several and not section.heldout:
        section.notes.append(f"No held-out images: the run was made before they were kept ({HELDOUT}).")
    return section


def _speed(runs: Runs) -> Section:
    throughput = curves.metric(
        runs, "samples_per_s", "Throughput", "pairs / s, all ranks", digits=",.0f", smooth=True, from_zero=True
    )
    section = _charts("Speed", [throughput, bars.where_time_went(runs)], "No step is logged.")
    if section.charts:
        section.notes.append(
            "Steps only: evaluations and checkpoints between them are not in these times. “data” is waiting for data, "
            "“other” what is in no phase."
        )
    return section


def _memory(runs: Runs) -> Section:
    label = "GiB on rank 0, highest so far"
    peak = curves.metric(runs, "peak_memory_bytes", "Peak memory", label, scale=1 / bars.GIB, digits=".2f")
    section = _charts("Memory", [bars.planned_and_measured(runs), peak], "No memory is logged.")
    section.notes += [(f"{run.label}: " if len(runs) > 1 else "") + bars.memory_words(run) for run in runs]
    return section


def _data(runs: Runs) -> Section:
    section = _charts("Data", [bars.faults(runs)], "No data faults are logged.")
    section.tables = _there([tables.faults(runs)])
    return section


def _skipped(runs: Runs) -> Section:
    found = _there(map(tables.skipped_steps, runs))
    notes = [
        f"{run.label}: {run.last('skipped_steps'):,.0f} skipped; {SKIPPED}, which names them, is missing."
        for run in runs
        if not run.skipped and run.last("skipped_steps")
    ]
    if not found and not notes:
        logged = any(run.metrics for run in runs)
        notes = ["None: every loss and gradient was finite." if logged else "No step is logged."]
    return Section("Skipped steps", tables=found, notes=notes)


def _starts(runs: Runs) -> Section:
    missing = [run.label for run in runs if not run.starts]
    notes = [f"Starts were not kept in {', '.join(missing)} ({STARTS})."] if missing else []
    return Section("Starts and resumes", tables=_there(map(tables.starts, runs)), notes=notes)


def _differences(runs: Runs) -> Section:
    found = _there([tables.different_settings(runs)])
    return Section("Different settings", tables=found, notes=[] if found else ["None."])


def _settings(runs: Runs) -> Section:
    texts = []
    for run in runs:
        if run.config:
            texts.append((f"{run.label}: {CONFIG}", yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)))
        ds_config = run.starts[-1].get("ds_config") if run.starts else None
        if ds_config:
            texts.append((f"{run.label}: ds_config, as resolved", json.dumps(ds_config, indent=2)))
    notes = [] if texts else [f"{CONFIG} is missing."]
    notes += [f"{run.label}: {name} could not be read." for run in runs for name in run.unreadable]
    return Section("Settings", texts=texts, notes=notes)


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
    start = run.starts[-1] if run.starts else {}
    steps, step_s = run.series("step_s")  # the mean step of each logged window
    seconds = float(np.nansum(np.diff(steps, prepend=0) * step_s))
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
    reached = {f"{words} R@1": f"val/{key}_R@1" for key, words in tables.DIRECTIONS.items()}
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
    error = bars.memory_error(run)
    if error is not None and abs(error) > 0.05:
        found.append(f"memory: {abs(error):.1%} {'more' if error > 0 else 'less'} allocated than planned")
    seen, faulty = run.last("samples_seen") or 0, run.faults().total()
    if faulty > 0.01 * seen:
        found.append(f"{_count(faulty, 'data fault')} for {seen:,.0f} pairs seen")
    return found


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"
