"""The charts of disco-report that are bars or stacks: where the time went, memory, data faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from disco_ds.report.charts import Chart, prefix
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import GIB, RUN_COLOURS, dress, elide, legend, new_figure, short

PHASES = {"data": "#937860", "forward": "#4f94cd", "loss": "#c44e52", "backward": "#55a868", "step": "#8172b3"}
"""Where the time of a step goes (metrics time_in_*), and the rest as "other"."""
OTHER = "#bdbdbd"

_STRETCHES = 100  # of a stack over steps


def shares(run: RunFolder) -> dict[str, float]:
    """Mean seconds of a step by where they went; empty where nothing is logged."""
    steps, stacks = _seconds(run)
    return {name: float(np.mean(values)) for name, values in stacks.items()} if len(steps) else {}


def _seconds(run: RunFolder) -> tuple[list[int], dict[str, np.ndarray]]:
    lines = [
        line for line in run.metrics if number(line.get("step_s"), 0) > 0 and number(line.get("time_in_data")) >= 0
    ]
    step_s = np.array([line["step_s"] for line in lines])
    stacks = {name: step_s * [number(line.get(f"time_in_{name}"), 0) for line in lines] for name in PHASES}
    # what is in no phase, such as logging; device and host run at once, so that phases can sum to more than the step
    stacks["other"] = np.maximum(step_s - sum(stacks.values()), 0) if lines else step_s
    return [line["step"] for line in lines], stacks


def where_time_went(runs: Sequence[RunFolder]) -> Chart | None:
    """Seconds of a step by phase: over the steps of one run, as means of several."""
    from matplotlib.patches import Patch

    colours = {**PHASES, "other": OTHER}
    means = [(run, shares(run)) for run in runs]
    means = [(run, found) for run, found in means if found]
    if not means:
        return None
    steps, stacks = _seconds(means[0][0])
    single = len(runs) == 1 and len(steps) > 1
    figure, axes = new_figure(None if single else 1.5 + 0.42 * len(means))
    if single:
        parts = np.array_split(np.arange(len(steps)), min(len(steps), _STRETCHES))
        x = [float(np.mean(np.asarray(steps)[part])) for part in parts]
        axes.stackplot(
            x, [[values[part].mean() for part in parts] for values in stacks.values()], lw=0,
            colors=[colours[name] for name in stacks],
        )  # fmt: skip
        dress(axes, "s / step", "step")
        axes.set_ylim(bottom=0)
    else:
        rows = [(elide(run.label) if len(runs) > 1 else "mean", found) for run, found in means]
        _bars(axes, rows, colours, "s / step (mean)", lambda total: f"{total:.3g} s")
    total = sum(means[0][1].values()) or 1
    entries = [
        (f"{name} {seconds / total:.0%}" if len(runs) == 1 else name, Patch(color=colours[name], lw=0))
        for name, seconds in means[0][1].items()
    ]
    legend(figure, entries, columns=3)
    alt = "; ".join(
        prefix(run, runs) + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.items())
        for run, found in means
    )
    return Chart("time", "Where the time went", f"Mean seconds of a step by phase: {alt}", figure)


def memory(runs: Sequence[RunFolder]) -> Chart | None:
    """Memory of one GPU, planned above measured, as stacked bars."""
    from matplotlib.patches import Patch

    rows = [
        (f"{elide(run.label, 16)} {kind}" if len(runs) > 1 else kind, {k: v / GIB for k, v in parts.items()})
        for run in runs
        for kind, parts in memory_parts(run).items()
    ]
    if not rows:
        return None
    figure, axes = new_figure(2.0 + 0.42 * len(rows))
    _bars(axes, rows, MEMORY_COLOURS, "GiB on rank 0's GPU", lambda total: f"{total:.2f}")
    used = [name for name in MEMORY_COLOURS if any(parts.get(name) for _, parts in rows)]
    legend(figure, [(name, Patch(color=MEMORY_COLOURS[name], lw=0)) for name in used], columns=3)
    alt = "; ".join(f"{kind} {sum(parts.values()):.2f} GiB" for kind, parts in rows)
    return Chart("memory", "Memory, planned and measured", f"Memory of one GPU: {alt}", figure)


REST, HELD = "allocated, other", "held by the allocator"
MEMORY_COLOURS = {
    "parameters": "#4c72b0", "optimizer": "#8172b3", "gradients": "#64b5cd", "buckets": "#937860",
    "features": "#ccb974", "loss": "#c44e52", "activations": "#55a868", REST: "#7f9f7f", HELD: "#bdbdbd",
}  # fmt: skip
"""The categories of the planner that the allocator can see, what of the measurement has no category, and what it holds
beyond its blocks (the planner's "fragmentation")."""


def memory_parts(run: RunFolder) -> dict[str, dict[str, int]]:
    """Bytes by category of "planned" and "measured"; empty where the run made no comparison."""
    planned, counted = run.memory.get("planned"), run.memory.get("counted")
    allocated, reserved = (int(number(run.memory.get(name), 0)) for name in ("allocated", "reserved"))
    if not isinstance(planned, dict) or not isinstance(counted, dict) or not allocated:
        return {}
    plan = {name: int(number(planned.get(name), 0)) for name in MEMORY_COLOURS if name in planned}
    found = {name: int(number(counted.get(name), 0)) for name in ("parameters", "optimizer")}
    found[REST] = max(allocated - sum(found.values()), 0)
    found[HELD] = max(reserved - allocated, 0)
    return {"planned": {**plan, HELD: int(number(planned.get("fragmentation"), 0))}, "measured": found}


def faults(runs: Sequence[RunFolder]) -> Chart | None:
    """Samples dropped and shards broken, by source and reason."""
    from matplotlib.patches import Patch

    rows: dict[str, dict[str, float]] = {}
    for run in runs:
        for name, count in run.faults().items():
            source, _, reason = name.rpartition("/")
            row = rows.setdefault(prefix(run, runs, 16) + (source or "all data"), {})
            row[reason] = row.get(reason, 0) + count
    if not rows:
        return None
    reasons = sorted(
        {reason for row in rows.values() for reason in row}, key=lambda r: -sum(x.get(r, 0) for x in rows.values())
    )
    palette = dict(zip(reasons, [*RUN_COLOURS[: len(reasons)], *[OTHER] * len(reasons)], strict=False))
    largest = sorted(rows.items(), key=lambda row: -sum(row[1].values()))[:12]
    figure, axes = new_figure(1.6 + 0.42 * len(largest))
    _bars(axes, [(elide(name), row) for name, row in largest], palette, "faults", lambda total: f"{total:,.0f}")
    legend(figure, [(elide(reason), Patch(color=palette[reason], lw=0)) for reason in reasons[:8]])
    alt = "; ".join(f"{name}: " + ", ".join(f"{r} {c:,.0f}" for r, c in row.items()) for name, row in largest)
    return Chart("faults", "Data faults by source", f"Data faults: {alt}", figure)


def _bars(
    axes: Any, rows: Sequence[tuple[str, dict[str, float]]], colours: dict[str, str], label: str,
    total_words: Callable[[float], str],
) -> None:  # fmt: skip
    """Horizontal bars, the first on top, each stacked by category, with its total behind it."""
    for place, (_, parts) in enumerate(rows):
        left = 0.0
        for name, colour in colours.items():
            if parts.get(name):
                axes.barh(place, parts[name], left=left, height=0.62, color=colour, lw=0)
                left += parts[name]
        axes.annotate(
            total_words(left), (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    dress(axes, "", label)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    longest = max(sum(parts.values()) for _, parts in rows) or 1
    axes.set_xlim(0, longest * 1.18)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
