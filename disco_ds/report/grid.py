"""The grid of the report picture: held-out images, each with the captions that the model ranks first."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from disco_ds.report.curves import FAINT, GREEN, INK
from disco_ds.report.words import Measure, fit, measurer, printable

if TYPE_CHECKING:  # the evaluation brings torch, which disco-report does without
    from disco_ds.evaluation.result import RankedImage

COLUMNS = 3
_IMAGE, _GAP = 1.3, 0.2  # inches
_CELL = _IMAGE + 0.28  # the image and the words below it
_SIZE, _LINE, _AIR = 9.5, 0.168, 0.3  # points; inches a line; inches between rows
_NUMBER, _SIMILARITY = 0.24, 0.4  # inches kept for "5." and for "0.83"


class _Entry(NamedTuple):
    """A caption as it is drawn: its place, its similarity, its lines, and whether it is right."""

    place: str
    similarity: str
    lines: list[str]
    right: bool


def draw_kept(images: list[dict[str, Any]]) -> Any:
    """A figure of the images that a run has kept in its folder (:mod:`disco_ds.run.recorder`).

    Raises:
        OSError: an image cannot be read.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples: Any = [
        SimpleNamespace(
            pixels=np.asarray(Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))).convert("RGB")),
            captions=[str(text) for text in image["captions"]] or [""],
            rank=image["rank"],
            top=[SimpleNamespace(**{**caption, "text": str(caption["text"])}) for caption in image["top"]],
        )
        for image in images
    ]
    figure = Figure(figsize=(16, 1), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    grid = Grid(figure, samples, left=0.3, right=0.3)
    figure.set_figheight(grid.height + 0.4)
    grid.draw(figure, 0.3)
    return figure


class Grid:
    """Held-out images in rows of COLUMNS, each row as high as its captions need.

    Args:
        figure: gives the fonts their sizes.
        samples: what to show.
        left, right: margins in inches; the grid takes the width between them.
    """

    def __init__(self, figure: Any, samples: list[RankedImage], *, left: float, right: float) -> None:
        self.left, self.width = left, (figure.get_figwidth() - left - right + _GAP) / COLUMNS
        room = self.width - _IMAGE - 2 * _GAP - _NUMBER - _SIMILARITY
        measure = measurer(figure, _SIZE), measurer(figure, _SIZE, "bold")
        cells = [(sample, _entries(sample, room, measure)) for sample in samples]
        self.rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
        self.heights = [
            max(_CELL, *(_LINE * sum(len(entry.lines) for entry in entries) for _, entries in row)) + _AIR
            for row in self.rows
        ]
        self.height = sum(self.heights)

    def draw(self, figure: Any, top: float) -> None:
        """Draw all rows, the first one ``top`` inches below the figure's upper edge."""
        for row, height in zip(self.rows, self.heights, strict=True):
            for place, (sample, entries) in enumerate(row):
                _draw_cell(figure, sample, entries, self.left + place * self.width, top)
            top += height


def _entries(sample: RankedImage, room: float, measure: tuple[Measure, Measure]) -> list[_Entry]:
    """The captions ranked first; where no right one is among them, a right one follows."""
    entries = [
        _Entry(
            f"{place}.",
            f"{caption.similarity:.2f}",
            fit(printable(caption.text), room, 2, measure[caption.right]),
            caption.right,
        )
        for place, caption in enumerate(sample.top, start=1)
    ]
    if not any(entry.right for entry in entries):
        entries.append(_Entry("…", "", fit(printable(sample.captions[0]), room, 2, measure[1]), True))
    return entries


def _draw_cell(figure: Any, sample: RankedImage, entries: list[_Entry], x: float, y: float) -> None:
    across, down = figure.get_size_inches()
    axes = figure.add_axes((x / across, 1 - (y + _IMAGE) / down, _IMAGE / across, _IMAGE / down), anchor="N")
    axes.imshow(sample.pixels, interpolation="lanczos" if min(sample.pixels.shape[:2]) >= 32 else "nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color="#d0d0d0", linewidth=0.8)

    def write(at: float, baseline: float, text: str, **style: Any) -> None:
        figure.text(at / across, 1 - baseline / down, text, fontsize=_SIZE, parse_math=False, **style)

    image_height = _IMAGE * min(1.0, sample.pixels.shape[0] / sample.pixels.shape[1])
    found = GREEN if sample.rank == 1 else INK
    write(x + _IMAGE / 2, y + image_height + 0.2, f"right one: rank {sample.rank:,}", ha="center", color=found)
    left, baseline = x + _IMAGE + _GAP, y + 0.13
    for entry in entries:
        colour, faint = (GREEN, GREEN) if entry.right else (INK, FAINT)
        write(left, baseline, entry.place, color=faint)
        write(left + _NUMBER, baseline, entry.similarity, color=faint)
        for line in entry.lines:
            style = {"color": colour, "weight": "bold" if entry.right else "normal"}
            write(left + _NUMBER + _SIMILARITY, baseline, line, **style)
            baseline += _LINE
