"""How the charts of disco-report look, and how a figure becomes an inline SVG that follows a page's light or dark."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from disco_ds.report.words import installed_families, printable

GIB = 2**30
INK, FAINT, GRID = "#222222", "#7a7a7a", "#e6e6e6"
RUN_COLOURS = ("#2f6fb3", "#d9730d", "#2a9d5c", "#b5478a", "#7a5cc4", "#8c6d31", "#1d91a3", "#c43d3d")
SHADES = {1: "#7fb2e0", 5: "#4f94cd", 10: "#134f86"}
"""Colours of R@1, R@5 and R@10."""
DARK = {
    INK: "#e4e4e4", FAINT: "#9a9a9a", GRID: "#3a3a3a", "#2f6fb3": "#6aa9e9",
    SHADES[10]: "#d3e8fa", SHADES[5]: "#7dbcf0", SHADES[1]: "#3a76ad",
}  # fmt: skip
"""What a colour becomes on a dark page, where it would be hard to see; the others do on both."""

WIDTH, HEIGHT = 4.9, 3.3  # inches


@contextlib.contextmanager
def chart_settings() -> Iterator[None]:
    """matplotlib's own settings and those of the charts: a user's matplotlibrc is made for other pictures."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({
            "font.family": list(installed_families()), "font.size": 10, "text.color": INK, "text.parse_math": False,
            "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
            "svg.fonttype": "none", "svg.hashsalt": "disco-report", "axes.formatter.useoffset": False,
        })  # fmt: skip
        yield


def new_figure(height: float | None = None) -> tuple[Any, Any]:
    """A figure of the charts' width with its one axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height or HEIGHT), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def dress(axes: Any, label: str, across: str) -> None:
    """Names of the axes, grid and tick labels of a chart over steps."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(label, labelpad=7)
    axes.set_xlabel(across)
    if across in ("step", "pairs seen"):
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.get_major_locator().set_params(nbins=6)


def legend(figure: Any, entries: Sequence[tuple[str, Any]], *, title: str | None = None, columns: int = 2) -> None:
    """A legend below the axes, where no curve runs into it; an entry is a text with a handle or a line's style."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], lw=2, **how) if isinstance(how, dict) else how for _, how in entries]
    columns = 1 if any(len(text) > 30 for text, _ in entries) else columns
    figure.legend(
        handles, [text for text, _ in entries], title=title, loc="outside lower left", ncols=columns, fontsize=9,
        title_fontsize=9, frameon=False, handlelength=1.4, columnspacing=1.4, alignment="left", borderpad=0.1,
    )  # fmt: skip


def short(value: float) -> str:
    """A number in few characters: "12.5K", "3M", "7.5e-4"."""
    size = abs(value)
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e4, "K")):
        if size >= unit:
            unit = 1e3 if name == "K" else unit
            return f"{value / unit:.4g}{name}"
    if size >= 1e-3 or value == 0:
        return f"{value:.5g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def elide(text: str, most: int = 24) -> str:
    """A name that fits a legend, its end kept, in characters that the installed fonts have."""
    text = printable(text)
    return text if len(text) <= most else text[: most // 3] + "…" + text[-(most - most // 3 - 1) :]


def inline_svg(figure: Any, name: str, alt: str) -> str:
    """The figure as an ``<svg>`` element: as wide as its place, its colours the page's, its ids its own.

    Args:
        name: prefix of the ids, unique on the page.
        alt: the content in words, for screen readers.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    for colour in DARK:
        text = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var({variable(colour)})", text)
    # text without a colour of its own is black, which is not to be seen on a dark page
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return f'<svg {box[0]} role="img" aria-label="{_attribute(alt)}" xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'


def png_bytes(figure: Any) -> bytes:
    """The figure as a PNG on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def variable(colour: str) -> str:
    """The page's name for a colour of DARK."""
    return f"--c{colour.lstrip('#')}"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
