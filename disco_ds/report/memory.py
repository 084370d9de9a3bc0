"""Memory of one GPU: what the planner gave to each category beside what was measured, and the peak over steps."""

from __future__ import annotations

from collections.abc import Sequence

from disco_ds.report.bars import stacked_bars
from disco_ds.report.curves import metric
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import OTHER, Chart
from disco_ds.report.text import elide

GIB = 2**30
REST, HELD = "allocated, other", "held by the allocator"
COLOURS = {
    "parameters": "#4c72b0", "optimizer": "#8172b3", "gradients": "#64b5cd", "buckets": "#937860",
    "features": "#ccb974", "loss": "#c44e52", "activations": "#55a868", REST: "#7f9f7f", HELD: OTHER,
}  # fmt: skip
"""The categories of the planner that the allocator can see, what of the measurement has no category, and what it holds
beyond its blocks (the planner's "fragmentation")."""


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


def peak_memory(runs: Sequence[RunFolder]) -> Chart | None:
    """The highest memory so far, as logged."""
    label = "GiB on rank 0, highest so far"
    return metric(runs, "peak_memory_bytes", "Peak memory", label, scale=1 / GIB, digits=".2f")


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
