"""The charts that are bars or stacks: where the time went, data faults, and memory as planned and as measured."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import OTHER, RUN_COLOURS, Chart, add_legend, label_axes, new_figure, prefix
from disco_ds.report.text import elide

_PHASES = {"data": "#937860", "forward": "#4f94cd", "loss": "#c44e52", "backward": "#55a868", "step": "#8172b3"}
"""Where the time of a step goes (metrics time_in_*), and the rest as "other"."""

GIB = 2**30
REST, HELD = "allocated, other", "held by the allocator"
COLOURS = {
    "parameters": "#4c72b0", "optimizer": "#8172b3", "gradients": "#64b5cd", "buckets": "#937860",
    "features": "#ccb974", "loss": "#c44e52", "activations": "#55a868", REST: "#7f9f7f", HELD: OTHER,
}  # fmt: skip
"""The categories of the planner that the allocator can see, what of the measurement has no category, and what it holds
beyond its blocks (the planner's "fragmentation")."""

_STRETCHES = 100  # of a stack over steps
_MOST_BARS = 12


def stacked_bars(
    name: str, title: str, rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str], label: str,
    total_words: Callable[[float], str], legend: Mapping[str, str] | None = None,
) -> Chart:  # fmt: skip
    """Horizontal bars, the first on top, each stacked by category, with its total behind it.

    Args:
        rows: name of each bar and its values by category.
        colours: of the categories, in the order of the stack.
        legend: other words for the categories in it.
    """
    figure, axes = new_figure(1.8 + 0.42 * len(rows))
    label_axes(axes, "", label)
    for place, (_, parts) in enumerate(rows):
        left = 0.0
        for category, colour in colours.items():
            axes.barh(place, parts.get(category, 0), left=left, height=0.62, color=colour, lw=0)
            left += parts.get(category, 0)
        axes.annotate(
            total_words(left), (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(rows)), [row for row, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, (max(sum(parts.values()) for _, parts in rows) or 1) * 1.18)
    axes.grid(visible=False, axis="y")
    used = [category for category in colours if any(parts.get(category) for _, parts in rows)]
    entries = [((legend or {}).get(c, elide(c)), {"color": colours[c], "lw": 6}) for c in used[:9]]
    add_legend(figure, entries, columns=3)
    words = "; ".join(f"{row}: " + ", ".join(f"{c} {v:,.4g}" for c, v in parts.items()) for row, parts in rows)
    return Chart(name, title, f"{title}, {label}: {words}", figure)


def _seconds_by_phase(run: RunFolder) -> tuple[list[int], dict[str, np.ndarray]]:
    """Steps, and for each of them the seconds by phase; no steps where nothing is logged."""
    timed = (line for line in run.metrics if number(line.get("step_s"), 0) > 0)
    lines = [line for line in timed if number(line.get("time_in_data")) >= 0]
    step_s = np.array([line["step_s"] for line in lines])
    stacks = {name: step_s * [number(line.get(f"time_in_{name}"), 0) for line in lines] for name in _PHASES}
    # what is in no phase, such as logging; device and host run at once, so that phases can sum to more than the step
    stacks["other"] = np.maximum(step_s - sum(stacks.values()), 0) if lines else step_s
    return [line["step"] for line in lines], stacks


def where_time_went(runs: Sequence[RunFolder]) -> Chart | None:
    """Seconds of a step by phase: over the steps of one run, as means of several."""
    title, colours = "Where the time went", {**_PHASES, "other": OTHER}
    logged = [(run, steps, stacks) for run in runs for steps, stacks in [_seconds_by_phase(run)] if steps]
    if not logged:
        return None
    rows = [
        (elide(run.label) if len(runs) > 1 else "mean", {name: float(values.mean()) for name, values in stacks.items()})
        for run, _, stacks in logged
    ]
    means, (_, steps, stacks) = rows[0][1], logged[0]
    total = sum(means.values()) or 1
    words = {name: f"{name} {seconds / total:.0%}" for name, seconds in means.items()} if len(runs) == 1 else {}
    if len(runs) > 1 or len(steps) == 1:
        return stacked_bars("time", title, rows, colours, "s / step (mean)", lambda total: f"{total:.3g} s", words)
    figure, axes = new_figure()
    label_axes(axes, "s / step", "step")
    parts = np.array_split(np.arange(len(steps)), min(len(steps), _STRETCHES))
    x = [float(np.mean(np.asarray(steps)[part])) for part in parts]
    heights = [[values[part].mean() for part in parts] for values in stacks.values()]
    axes.stackplot(x, heights, lw=0, colors=[colours[name] for name in stacks])
    axes.set_ylim(bottom=0)
    add_legend(figure, [(words[name], {"color": colours[name], "lw": 6}) for name in means], columns=3)
    alt = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in means.items())
    return Chart("time", title, f"Mean seconds of a step by phase: {alt}", figure)


