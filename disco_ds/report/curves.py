"""The charts over steps: one run's curves, or those of several runs over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import FAINT, RUN_COLOURS, SHADES, Chart, add_legend, label_axes, new_figure, prefix
from disco_ds.report.text import short

Runs = Sequence[RunFolder]

SMOOTH_FROM = 20
"""Logged steps from which on a noisy curve is smoothed."""
_STRETCHES = 400  # of a thinned curve: two for each pixel of a phone


class _Curves:
    """A chart that is being drawn. Where the runs' batches differ, so that steps do not compare, it is over pairs."""

    def __init__(self, runs: Runs, label: str) -> None:
        self.runs = runs
        batches = [run.global_batch for run in runs if run.metrics or run.evals]
        self.over_pairs = len(set(batches)) > 1 and None not in batches
        self.figure, self.axes = new_figure()
        label_axes(self.axes, label, "pairs seen" if self.over_pairs else "step")
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def having(self, metric: str) -> list[tuple[RunFolder, str]]:
        """The runs that have a metric, each with its colour, which is the same in all charts."""
        coloured = [(run, RUN_COLOURS[place % len(RUN_COLOURS)]) for place, run in enumerate(self.runs)]
        return [(run, colour) for run, colour in coloured if len(run.series(metric)[0])]

    def draw(self, run: RunFolder, steps: np.ndarray, values: np.ndarray, **look: Any) -> None:
        """Draw one curve."""
        x, y = thinned(steps * float((run.global_batch or 1) if self.over_pairs else 1), values)
        self.axes.plot(x, y, **{"lw": 1.7, "marker": "o" if len(x) == 1 else "", **look})

    def draw_chance(self, value: float, words: str) -> None:
        """A dotted line at the level of a model that knows nothing."""
        self.axes.axhline(value, color=FAINT, ls=":", lw=1.3)
        self.entries.append((words, {"color": FAINT, "ls": ":"}))

    def chart(self, name: str, title: str, legend_title: str = "") -> Chart | None:
        """The chart; None where nothing was drawn. Thin lines show where a run alone on it was resumed."""
        if not self.entries:
            return None
        for step in resumes(self.runs[0])[:40] if len(self.runs) == 1 and not name.startswith("val/") else ():
            self.axes.axvline(step, color=FAINT, lw=0.6, alpha=0.7)
        add_legend(self.figure, self.entries, legend_title)
        words = "; ".join(text for text, _ in self.entries)
        return Chart(name.removeprefix("val/"), title, f"{title} over steps: {legend_title} {words}", self.figure)


def metric(
    runs: Runs, name: str, title: str, label: str,
    *, scale: float = 1, digits: str = ".3g", smooth: bool = False, from_zero: bool = False, chance: bool = False,
) -> Chart | None:  # fmt: skip
    """One metric over steps.

    Args:
        scale: what values are multiplied with.
        digits: format of the last value in the legend; "" for few characters.
        smooth: draw it faint as logged, and smoothed.
        chance: add ln(B), the loss of a model that knows nothing of B pairs.
    """
    curves = _Curves(runs, label)
    for run, colour in curves.having(name):
        steps, values = run.series(name)
        values, many = values * scale, smooth and len(steps) >= SMOOTH_FROM
        if many:
            curves.draw(run, steps, values, color=colour, alpha=0.3, lw=0.8)
            values = smoothed(values)
        curves.draw(run, steps, values, color=colour)
        last = values[np.isfinite(values)][-1:]
        shown = (format(last[0], digits) if digits else short(last[0])) if len(last) else "–"
        curves.entries.append((f"{prefix(run, runs)}{'smoothed' if many else 'last'} {shown}", {"color": colour}))
    if chance and curves.entries:
        for batch in _batches(runs):
            curves.draw_chance(math.log(batch), f"chance ln({batch:,}) = {math.log(batch):.3f}")
    if from_zero:
        curves.axes.set_ylim(bottom=0)
    return curves.chart(name, title)


def _batches(runs: Runs) -> list[int]:
    """Global batches; not of the sigmoid loss, whose value for a model that knows nothing is another."""
    return sorted({b for run in runs if run.option("loss.kind") != "sigmoid" and (b := run.global_batch) and b > 1})


def loss(runs: Runs) -> Chart | None:
    """Loss as logged (faint) and smoothed, with the loss of a model that knows nothing."""
    chart = metric(runs, "loss", "Loss", "loss (nats)", digits=".3f", smooth=True, chance=True)
    if chart is None:
        return None
    shown = [math.log(batch) for batch in _batches(runs)]
    for run in runs:
        values = run.series("loss")[1]
        curve, finite = smoothed(values), values[np.isfinite(values)]
        # a single spike of what is drawn faint does not set the scale
        shown += [*curve[np.isfinite(curve)], *(np.percentile(finite, [1, 99]) if len(finite) else [])]
    if shown:
        low, high = min(shown), max(shown)
        margin = 0.06 * (high - low) or 0.1
        chart.figure.axes[0].set_ylim(max(low - margin, 0) if low >= 0 else low - margin, high + margin)
    return chart


