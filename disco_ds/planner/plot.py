"""The picture of a plan: memory against the batch of one GPU, and the batch against GPUs for each loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disco_ds.errors import ConfigError
from disco_ds.planner.memory import CATEGORIES, GIB
from disco_ds.planner.search import Plan, Planner, Request

COLOURS = {
    "runtime": "#8c8c8c", "parameters": "#4c72b0", "gradients": "#64b5cd", "optimizer": "#8172b3",
    "buckets": "#937860", "features": "#ccb974", "loss": "#c44e52", "activations": "#55a868",
    "fragmentation": "#dadada",
}  # fmt: skip
LOSSES = {
    "one_block": ("one block (this project)", "#55a868"),
    "disco": ("DisCo: b x B twice", "#dd8452"),
    "clip": ("original CLIP: B x B", "#c44e52"),
}


def plot(planner: Planner, plan: Plan, name: str, path: Path) -> Path:
    """Draw the picture into a file (PNG, PDF or SVG by its name); returns the path.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot: matplotlib is missing; install it with: pip install 'disco-ds[demo]'") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    _memory(left, planner, plan)
    _batches(right, planner, plan)
    setup = plan.setup
    figure.suptitle(
        f"{name}, ZeRO {setup.zero}, {setup.precision}, checkpointing {setup.checkpointing}, {plan.request.gpu.name}",
        fontsize=12,
    )
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
    return path


def _pinned(plan: Plan, **changes: Any) -> Request:
    """The largest batch in one pass with the plan's settings."""
    return plan.request.largest(
        zero=plan.setup.zero, checkpointing=plan.setup.checkpointing, micro_batch=None, accumulation=None, **changes
    )


def _memory(axes: Any, planner: Planner, plan: Plan) -> None:
    """Stacked bytes at the highest moment, for whole batches up to a quarter beyond the limit."""
    setup, limit = plan.setup, plan.request.limit_bytes
    largest = max(planner.largest(_pinned(plan)).prediction.per_gpu_batch, 8)
    batches = sorted({max(1, round(largest * 1.25 * step / 48)) for step in range(1, 49)})
    moments = [planner.predict(setup, batch).peak for batch in batches]
    stacks = [[moment.bytes[category] / GIB for moment in moments] for category in CATEGORIES]
    axes.stackplot(batches, stacks, labels=CATEGORIES, colors=[COLOURS[c] for c in CATEGORIES], linewidth=0)
    axes.axhline(limit / GIB, color="black", linewidth=1.2)
    small = {"textcoords": "offset points", "fontsize": 9}
    axes.annotate(f"{limit / GIB:.2f} GiB", (batches[-1], limit / GIB), xytext=(-4, 4), ha="right", **small)
    axes.axvline(largest, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"{largest} pairs", (largest, 0), xytext=(5, 8), **small)
    axes.set(
        title=f"Memory of one GPU, {setup.gpus} GPUs, loss {setup.loss}", xlabel="pairs per GPU, in one pass",
        ylabel="GiB", xlim=(batches[0], batches[-1]), ylim=(0, limit / GIB * 1.4),
    )  # fmt: skip
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, ncols=3, framealpha=1.0)


def _batches(axes: Any, planner: Planner, plan: Plan) -> None:
    """The largest global batch against the number of GPUs, one line a loss."""
    counts = [1 << power for power in range(0, 11)]
    for loss, (label, colour) in LOSSES.items():
        sizes = []
        for count in counts:
            best = planner.largest(_pinned(plan, gpus=count, loss=loss))
            sizes.append(best.global_batch if best.fits else float("nan"))
        axes.plot(counts, sizes, marker="o", markersize=4, label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    low, high = axes.get_ylim()
    ticks = [1 << power for power in range(6, 40, 2) if low <= 1 << power <= high]
    axes.set_yticks(ticks, [_short(tick) for tick in ticks])
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.set(title="Largest exact batch, in one pass", xlabel="GPUs", ylabel="pairs in the global batch")
    axes.legend(fontsize=9)


def _short(value: int) -> str:
    return f"{value >> 20}M" if value >= 1 << 20 else f"{value >> 10}K" if value >= 1 << 10 else str(value)
