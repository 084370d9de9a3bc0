"""Text in charts and pictures: short numbers, names that fit their place, words for what the font cannot draw."""

from __future__ import annotations

import bisect
import itertools
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

FONT = "DejaVu Sans"
"""The font that comes with matplotlib; all that is drawn here is drawn with it."""
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Mn")  # Unicode's categories of control and combining characters


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
    """A name that fits a legend, its end kept, in characters that the font has."""
    text = printable(text)
    return text if len(text) <= most else text[: most // 3] + "…" + text[-(most - most // 3 - 1) :]


def font_file(*, bold: bool = False) -> str:
    """Path of the font."""
    from matplotlib.font_manager import FontProperties, findfont

    return findfont(FontProperties(family=FONT, weight="bold" if bold else "normal"))


@lru_cache(1)
def drawable() -> frozenset[int]:
    """Code points that the font has, normal and bold."""
    from matplotlib.font_manager import get_font

    normal, bold = (get_font(font_file(bold=bold)).get_charmap() for bold in (False, True))
    return frozenset(normal) & frozenset(bold)


def printable(text: str) -> str:
    """The text on one line, without control characters, and with words in place of what the font cannot draw.

    A symbol becomes its Unicode name ("[grinning face]"), letters become the name of their script ("[cjk]").
    """
    text = "".join(" " if character.isspace() else character for character in text)
    text = "".join(c for c in text if _has(c) or unicodedata.category(c) not in _INVISIBLE)
    runs = itertools.groupby(text, lambda c: None if c == " " or _has(c) else _name(c))
    words = "".join("".join(run) if name is None else f" [{name}] " for name, run in runs)
    return re.sub(r"\] (?=[^\w\s\[(])", "]", " ".join(words.split())) or "(no text)"


def _has(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs") and ord(character) in drawable()


def _name(character: str) -> str:
    name = unicodedata.name(character, "unknown character").lower()
    return name if unicodedata.category(character).startswith("S") else name.split()[0].split("-")[0]


def fit(text: str, width: float, lines: int, measure: Callable[[str], float]) -> list[str]:
    """Wrap to at most ``lines`` lines of ``width``, as ``measure`` gives a string's width; what is over ends in "…".

    Breaks between words where it can, and inside a word that alone is wider than a line.
    """
    fitted, rest = [], text.strip()
    for following in reversed(range(lines)):
        end = _longest(rest, width, measure)
        if end < len(rest) and not following:
            rest = rest[: _longest(rest, width - measure("…"), measure)].rstrip() + "…"
            end = len(rest)
        elif end < len(rest) and " " in rest[: end + 1]:
            end = rest.rindex(" ", 0, end + 1)
        fitted.append(rest[:end].rstrip())
        rest = rest[end:].strip()
    return [line for line in fitted if line]


def _longest(text: str, width: float, measure: Callable[[str], float]) -> int:
    """Characters of the longest beginning that fits, at least one."""
    return max(1, bisect.bisect_right(range(1, len(text) + 1), width, key=lambda length: measure(text[:length])))
