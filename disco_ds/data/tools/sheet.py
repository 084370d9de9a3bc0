"""A contact sheet: images as the model gets them, with their captions beneath."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TEXT_PX, SMALL_PX = 14, 11
LINE_PX, SMALL_LINE_PX = 18, 15
GAP_PX = 12
MIN_CELL_PX = 200
SYSTEM_FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")
"""Fonts with many scripts in them, which Pillow looks for in the system's folders."""
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
    tokens: int
    """Tokens of the caption before it is cut."""
    context: int
    """Tokens that the model takes."""


def contact_sheet(
    tiles: Sequence[Tile], mean: Sequence[float], std: Sequence[float], font: str | None = None
) -> Image.Image:
    """Draw the sheet.

    Args:
        tiles: at least one.
        mean, std: of the model's normalisation, by channel.
        font: font file for the captions; None: see :func:`load_font`.

    Raises:
        OSError: ``font`` is not a font.
    """
    face = load_font(TEXT_PX, font)
    pictures = [_enlarged(to_picture(tile.image, mean, std)) for tile in tiles]
    cell = max(MIN_CELL_PX, max(picture.width for picture in pictures))
    texts = [wrap(tile.caption, face, cell) for tile in tiles]
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = [range(start, min(start + columns, len(tiles))) for start in range(0, len(tiles), columns)]
    tall = [max(pictures[i].height for i in row) for row in rows]
    below = [max(len(texts[i]) for i in row) * LINE_PX + 2 * SMALL_LINE_PX + GAP_PX for row in rows]
    height = sum(tall) + sum(below) + GAP_PX * (len(rows) + 1)
    sheet = Image.new("RGB", (columns * (cell + GAP_PX) + GAP_PX, height), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    top = GAP_PX
    for row, picture_px, text_px in zip(rows, tall, below, strict=True):
        for left, i in zip(count(GAP_PX, cell + GAP_PX), row):
            sheet.paste(pictures[i], (left, top))
            _write(draw, tiles[i], texts[i], face, (left, top + picture_px + 4), cell)
        top += picture_px + text_px + GAP_PX
    return sheet


def to_picture(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """Undo the normalisation of a (3, H, W) tensor."""
    pixels = image * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array)


@lru_cache
def load_font(size: int, path: str | None = None) -> ImageFont.FreeTypeFont:
    """A font file at a size in pixels; None: a usual one of the system's, else Pillow's own, which has ASCII only.

    Raises:
        OSError: it is not a font.
    """
    if path is not None:
        return ImageFont.truetype(path, size)
    for name in SYSTEM_FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)  # type: ignore[return-value]  # a bitmap only without FreeType


def lacking(text: str, font: ImageFont.FreeTypeFont) -> set[str]:
    """Characters that the font draws as it draws one that no font has: a box."""
    box = font.getmask("\U0010ffff")
    marks = {char: font.getmask(char) for char in set(text) if char.isprintable() and not char.isspace()}
    return {char for char, mark in marks.items() if (mark.size, bytes(mark)) == (box.size, bytes(box))}


def wrap(text: str, font: ImageFont.FreeTypeFont, width_px: int, max_lines: int = MAX_LINES) -> list[str]:
    """Break a text into lines of at most ``width_px``: between words, and inside one that is wider than a line."""
    for chars in range(width_px // 4, 0, -1):
        lines = textwrap.wrap(text, chars, max_lines=max_lines, placeholder="…")
        if all(font.getlength(line) <= width_px for line in lines):
            break
    return lines


def _enlarged(picture: Image.Image) -> Image.Image:
    """Small images in whole multiples, so that their pixels can be seen."""
    factor = max(1, MIN_CELL_PX // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _write(
    draw: ImageDraw.ImageDraw, tile: Tile, lines: Sequence[str], face: ImageFont.FreeTypeFont, at: tuple[int, int],
    width_px: int
) -> None:  # fmt: skip
    left, top = at
    for line in lines:
        draw.text((left, top), line, fill=INK, font=face)
        top += LINE_PX
    small, cut = load_font(SMALL_PX), tile.tokens > tile.context
    tokens = f"{tile.tokens:,} tokens" + (f", cut to {tile.context}" if cut else f" of {tile.context}")
    for words, colour in ((tokens, RED if cut else GREY), (tile.key, GREY)):
        draw.text((left, top), "".join(wrap(words, small, width_px, max_lines=1)), fill=colour, font=small)
        top += SMALL_LINE_PX
