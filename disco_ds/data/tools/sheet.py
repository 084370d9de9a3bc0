"""A contact sheet: images as the model gets them, with their captions beneath."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from disco_ds.data.tools.fonts import Face

TEXT_PX, SMALL_PX = 14, 11
LINE_PX, SMALL_LINE_PX = 18, 15
GAP_PX = 12
MIN_CELL_PX = 200
MAX_LINES = 8
"""Lines of a caption that are shown; a longer one ends in "…"."""
INK, GREY, RED = (20, 20, 20), (120, 120, 120), (190, 30, 30)


@dataclass
class Tile:
    """One image of the sheet."""

    image: Tensor
    """(3, H, W) float32 as the model gets it."""
    caption: str
    key: str
    tokens: int | None
    """Tokens of the caption before it is cut."""
    context: int | None
    """Tokens that the model takes."""


def to_picture(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Undo the normalisation of a (3, H, W) tensor."""
    pixels = image * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array)


def wrap(text: str, font: Face, width_px: int, max_lines: int = MAX_LINES) -> list[str]:
    """Break a text into lines of at most ``width_px``: between words, and inside one where it is wider than a line."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if font.getlength(joined) <= width_px:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while font.getlength(line) > width_px:  # scripts without spaces, and URLs
            fits = _fitting(line, font, width_px)
            lines.append(line[:fits])
            line = line[fits:]
    lines.append(line)
    if len(lines) > max_lines:
        lines = lines[:max_lines]
        last = lines[-1]
        while last and font.getlength(f"{last}…") > width_px:
            last = last[:-1]
        lines[-1] = f"{last}…"
    return lines


def _fitting(word: str, font: Face, width_px: int) -> int:
    """How many characters of a word fit into a line; at least 1."""
    low, high = 1, len(word)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(word[:middle]) <= width_px else (low, middle - 1)
    return low


@dataclass
class _Text:
    lines: list[str]
    face: Face


def contact_sheet(
    tiles: Sequence[Tile], mean: Sequence[float], std: Sequence[float], font: str | None = None
) -> tuple[Image.Image, set[str]]:
    """The sheet, and the characters that no installed font has (drawn as boxes).

    Args:
        tiles: at least one.
        mean, std: of the model's normalisation, by channel.
        font: a font file that is tried before those that are installed.
    """
    pictures = [_enlarged(to_picture(tile.image, mean, std)) for tile in tiles]
    columns = math.ceil(math.sqrt(len(tiles)))
    cell = max(MIN_CELL_PX, max(picture.width for picture in pictures))
    texts: list[_Text] = []
    missing: set[str] = set()
    for tile in tiles:
        face = Face(tile.caption, TEXT_PX, font)
        missing |= face.missing
        texts.append(_Text(wrap(tile.caption, face, cell), face))
    rows = [range(start, min(start + columns, len(tiles))) for start in range(0, len(tiles), columns)]
    tall = [max(pictures[i].height for i in row) for row in rows]
    below = [max(len(texts[i].lines) for i in row) * LINE_PX + 2 * SMALL_LINE_PX + GAP_PX for row in rows]
    height = sum(tall) + sum(below) + GAP_PX * (len(rows) + 1)
    sheet = Image.new("RGB", (columns * (cell + GAP_PX) + GAP_PX, height), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    top = GAP_PX
    for row, picture_px, text_px in zip(rows, tall, below, strict=True):
        for place, i in enumerate(row):
            left = GAP_PX + place * (cell + GAP_PX)
            sheet.paste(pictures[i], (left, top))
            _write(draw, tiles[i], texts[i], left, top + picture_px + 4, cell)
        top += picture_px + text_px + GAP_PX
    return sheet, missing


def _enlarged(picture: Image.Image) -> Image.Image:
    """Small images in whole multiples, so that their pixels can be seen."""
    factor = max(1, MIN_CELL_PX // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _write(draw: ImageDraw.ImageDraw, tile: Tile, text: _Text, left: int, top: int, width: int) -> None:
    for line in text.lines:
        text.face.draw(draw, left, top, line, INK)
        top += LINE_PX
    note, colour = f"{len(tile.caption):,} characters", GREY
    if tile.tokens is not None and tile.context is not None:
        cut = tile.tokens > tile.context
        note = f"{tile.tokens:,} tokens" + (f", cut to {tile.context}" if cut else f" of {tile.context}")
        colour = RED if cut else GREY
    for words, ink in ((note, colour), (tile.key, GREY)):
        small = Face(words, SMALL_PX)
        small.draw(draw, left, top, wrap(words, small, width, max_lines=1)[0], ink)
        top += SMALL_LINE_PX
