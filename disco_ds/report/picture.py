"""The page as pictures: its charts and held-out images in one PNG, or each in a PNG of its own."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from disco_ds.files import replacing
from disco_ds.report.run_folder import RunFolder
from disco_ds.report.sections import Section, head
from disco_ds.report.style import FAINT, INK, WIDTH, Chart, chart_settings
from disco_ds.report.text import fit, font_file, printable

GREEN, ORANGE = "#1a7f37", "#8a4b00"
COLUMNS, GAP, MARGIN = 3, 25, 40  # pixels, as all below
_DPI = 100
_COLUMN = round(WIDTH * _DPI)
_WHOLE = COLUMNS * _COLUMN + (COLUMNS - 1) * GAP
_IMAGE, _SIMILARITY = 130, 40
_TALLEST = 4000  # a canvas to draw on before its height is known


def save(path: Path, runs: Sequence[RunFolder], parts: Sequence[Section]) -> None:
    """Write all charts and held-out images of a report as one PNG.

    Raises:
        OSError: it cannot be written.
    """
    charts = [_chart(chart, _DPI) for part in parts for chart in part.charts]
    blocks = [_header(runs, parts), _grid(charts)]
    for label, heldout in (each for part in parts for each in part.heldout):
        name = f"{label}: held-out" if len(runs) > 1 else "Held-out"
        words = f"{name} images at step {heldout['step']} and the captions most similar to them, the right one green"
        canvas, draw = _canvas(_WHOLE)
        heading = canvas.crop((0, 0, _WHOLE, _write(draw, 0, 0, words, width=_WHOLE, size=15, bold=True)))
        blocks += [heading, _grid([_heldout(image) for image in heldout["images"]])]
    _save(path, ImageOps.expand(_grid(blocks, columns=1), MARGIN, "white"))


def save_each(folder: Path, runs: Sequence[RunFolder], parts: Sequence[Section]) -> int:
    """Write each chart, and the held-out images of each run, as a PNG in a folder; returns how many.

    Raises:
        OSError: one cannot be written.
    """
    pictures = {chart.name: _chart(chart, 160) for part in parts for chart in part.charts}
    for label, heldout in (each for part in parts for each in part.heldout):
        name = "heldout" if len(runs) == 1 else "heldout-" + re.sub(r"[^\w.-]+", "-", label)
        pictures[name] = ImageOps.expand(_grid([_heldout(image) for image in heldout["images"]]), MARGIN, "white")
    for name, picture in pictures.items():
        _save(folder / f"{name}.png", picture)
    return len(pictures)


def _save(path: Path, picture: Image.Image) -> None:
    with replacing(path) as unfinished:
        picture.save(unfinished, "PNG")


def _chart(chart: Chart, dpi: int) -> Image.Image:
    buffer = io.BytesIO()
    with chart_settings():
        chart.figure.suptitle(chart.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        chart.figure.savefig(buffer, format="png", facecolor="white", dpi=dpi)
    return Image.open(buffer).convert("RGB")


def _header(runs: Sequence[RunFolder], parts: Sequence[Section]) -> Image.Image:
    """Names, how each run stands with its facts and warnings, and what there is no chart of."""
    canvas, draw = _canvas(_WHOLE)
    y = _write(draw, 0, 0, " / ".join(run.label for run in runs), width=_WHOLE, size=24, bold=True)
    for run in runs:
        of_run = head(run)
        facts = [of_run["state"], *(f"{name} {value}" for name, value in of_run["facts"].items())]
        name = f"{run.label}: " if len(runs) > 1 else ""
        y = _write(draw, 0, y, name + "  ·  ".join(facts), width=_WHOLE, size=15, lines=3)
        for warning in of_run["warnings"]:
            y = _write(draw, 0, y, warning, width=_WHOLE, size=15, colour=ORANGE)
    for part in parts:
        if part.notes and not (part.charts or part.tables or part.texts):
            y = _write(draw, 0, y, f"{part.title}: {part.notes[0]}", width=_WHOLE, size=15, colour=FAINT)
    return canvas.crop((0, 0, _WHOLE, y))


def _heldout(shown: dict[str, Any]) -> Image.Image:
    """An image beside the captions ranked first; where no right one is among them, a right one follows."""
    canvas, draw = _canvas(_COLUMN)
    try:
        image = Image.open(io.BytesIO(base64.b64decode(shown["src"].partition(",")[2]))).convert("RGB")
        # a small drawing stays as sharp as it is
        how = Image.Resampling.NEAREST if max(image.size) <= 64 else Image.Resampling.LANCZOS
        canvas.paste(ImageOps.contain(image, (_IMAGE, _IMAGE), how))
    except (OSError, ValueError):  # it is none
        canvas.paste(FAINT, (0, 0, _IMAGE, _IMAGE))
    captions = [(f"{c['similarity']:.2f}", str(c["text"]), bool(c["right"])) for c in shown["top"][:10]]
    if not any(right for *_, right in captions):
        captions += [("…", str(text), True) for text in shown["captions"][:1]]
    left, y = _IMAGE + 12, 0
    at = left + _SIMILARITY
    for similarity, text, right in captions:
        _write(draw, left, y, similarity, width=_SIMILARITY, colour=GREEN if right else FAINT)
        y = _write(draw, at, y, text, width=_COLUMN - at, lines=2, bold=right, colour=GREEN if right else INK)
    colour = GREEN if shown["rank"] == 1 else FAINT
    y = _write(draw, left, y, f"right one: rank {shown['rank']:,}", width=_COLUMN - left, colour=colour)
    return canvas.crop((0, 0, _COLUMN, max(y, _IMAGE)))


def _write(
    draw: ImageDraw.ImageDraw, x: float, y: int, text: str,
    *, width: float, lines: int = 1, size: int = 13, bold: bool = False, colour: str = INK,
) -> int:  # fmt: skip
    """Draw a text on at most ``lines`` lines of ``width``; returns where the next line begins."""
    font = _font(size, bold)
    for line in fit(printable(text), width, lines, font.getlength):
        draw.text((x, y), line, fill=colour, font=font)
        y += round(1.35 * size)
    return y


@lru_cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_file(bold=bold), size)


def _canvas(width: int, height: int = _TALLEST) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (width, height), "white")
    return canvas, ImageDraw.Draw(canvas)


def _grid(tiles: Sequence[Image.Image], columns: int = COLUMNS) -> Image.Image:
    """Tiles in rows, each row as high as its highest."""
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    canvas, _ = _canvas(_WHOLE, max(sum(heights) + GAP * (len(rows) - 1), 1))
    for number, row in enumerate(rows):
        for place, tile in enumerate(row):
            canvas.paste(tile, (place * (_COLUMN + GAP), sum(heights[:number]) + GAP * number))
    return canvas
