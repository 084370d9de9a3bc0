"""The charts of disco-report: one run's curves, or those of several runs over each other, as matplotlib figures.

Every chart of a report has the same width, so that it can be read on a phone; its colours are names of the page's
(:mod:`disco_ds.report.style`), and its words are in its ``alt`` as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disco_ds.report.curves import smoothed
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import FAINT, GIB, RUN_COLOURS, SHADES, dress, elide, legend, new_figure, short

_POINTS = 400  # a curve has two of them for each pixel of a phone
SMOOTH_FROM = 20
"""Logged steps from which on the loss is smoothed."""


@dataclass(frozen=True)
class Chart:
    """A figure, the name of its file, its title, and its content in words."""

    name: str
    title: str
    alt: str
    figure: Any


class Across:
    """What the horizontal axis counts: steps, or pairs where the runs' batches differ and steps do not compare."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        batches = [run.global_batch for run in runs if run.metrics or run.evals]
        self.pairs = len(set(batches)) > 1 and None not in batches
        self.label = "pairs seen" if self.pairs else "step"

    def __call__(self, run: RunFolder, steps: Sequence[int]) -> np.ndarray:
        """Positions of steps on the axis."""
        return np.asarray(steps, dtype=float) * ((run.global_batch or 1) if self.pairs else 1)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most two points for each of ``_POINTS`` stretches of a long curve, its lowest and its highest, in order."""
    if len(x) <= 2 * _POINTS:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(x)), _POINTS):
        finite = part[np.isfinite(y[part])]
        keep += sorted({finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]}) if len(finite) else [part[0]]
    return x[keep], y[keep]


def loss(runs: Sequence[RunFolder]) -> Chart | None:
    """Loss as logged (faint) and smoothed, with the loss of a model that knows nothing."""
    across, words, ranges = Across(runs), [], []
    figure, axes = new_figure()
    for run, colour in _coloured(runs, "loss"):
        steps, values = run.series("loss")
        many = len(steps) >= SMOOTH_FROM
        x, curve = across(run, steps), np.asarray(smoothed(values) if many else values)
        if many:
            axes.plot(*thinned(x, np.asarray(values)), color=colour, alpha=0.3, lw=0.8)
        axes.plot(*thinned(x, curve), color=colour, lw=1.8, marker="o" if len(steps) == 1 else "")
        last = curve[np.isfinite(curve)][-1:]
        words.append(
            f"{prefix(run, runs)}{'smoothed' if many else 'last'} {f'{last[0]:.3f}' if len(last) else 'no number'}"
        )
        finite = np.asarray(values)[np.isfinite(values)]
        ranges += [*curve[np.isfinite(curve)], *(np.percentile(finite, [1, 99]) if len(finite) else [])]
    if not words:
        return None
    entries = [(word, {"color": colour}) for word, (_, colour) in zip(words, _coloured(runs, "loss"), strict=True)]
    batches = {run.global_batch for run in runs if run.option("loss.kind") != "sigmoid"}
    for batch in sorted(batch for batch in batches if batch and batch > 1):
        axes.axhline(math.log(batch), color=FAINT, ls=":", lw=1.3)
        entries.append((f"chance ln({batch:,}) = {math.log(batch):.3f}", {"color": FAINT, "ls": ":"}))
        ranges.append(math.log(batch))
    if ranges:
        low, high = min(ranges), max(ranges)
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(max(low - room, 0) if low >= 0 else low - room, high + room)
    _mark_resumes(axes, runs)
    dress(axes, "loss (nats)", across.label)
    legend(figure, entries)
    return Chart("loss", "Loss", "Loss over steps: " + "; ".join(text for text, _ in entries), figure)


def _curve(
    runs: Sequence[RunFolder],
    metric: str,
    title: str,
    label: str,
    *,
    scale: float = 1,
    digits: str = ".3g",
    smooth: bool = False,
) -> Chart | None:
    """One metric over steps; ``smooth`` draws it as the loss, faint as logged and smoothed."""
    across, entries = Across(runs), []
    figure, axes = new_figure()
    for run, colour in _coloured(runs, metric):
        steps, values = run.series(metric)
        x, y = across(run, steps), np.asarray(values) * scale
        if smooth and len(steps) >= SMOOTH_FROM:
            axes.plot(*thinned(x, y), color=colour, alpha=0.3, lw=0.8)
            y = np.asarray(smoothed(y.tolist()))
        axes.plot(*thinned(x, y), color=colour, lw=1.6, marker="o" if len(steps) == 1 else "")
        last = y[np.isfinite(y)][-1:]
        word = "smoothed" if smooth and len(steps) >= SMOOTH_FROM else "last"
        shown = (format(last[0], digits) if digits else short(last[0])) if len(last) else "–"
        entries.append((f"{prefix(run, runs)}{word} {shown}", {"color": colour}))
    if not entries:
        return None
    _mark_resumes(axes, runs)
    dress(axes, label, across.label)
    legend(figure, entries)
    return Chart(metric, title, f"{title} over steps: " + "; ".join(text for text, _ in entries), figure)


def learning_rate(runs: Sequence[RunFolder]) -> Chart | None:
    """Learning rate over steps."""
    chart = _curve(runs, "lr", "Learning rate", "learning rate", digits="")
    if chart is not None:
        chart.figure.axes[0].set_ylim(bottom=0)
    return chart


def logit_scale(runs: Sequence[RunFolder]) -> Chart | None:
    """logit_scale, the inverse temperature, over steps."""
    return _curve(runs, "logit_scale", "logit_scale", "logit_scale (1 / temperature)", digits=".2f")


def gradient_norm(runs: Sequence[RunFolder]) -> Chart | None:
    """Gradient norm before clipping; on a logarithmic axis where it spans orders of magnitude."""
    chart = _curve(runs, "grad_norm", "Gradient norm", "2-norm, before clipping", smooth=True)
    if chart is None:
        return None
    axes = chart.figure.axes[0]
    values = np.concatenate([run.series("grad_norm")[1] for run in runs])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() > 50 * values.min():
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    clip = {number(run.option("optimizer.clip_norm"), 0) for run in runs}
    if len(clip) == 1 and len(values) and 0 < max(clip) <= values.max() * 1.2:
        axes.axhline(max(clip), color=FAINT, ls=":", lw=1.3)
        axes.annotate(
            "clipped above", (1, max(clip)), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", ha="right", fontsize=8, color=FAINT,
        )  # fmt: skip
    return chart


def throughput(runs: Sequence[RunFolder]) -> Chart | None:
    """Pairs a second over all ranks."""
    chart = _curve(runs, "samples_per_s", "Throughput", "pairs / s, all ranks", digits=",.0f", smooth=True)
    if chart is not None:
        chart.figure.axes[0].set_ylim(bottom=0)
    return chart


def peak_memory(runs: Sequence[RunFolder]) -> Chart | None:
    """The highest memory so far, as logged."""
    return _curve(
        runs, "peak_memory_bytes", "Peak memory", "GiB on rank 0, highest so far", scale=1 / GIB, digits=".2f"
    )


def retrieval(runs: Sequence[RunFolder], k: int | None = None) -> Chart | None:
    """Recall over the evaluations, both directions: R@1, 5 and 10 of one run, or R@k of several."""
    across, entries = Across(runs), []
    figure, axes = new_figure()
    for run, colour in _coloured(runs, f"val/image_to_text_R@{k or 10}", of_evals=True):
        for recall in (k,) if k else (10, 5, 1):
            shade, last = colour if k else SHADES[recall], []
            for direction, style in (("image_to_text", "-"), ("text_to_image", "--")):
                steps, values = run.series(f"val/{direction}_R@{recall}", of_evals=True)
                x, y = thinned(across(run, steps), np.asarray(values))
                axes.plot(x, y, color=shade, ls=style, lw=1.6, marker="o" if len(x) <= 40 else "", ms=3.5)
                last.append(f"{values[-1]:.3f}" if values and math.isfinite(values[-1]) else "–")
            entries.append((f"{prefix(run, runs)}R@{recall}  {' / '.join(last)}", {"color": shade}))
    if not entries:
        return None
    for value in _chance(runs, f"val/image_to_text_R@{k or 10}_chance"):
        axes.axhline(value, color=FAINT, ls=":", lw=1.3)
        entries.append((f"R@{k or 10} by chance {value:.3f}", {"color": FAINT, "ls": ":"}))
    dress(axes, "recall (share found)", across.label)
    _from_zero(axes)
    title = "image → text (solid) / text → image (dashed)"
    legend(figure, entries, title=title)
    name, words = (f"retrieval_at_{k}", f"Held-out retrieval, R@{k}") if k else ("retrieval", "Held-out retrieval")
    return Chart(name, words, f"{words}, {title}: " + "; ".join(text for text, _ in entries), figure)


def zero_shot(runs: Sequence[RunFolder]) -> Chart | None:
    """Zero-shot accuracy over the evaluations."""
    across, entries = Across(runs), []
    figure, axes = new_figure()
    kinds = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}
    for run, colour in _coloured(runs, "val/zero_shot_top1", of_evals=True):
        for (kind, words), shade in zip(kinds.items(), (SHADES[10], SHADES[1], RUN_COLOURS[1]), strict=True):
            steps, values = run.series(f"val/zero_shot_{kind}", of_evals=True)
            if not steps or (len(runs) > 1 and kind != "top1"):
                continue
            style = {"color": colour if len(runs) > 1 else shade}
            x, y = thinned(across(run, steps), np.asarray(values))
            axes.plot(x, y, lw=1.6, marker="o" if len(x) <= 40 else "", ms=3.5, **style)
            entries.append((f"{prefix(run, runs)}{words} {values[-1]:.3f}", style))
    if not entries:
        return None
    for value in _chance(runs, "val/zero_shot_top1_chance"):
        axes.axhline(value, color=FAINT, ls=":", lw=1.3)
        entries.append((f"top-1 by chance {value:.3f}", {"color": FAINT, "ls": ":"}))
    dress(axes, "accuracy (share right)", across.label)
    _from_zero(axes)
    legend(figure, entries)
    title = "Zero-shot accuracy"
    return Chart("zero_shot", title, f"{title} over steps: " + "; ".join(text for text, _ in entries), figure)


def _chance(runs: Sequence[RunFolder], name: str) -> list[float]:
    """The level of chance, where it is one for all runs."""
    levels = {level for run in runs if (level := run.last(name, of_evals=True)) is not None}
    return list(levels) if len(levels) == 1 else []


def _coloured(runs: Sequence[RunFolder], metric: str, *, of_evals: bool = False) -> list[tuple[RunFolder, str]]:
    """The runs that have a metric, each with its colour, which is the same in all charts."""
    chosen = [(run, RUN_COLOURS[place % len(RUN_COLOURS)]) for place, run in enumerate(runs)]
    return [(run, colour) for run, colour in chosen if run.series(metric, of_evals=of_evals)[0]]


def resumes(run: RunFolder) -> list[int]:
    """Steps after which the run was started again."""
    return sorted({start["step"] for start in run.starts if start["step"] > 0})


def _mark_resumes(axes: Any, runs: Sequence[RunFolder]) -> None:
    """A thin line where a run alone on its chart was resumed."""
    for step in resumes(runs[0])[:40] if len(runs) == 1 else ():
        axes.axvline(step, color=FAINT, lw=0.6, alpha=0.7)


def prefix(run: RunFolder, runs: Sequence[RunFolder], most: int = 24) -> str:
    """The run's name before what is said of it, where there are several."""
    return f"{elide(run.label, most)}: " if len(runs) > 1 else ""


def _from_zero(axes: Any) -> None:
    axes.set_ylim(0, None)
    axes.set_ylim(0, min(1.02, max(axes.get_ylim()[1] * 1.02, 1e-6)))
