"""The curves of the report picture: loss, learning rate and logit_scale, retrieval, zero-shot accuracy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

INK, FAINT, GREEN = "#222222", "#8a8a8a", "#1a7f37"
_BLUE, _ORANGE = "#2f6fb3", "#d9730d"
_RECALL_COLOURS = {1: "#9ec5e8", 5: "#4f94cd", 10: "#134f86"}

_SMOOTH_FROM = 60  # logged steps

Lines = list[dict[str, Any]]


def column(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; a null (NaN or infinity, once) is NaN, which leaves a gap in the curve."""
    present = [line for line in lines if name in line]
    return [line["step"] for line in present], [math.nan if line[name] is None else line[name] for line in present]


def smoothed(values: list[float]) -> list[float]:
    """Centred mean over about a thirtieth of the curve, so that it does not lag behind; NaN is passed over."""
    reach = max(1, len(values) // 60)
    finite = np.isfinite(values)
    sums = np.cumsum([0.0, *np.where(finite, values, 0.0)])
    counts = np.cumsum([0, *finite])
    middle = np.arange(len(values))
    low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), math.nan).tolist()


def global_batch(lines: Lines) -> int | None:
    """Pairs a step, as the last logged line tells."""
    if not lines or not lines[-1].get("samples_seen") or not lines[-1]["step"]:
        return None
    return round(lines[-1]["samples_seen"] / lines[-1]["step"])


def draw_loss(axes: Any, lines: Lines, *, chance: bool) -> None:
    """Loss as logged and smoothed; ``chance`` adds ln(B), the loss of a model that knows nothing of B pairs."""
    steps, values = column(lines, "loss")
    _dress(axes, "Loss", steps)
    if not steps:
        return
    many = len(steps) >= _SMOOTH_FROM
    axes.plot(steps, values, color=_BLUE, alpha=0.35 if many else 1, lw=1.2, marker="" if len(steps) > 1 else "o")
    curve = smoothed(values) if many else values
    last = [value for value in curve if math.isfinite(value)][-1:]
    if many:
        axes.plot(steps, curve, color=_BLUE, lw=2)
    label = f"{'smoothed' if many else 'last'} {last[0]:.3f}" if last else "not finite"
    entries = [(label, {"color": _BLUE, "lw": 2})]
    batch = global_batch(lines)
    if chance and batch and batch > 1:
        axes.axhline(math.log(batch), color=FAINT, ls=":", lw=1.5)
        entries.append((f"chance ln({batch:,}) = {math.log(batch):.3f}", {"color": FAINT, "ls": ":", "lw": 1.5}))
    axes.set_ylim(bottom=0)
    _legend(axes, entries)


def draw_schedule(upper: Any, lower: Any, lines: Lines) -> None:
    """Learning rate above logit_scale, over the same steps."""
    for axes, name, title, colour in (
        (upper, "lr", "Learning rate", _ORANGE),
        (lower, "logit_scale", "logit_scale", _BLUE),
    ):
        steps, values = column(lines, name)
        _dress(axes, title, steps)
        if steps:
            axes.plot(steps, values, color=colour, lw=1.8, marker="" if len(steps) > 1 else "o")
            axes.yaxis.get_major_locator().set_params(nbins=4)
    upper.set_xlabel("")
    upper.tick_params(labelbottom=False)
    upper.yaxis.set_major_formatter(lambda value, _: _short(value))
    upper.set_ylim(bottom=0)


def draw_retrieval(axes: Any, evals: Lines) -> None:
    """R@1, 5 and 10 of both directions over the evaluations, with the chance level of R@10."""
    steps, _ = column(evals, "val/image_to_text_R@10")
    _dress(axes, "Held-out retrieval", steps, empty="no evaluation")
    if not steps:
        return
    entries = []
    for k, colour in reversed(_RECALL_COLOURS.items()):
        last = []
        for direction, style in (("image_to_text", "-"), ("text_to_image", "--")):
            at, values = column(evals, f"val/{direction}_R@{k}")
            axes.plot(at, values, color=colour, ls=style, lw=1.8, marker="o", ms=_marker(at))
            last.append(f"{values[-1]:.3f}" if values else "–")
        entries.append((f"R@{k}   {' / '.join(last)}", {"color": colour, "lw": 2}))
    _, chance = column(evals, "val/image_to_text_R@10_chance")
    if chance:
        axes.axhline(chance[-1], color=FAINT, ls=":", lw=1.5)
        entries.append((f"R@10 by chance {chance[-1]:.3f}", {"color": FAINT, "ls": ":", "lw": 1.5}))
    axes.set_ylim(0, None)
    axes.set_ylim(0, min(1.02, axes.get_ylim()[1] * 1.02))
    _legend(axes, entries, "image → text (solid) / text → image (dashed)")


def draw_zero_shot(axes: Any, evals: Lines) -> None:
    """Zero-shot accuracy over the evaluations, with chance."""
    steps, _ = column(evals, "val/zero_shot_top1")
    _dress(axes, "Zero-shot accuracy", steps, empty="no classes" if evals else "no evaluation")
    if not steps:
        return
    entries = []
    for name, label, colour in (
        ("top1", "top-1", _RECALL_COLOURS[10]),
        ("top5", "top-5", _RECALL_COLOURS[1]),
        ("mean_per_class", "mean per class", _ORANGE),
    ):
        at, values = column(evals, f"val/zero_shot_{name}")
        if values:
            axes.plot(at, values, color=colour, lw=1.8, marker="o", ms=_marker(at))
            entries.append((f"{label} {values[-1]:.3f}", {"color": colour, "lw": 2}))
    _, chance = column(evals, "val/zero_shot_top1_chance")
    axes.axhline(chance[-1], color=FAINT, ls=":", lw=1.5)
    entries.append((f"top-1 by chance {chance[-1]:.3f}", {"color": FAINT, "ls": ":", "lw": 1.5}))
    axes.set_ylim(0, None)
    axes.set_ylim(0, min(1.02, axes.get_ylim()[1] * 1.02))
    _legend(axes, entries)


def _short(value: float) -> str:
    """A learning rate in few characters: "7.5e-4"."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def _marker(steps: list[int]) -> float:
    return 5 if len(steps) <= 40 else 0


def _dress(axes: Any, title: str, steps: list[int], empty: str = "no logged steps") -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    if not steps:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, empty, ha="center", va="center", color=FAINT, fontsize=10, transform=axes.transAxes)
        return
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("step", fontsize=9, color=INK)
    low = 0 if len(steps) == 1 or steps[0] <= steps[-1] / 2 else steps[0]
    axes.set_xlim(low, steps[-1] + max(0.1, (steps[-1] - low) * 0.03))


def _legend(axes: Any, entries: list[tuple[str, dict[str, Any]]], title: str | None = None) -> None:
    """Below the axes, where no curve can run into it."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style) for _, style in entries]
    legend = axes.legend(
        handles, [label for label, _ in entries], title=title, loc="upper left", bbox_to_anchor=(-0.02, -0.17), ncols=2,
        fontsize=9, title_fontsize=9, frameon=False, handlelength=1.6, columnspacing=1.4, alignment="left", borderpad=0,
    )  # fmt: skip
    legend.set_in_layout(False)
