"""How charts look, and how a figure becomes an inline SVG that follows a page's light or dark."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from disco_ds.report.run_folder import RunFolder
from disco_ds.report.text import FONT, elide, short

INK, FAINT, GRID = "#222222", "#7a7a7a", "#e6e6e6"
OTHER = "#bdbdbd"
RUN_COLOURS = ("#2f6fb3", "#d9730d", "#2a9d5c", "#b5478a", "#7a5cc4", "#8c6d31", "#1d91a3", "#c43d3d")
SHADES = {1: "#7fb2e0", 5: "#4f94cd", 10: "#134f86"}
"""Colours of R@1, R@5 and R@10."""
DARK = {
    INK: "#e4e4e4", FAINT: "#9a9a9a", GRID: "#3a3a3a", "#2f6fb3": "#6aa9e9",
    SHADES[10]: "#d3e8fa", SHADES[5]: "#7dbcf0", SHADES[1]: "#3a76ad",
}  # fmt: skip
"""What a colour becomes on a dark page, where it would be hard to see; the others do on both."""

WIDTH, HEIGHT = 4.9, 3.3  # inches; all charts are as wide, so that they can be read on a phone


@dataclass(frozen=True)
class Chart:
    """A matplotlib figure, the name of its file, its title, and its content in words."""

    name: str
    title: str
    alt: str
    figure: Any


@contextlib.contextmanager
def chart_settings() -> Iterator[None]:
    """matplotlib's own settings and those of the charts: a user's matplotlibrc is made for other pictures."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({
            "font.family": [FONT], "font.size": 10, "text.color": INK, "text.parse_math": False,
            "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
            "svg.fonttype": "none", "svg.hashsalt": "disco-report", "axes.formatter.useoffset": False,
        })  # fmt: skip
        yield


def new_figure(height: float = HEIGHT) -> tuple[Any, Any]:
    """A figure of the charts' width with its one axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def label_axes(axes: Any, label: str, across: str) -> None:
    """Names of the axes, grid and tick labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(label, labelpad=7)
    axes.set_xlabel(across)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    if across in ("step", "pairs seen"):
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1, nbins=5)
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.get_major_locator().set_params(nbins=6)


def add_legend(figure: Any, entries: Sequence[tuple[str, dict[str, Any]]], title: str = "", columns: int = 2) -> None:
    """A legend below the axes, where no curve runs into it; the figure grows with it.

    Args:
        entries: texts and the looks of their lines.
    """
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **{"lw": 2, **how}) for _, how in entries]
    columns = 1 if any(len(text) > 30 for text, _ in entries) else columns
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, -(-len(entries) // columns) - 2))
    figure.legend(
        handles, [text for text, _ in entries], title=title, loc="outside lower left", ncols=columns, fontsize=9,
        title_fontsize=9, frameon=False, handlelength=1.4, columnspacing=1.4, alignment="left", borderpad=0.1,
    )  # fmt: skip


def prefix(run: RunFolder, runs: Sequence[RunFolder], most: int = 24) -> str:
    """The run's name before what is said of it, where there are several."""
    return f"{elide(run.label, most)}: " if len(runs) > 1 else ""


def inline_svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element: as wide as its place, its colours the page's, its ids its own."""
    buffer = io.StringIO()
    chart.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.name}-", text)
    for colour in DARK:
        text = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var({variable(colour)})", text)
    # text without a colour of its own is black, which is not to be seen on a dark page
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    alt = html.escape(chart.alt)
    return f'<svg {box[0]} role="img" aria-label="{alt}" xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'


def variable(colour: str) -> str:
    """The page's name for a colour of DARK."""
    return f"--c{colour.lstrip('#')}"
