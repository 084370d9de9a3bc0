"""Text that fits its place and holds no empty boxes: captions come from the web, in any script and of any length."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Measure = Callable[[str], float]
"""The width of a string as it will be drawn."""

FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Droid Sans Fallback", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic",
    "Noto Sans Devanagari", "Noto Sans Bengali", "Noto Sans Tamil", "Noto Sans Thai", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Emoji", "Symbola", "Segoe UI Symbol", "Arial Unicode MS", "Unifont",
)  # fmt: skip
"""Fonts to draw with, those that are installed: the first that has a character draws it."""


@lru_cache(1)
def installed_families() -> tuple[str, ...]:
    """Those of FAMILIES that matplotlib finds; DejaVu Sans comes with it."""
    from matplotlib import font_manager

    found = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(family for family in FAMILIES if family in found)


@lru_cache(1)
def _drawable() -> frozenset[int]:
    """Code points that one of the installed families has a glyph for."""
    from matplotlib import font_manager

    points: set[int] = set()
    for family in installed_families():
        points.update(font_manager.get_font(font_manager.findfont(family)).get_charmap())
    return frozenset(points)


def printable(text: str) -> str:
    """The text on one line, without control characters, and with words in place of what no font here can draw.

    A symbol becomes its Unicode name ("[grinning face]"), letters become the name of their script ("[cjk]").
    """
    text = "".join(" " if character.isspace() else character for character in text)
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Mn") or _has(c))
    parts = []
    for word, run in itertools.groupby(text, _stand_in):
        parts.append("".join(run) if word is None else f" [{word}] ")
    return re.sub(r"\] (?=[^\w\s\[(])", "]", " ".join("".join(parts).split())) or "(no text)"


def _has(character: str) -> bool:
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs")
    return not invisible and ord(character) in _drawable()


def _stand_in(character: str) -> str | None:
    if character == " " or _has(character):
        return None
    name = unicodedata.name(character, "unknown character").lower()
    return name if unicodedata.category(character).startswith("S") else name.split()[0].split("-")[0]


def fit(text: str, width: float, lines: int, measure: Measure) -> list[str]:
    """Wrap to at most ``lines`` lines of ``width``, as ``measure`` gives a string's width; what is over ends in "…".

    Breaks between words where it can, and inside a word that alone is wider than a line.
    """
    fitted: list[str] = []
    rest = text.strip()
    while rest and len(fitted) < lines:
        line = rest if measure(rest) <= width else _head(rest, width, measure)
        after = rest[len(line) :].strip()
        if after and len(fitted) == lines - 1:
            line = _longest(rest, width - measure("…"), measure).rstrip() + "…"
            after = ""
        fitted.append(line.rstrip())
        rest = after
    return fitted


def _head(text: str, width: float, measure: Measure) -> str:
    head = _longest(text, width, measure)
    if text[len(head) : len(head) + 1] != " " and " " in head.strip():
        head = head[: head.rindex(" ")]
    return head


def _longest(text: str, width: float, measure: Measure) -> str:
    """The longest beginning that fits, at least one character."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if measure(text[:middle]) <= width else (low, middle - 1)
    return text[:low]


def measurer(figure: Any, size: float, weight: str = "normal") -> Measure:
    """A function from a string to its width in inches, drawn at ``size`` points in ``figure``."""
    from matplotlib.font_manager import FontProperties

    renderer = figure.canvas.get_renderer()
    font = FontProperties(family=list(installed_families()), size=size, weight=weight)

    @lru_cache(100_000)
    def measure(text: str) -> float:
        return renderer.get_text_width_height_descent(text, font, ismath=False)[0] / figure.dpi

    return measure