def gradient_norm(runs: Runs) -> Chart | None:
    """Gradient norm before clipping; on a logarithmic axis where it spans orders of magnitude."""
    chart = metric(runs, "grad_norm", "Gradient norm", "2-norm, before clipping", smooth=True)
    if chart is None:
        return None
    axes = chart.figure.axes[0]
    values = np.concatenate([run.series("grad_norm")[1] for run in runs])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() > 50 * values.min():
        from matplotlib.ticker import NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    clip = {number(run.option("optimizer.clip_norm"), 0) for run in runs}
    if len(clip) == 1 and len(values) and 0 < max(clip) <= values.max() * 1.2:
        axes.axhline(max(clip), color=FAINT, ls=":", lw=1.3)
        axes.annotate(
            "clipped above", (1, max(clip)), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", ha="right", fontsize=8, color=FAINT,
        )  # fmt: skip
    return chart


def retrieval(runs: Runs, k: int | None = None) -> Chart | None:
    """Recall over the evaluations, both directions: R@1, 5 and 10 of one run, or R@k of several."""
    curves, top = _Curves(runs, "recall (share found)"), k or 10
    for run, colour in curves.having(f"val/image_to_text_R@{top}"):
        for recall in (k,) if k else (10, 5, 1):
            look, last = {"color": colour if k else SHADES[recall]}, []
            for direction, dashes in (("image_to_text", "-"), ("text_to_image", "--")):
                steps, values = run.series(f"val/{direction}_R@{recall}")
                curves.draw(run, steps, values, ls=dashes, **_marked(steps), **look)
                last.append(f"{values[-1]:.3f}" if len(values) and math.isfinite(values[-1]) else "–")
            curves.entries.append((f"{prefix(run, runs)}R@{recall}  {' / '.join(last)}", look))
    _limit_to_shares(curves, f"val/image_to_text_R@{top}_chance", f"R@{top} by chance")
    name, title = (f"retrieval_at_{k}", f"Held-out retrieval, R@{k}") if k else ("retrieval", "Held-out retrieval")
    return curves.chart(f"val/{name}", title, "image → text (solid) / text → image (dashed)")


def zero_shot(runs: Runs) -> Chart | None:
    """Zero-shot accuracy over the evaluations; top-1 alone of several runs."""
    curves = _Curves(runs, "accuracy (share right)")
    kinds = {"top1": ("top-1", SHADES[10]), "top5": ("top-5", SHADES[1]), "mean_per_class": ("mean per class", "")}
    for run, colour in curves.having("val/zero_shot_top1"):
        for kind, (words, shade) in list(kinds.items())[: 1 if len(runs) > 1 else None]:
            steps, values = run.series(f"val/zero_shot_{kind}")
            if len(steps):
                look = {"color": colour if len(runs) > 1 else shade or RUN_COLOURS[1]}
                curves.draw(run, steps, values, **_marked(steps), **look)
                curves.entries.append((f"{prefix(run, runs)}{words} {values[-1]:.3f}", look))
    _limit_to_shares(curves, "val/zero_shot_top1_chance", "top-1 by chance")
    return curves.chart("val/zero_shot", "Zero-shot accuracy")


def _marked(steps: np.ndarray) -> dict[str, Any]:
    """Evaluations are few: each has its mark."""
    return {"marker": "o" if len(steps) <= 40 else "", "ms": 3.5}


def _limit_to_shares(curves: _Curves, chance: str, words: str) -> None:
    """Axis from 0 to what was reached, at most 1; the level of chance, where it is one for all runs."""
    levels = {level for run in curves.runs if (level := run.last(chance)) is not None}
    if curves.entries and len(levels) == 1:
        curves.draw_chance(level := levels.pop(), f"{words} {level:.3f}")
    curves.axes.set_ylim(0, None)
    curves.axes.set_ylim(0, min(1.02, max(curves.axes.get_ylim()[1] * 1.02, 1e-6)))


def resumes(run: RunFolder) -> list[int]:
    """Steps after which the run was started again."""
    return sorted({start["step"] for start in run.starts if start["step"] > 0})


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over a thirtieth of the curve, NaN passed over; a curve shorter than SMOOTH_FROM stays as it is."""
    if len(values) < SMOOTH_FROM:
        return values
    reach = max(1, len(values) // 60)
    finite = np.isfinite(values)
    sums = np.cumsum([0.0, *np.where(finite, values, 0.0)])
    counts = np.cumsum([0, *finite])
    middle = np.arange(len(values))
    low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    found = counts[high] - counts[low]
    return np.where(found > 0, (sums[high] - sums[low]) / np.maximum(found, 1), np.nan)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most two points for each of 400 stretches of a long curve, its lowest and its highest, in order."""
    if len(x) <= 2 * _STRETCHES:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(x)), _STRETCHES):
        finite = part[np.isfinite(y[part])]
        keep += sorted({finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]}) if len(finite) else [part[0]]
    return x[keep], y[keep]
