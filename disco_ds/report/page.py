"""The page of disco-report: what each section holds, and the one HTML file that they make."""

from __future__ import annotations

import contextlib
import importlib.resources
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disco_ds import __version__
from disco_ds.report import bars, charts, tables
from disco_ds.report.charts import Chart
from disco_ds.report.grid import draw_kept
from disco_ds.report.run_folder import RunFolder
from disco_ds.report.style import DARK, chart_settings, inline_svg, png_bytes, variable
from disco_ds.report.tables import Table

TEMPLATE = "report.html.jinja"


@dataclass
class Section:
    """A heading and what stands below it, in this order."""

    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    shown: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Held-out images of runs, by the run's name."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Long texts, folded away behind their names."""

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return re.sub(r"[^a-z]+", "-", self.title.lower())


def sections(runs: Sequence[RunFolder]) -> list[Section]:
    """All sections of a report over one run or several; call inside :func:`chart_settings`."""
    several = len(runs) > 1
    compared = [Section("Results", tables=[tables.results(runs)]), _differences(runs)] if several else []
    return [
        *compared,
        _training(runs),
        _evaluation(runs),
        _speed(runs),
        _memory(runs),
        _data(runs),
        _skipped(runs),
        _starts(runs),
        _settings(runs),
    ]


def _section(
    title: str, runs: Sequence[RunFolder], makers: Sequence[Callable[..., Chart | None]], empty: str
) -> Section:
    """The charts that there is something for; ``empty`` says so where there is none, or which runs have none."""
    found = [chart for maker in makers if (chart := maker(runs)) is not None]
    return Section(title, charts=found, notes=[] if found else [empty])


def _training(runs: Sequence[RunFolder]) -> Section:
    makers = (charts.loss, charts.learning_rate, charts.logit_scale, charts.gradient_norm)
    section = _section("Training", runs, makers, "No step is logged: metrics.jsonl is missing or empty.")
    if len(runs) == 1 and section.charts and charts.resumes(runs[0]):
        section.notes.append("Thin vertical lines: the run was resumed there.")
    silent = [run.label for run in runs if not run.metrics]
    if section.charts and silent:
        section.notes.append(f"No step is logged of {', '.join(silent)}.")
    return section


def _evaluation(runs: Sequence[RunFolder]) -> Section:
    several = len(runs) > 1
    makers: list[Callable[..., Chart | None]] = [charts.retrieval, charts.zero_shot]
    if several:
        makers = [lambda some: charts.retrieval(some, 1), lambda some: charts.retrieval(some, 10), charts.zero_shot]
    section = _section(
        "Evaluation", runs, makers, "No evaluation: data.val is not set, or the run has not come to its first one."
    )
    without = [run.label for run in runs if not run.evals]
    if section.charts and without:
        section.notes.append(f"No evaluation of {', '.join(without)}.")
    section.tables = [table for run in runs[:1] if not several and (table := tables.last_evaluation(run)) is not None]
    section.shown = [(run.label, shown) for run in runs if (shown := tables.shown_images(run))]
    if section.charts and not several and not section.shown:
        section.notes.append("No held-out images: the run was made before they were kept (heldout.json).")
    return section


def _speed(runs: Sequence[RunFolder]) -> Section:
    makers = (charts.throughput, bars.where_time_went)
    section = _section("Speed", runs, makers, "No step is logged.")
    if section.charts:
        section.notes.append(
            "Steps only: evaluations and checkpoints between them are not in these times. “data” is waiting for data, "
            "“other” what is in no phase."
        )
    return section


def _memory(runs: Sequence[RunFolder]) -> Section:
    section = _section("Memory", runs, (bars.memory, charts.peak_memory), "No memory is logged.")
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        section.notes.append(name + tables.memory_words(run))
    return section


def _data(runs: Sequence[RunFolder]) -> Section:
    section = _section("Data", runs, (bars.faults,), "No data faults are logged.")
    table = tables.faults(runs)
    section.tables = [table] if table is not None else []
    return section


def _skipped(runs: Sequence[RunFolder]) -> Section:
    found = [table for run in runs if (table := tables.skipped_steps(run)) is not None]
    notes = []
    for run in runs:
        if not run.skipped and run.last("skipped_steps"):
            notes.append(
                f"{run.label}: {run.last('skipped_steps'):,.0f} skipped; skipped.jsonl, which names them, is missing."
            )
    if not found and not notes:
        logged = any(run.metrics for run in runs)
        notes = ["None: every loss and gradient was finite." if logged else "No step is logged."]
    return Section("Skipped steps", tables=found, notes=notes)


def _starts(runs: Sequence[RunFolder]) -> Section:
    found = [table for run in runs if (table := tables.starts(run)) is not None]
    missing = [run.label for run in runs if not run.starts]
    notes = [f"Starts were not kept in {', '.join(missing)} (starts.jsonl)."] if missing else []
    return Section("Starts and resumes", tables=found, notes=notes)


def _differences(runs: Sequence[RunFolder]) -> Section:
    table = tables.different_settings(runs)
    return Section("Different settings", tables=[table] if table else [], notes=[] if table else ["None."])


def _settings(runs: Sequence[RunFolder]) -> Section:
    texts = [text for run in runs for text in tables.setting_texts(run)]
    notes = [] if texts else ["config.yaml is missing."]
    notes += [f"{run.label}: {name} could not be read." for run in runs for name in run.unreadable]
    return Section("Settings", texts=texts, notes=notes)


def render(runs: Sequence[RunFolder]) -> tuple[str, list[Chart]]:
    """The report as one HTML text that asks for nothing outside itself, and the charts in it.

    Raises:
        ImportError: matplotlib or jinja2 is missing.
    """
    import jinja2

    template = importlib.resources.files("disco_ds.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    with chart_settings():
        parts = sections(runs)
        figures = [chart for part in parts for chart in part.charts]
        pictures = {chart.name: inline_svg(chart.figure, chart.name, chart.alt) for chart in figures}
    page = environment.from_string(template).render(
        title=" / ".join(run.label for run in runs),
        runs=[tables.head(run) for run in runs],
        sections=parts,
        pictures=pictures,
        colours={variable(light): (light, dark) for light, dark in DARK.items()},
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M %Z").strip(),
    )
    # captions from the web may hold halves of surrogate pairs, which no UTF-8 file can
    return page.encode("utf-8", "replace").decode("utf-8"), figures


def pictures(runs: Sequence[RunFolder], figures: Sequence[Chart]) -> dict[str, bytes]:
    """The charts and the held-out images as PNG files, by file name."""
    with chart_settings():
        files = {f"{chart.name}.png": png_bytes(chart.figure) for chart in figures}
        for run in runs:
            shown = tables.shown_images(run)
            if shown:
                name = "heldout" if len(runs) == 1 else "heldout-" + re.sub(r"[^\w.-]+", "-", run.label)
                with contextlib.suppress(OSError, ValueError):  # an image in the file that is none
                    files[f"{name}.png"] = png_bytes(draw_kept(shown["images"]))
    return files