def faults(runs: Sequence[RunFolder]) -> Chart | None:
    """Samples dropped and shards broken, by source and reason."""
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    totals: Counter[str] = Counter()
    for run in runs:
        for name, count in run.faults().items():
            source, _, reason = name.rpartition("/")
            rows[elide(prefix(run, runs, 16) + (source or "all data"))][reason] += count
            totals[reason] += count
    if not rows:
        return None
    palette = itertools.chain(RUN_COLOURS, itertools.repeat(OTHER))
    colours = dict(zip([reason for reason, _ in totals.most_common()], palette, strict=False))
    largest = sorted(rows.items(), key=lambda row: -row[1].total())[:_MOST_BARS]
    return stacked_bars("faults", "Data faults by source", largest, colours, "faults", lambda total: f"{total:,.0f}")


def memory_parts(run: RunFolder) -> dict[str, dict[str, int]]:
    """Bytes by category of "planned" and "measured"; empty where the run made no comparison."""
    planned, counted = run.memory.get("planned"), run.memory.get("counted")
    allocated, reserved = (int(number(run.memory.get(name), 0)) for name in ("allocated", "reserved"))
    if not isinstance(planned, dict) or not isinstance(counted, dict) or not allocated:
        return {}
    plan = {name: int(number(planned.get(name), 0)) for name in COLOURS if name in planned}
    found = {name: int(number(counted.get(name), 0)) for name in ("parameters", "optimizer")}
    found[REST] = max(allocated - sum(found.values()), 0)
    found[HELD] = max(reserved - allocated, 0)
    return {"planned": {**plan, HELD: int(number(planned.get("fragmentation"), 0))}, "measured": found}


def memory_error(run: RunFolder) -> float | None:
    """How far what was allocated is from the plan, as a share of the plan."""
    parts = memory_parts(run)
    if not parts:
        return None
    planned, measured = (sum(v for k, v in parts[kind].items() if k != HELD) for kind in ("planned", "measured"))
    return measured / planned - 1 if planned else None


def planned_and_measured(runs: Sequence[RunFolder]) -> Chart | None:
    """Memory of one GPU, planned above measured, as stacked bars."""
    rows = [
        (f"{elide(run.label, 16)} {kind}" if len(runs) > 1 else kind, {k: v / GIB for k, v in parts.items()})
        for run in runs
        for kind, parts in memory_parts(run).items()
    ]
    if not rows:
        return None
    title, label = "Memory, planned and measured", "GiB on rank 0's GPU"
    return stacked_bars("memory", title, rows, COLOURS, label, lambda total: f"{total:.2f}")


def memory_words(run: RunFolder) -> str:
    """What the comparison of planned and measured memory says, or why there is none."""
    error, start = memory_error(run), run.starts[-1] if run.starts else {}
    if error is not None:
        runtime = number((run.memory.get("planned") or {}).get("runtime"), 0) / GIB
        return (
            f"Measured after step {run.memory.get('step')}: allocated memory is {error:+.1%} from the plan at its "
            f"highest moment, “{run.memory.get('moment')}”. The CUDA context and NCCL, planned at {runtime:.2f} GiB, "
            f"are in neither bar."
        )
    if start.get("device") == "cpu":
        return (
            "Plan and measurement are not compared on a CPU: what is logged there is the highest resident memory of "
            "rank 0's process, with Python and all libraries in it. disco-plan says what a GPU would take."
        )
    return "No comparison of plan and measurement: the run makes it on GPUs, after its third step."
