"""What each section of the page holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from disco_ds.report import bars, curves, memory, tables
from disco_ds.report.run_folder import RunFolder
from disco_ds.report.style import Chart
from disco_ds.report.tables import Table
from disco_ds.run_layout import CONFIG, HELDOUT, METRICS, SKIPPED, STARTS

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
    several = len(runs) > 1
    compared = [Section("Results", tables=[tables.results(runs)]), _differences(runs)] if several else []
    makers = (_training, _evaluation, _speed, _memory, _data, _skipped, _starts, _settings)
    return compared + [make(runs) for make in makers]


def _section(title: str, runs: Runs, makers: Sequence[Callable[[Runs], Chart | None]], empty: str) -> Section:
    """The charts that there is something for; ``empty`` says so where there is none."""
    found = [chart for maker in makers if (chart := maker(runs)) is not None]
    return Section(title, charts=found, notes=[] if found else [empty])


def _training(runs: Runs) -> Section:
    makers = (curves.loss, curves.learning_rate, curves.logit_scale, curves.gradient_norm)
    section = _section("Training", runs, makers, f"No step is logged: {METRICS} is missing or empty.")
    if len(runs) == 1 and section.charts and curves.resumes(runs[0]):
        section.notes.append("Thin vertical lines: the run was resumed there.")
    silent = [run.label for run in runs if not run.metrics]
    if section.charts and silent:
        section.notes.append(f"No step is logged of {', '.join(silent)}.")
    return section


def _evaluation(runs: Runs) -> Section:
    several = len(runs) > 1
    makers: list[Callable[[Runs], Chart | None]] = [curves.retrieval, curves.zero_shot]
    if several:
        makers = [lambda some: curves.retrieval(some, 1), lambda some: curves.retrieval(some, 10), curves.zero_shot]
    empty = "No evaluation: data.val is not set, or the run has not come to its first one."
    section = _section("Evaluation", runs, makers, empty)
    without = [run.label for run in runs if not run.evals]
    if section.charts and without:
        section.notes.append(f"No evaluation of {', '.join(without)}.")
    section.tables = [table for run in runs[:1] if not several and (table := tables.last_evaluation(run)) is not None]
    section.heldout = [(run.label, run.heldout) for run in runs if run.heldout]
    if section.charts and not several and not section.heldout:
        section.notes.append(f"No held-out images: the run was made before they were kept ({HELDOUT}).")
    return section


def _speed(runs: Runs) -> Section:
    section = _section("Speed", runs, (curves.throughput, bars.where_time_went), "No step is logged.")
    if section.charts:
        section.notes.append(
            "Steps only: evaluations and checkpoints between them are not in these times. “data” is waiting for data, "
            "“other” what is in no phase."
        )
    return section


def _memory(runs: Runs) -> Section:
    section = _section("Memory", runs, (memory.planned_and_measured, memory.peak_memory), "No memory is logged.")
    section.notes += [(f"{run.label}: " if len(runs) > 1 else "") + memory.memory_words(run) for run in runs]
    return section


def _data(runs: Runs) -> Section:
    section = _section("Data", runs, (bars.faults,), "No data faults are logged.")
    table = tables.faults(runs)
    section.tables = [table] if table is not None else []
    return section


def _skipped(runs: Runs) -> Section:
    found = [table for run in runs if (table := tables.skipped_steps(run)) is not None]
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
    found = [table for run in runs if (table := tables.starts(run)) is not None]
    missing = [run.label for run in runs if not run.starts]
    notes = [f"Starts were not kept in {', '.join(missing)} ({STARTS})."] if missing else []
    return Section("Starts and resumes", tables=found, notes=notes)


def _differences(runs: Runs) -> Section:
    table = tables.different_settings(runs)
    return Section("Different settings", tables=[table] if table else [], notes=[] if table else ["None."])


def _settings(runs: Runs) -> Section:
    texts = []
    for run in runs:
        if run.config:
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            texts.append((f"{run.label}: {CONFIG}", text))
        ds_config = run.starts[-1].get("ds_config") if run.starts else None
        if ds_config:
            texts.append((f"{run.label}: ds_config, as resolved", json.dumps(ds_config, indent=2)))
    notes = [] if texts else [f"{CONFIG} is missing."]
    notes += [f"{run.label}: {name} could not be read." for run in runs for name in run.unreadable]
    return Section("Settings", texts=texts, notes=notes)
