"""A font for a caption in any script, out of what is installed."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from PIL import ImageDraw, ImageFont

ENDINGS = (".ttf", ".otf", ".ttc")
_FIRST = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")
"""Fonts with many scripts in them, tried before all others."""
_STYLES = ("bold", "italic", "oblique", "light", "thin", "black", "mono", "condensed", "serif", "medium", "narrow")

_NO_LETTERS = ("lastresort", "adobeblank")
"""Fonts that draw a box for every character there is."""

Font = ImageFont.FreeTypeFont


def _folders() -> list[Path]:
    home = Path.home()
    folders = [home / ".fonts", home / ".local/share/fonts", Path("/usr/share/fonts"), Path("/usr/local/share/fonts")]
    if sys.platform == "darwin":
        folders += [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        folders.append(Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts")
    try:
        import matplotlib

        folders.append(Path(matplotlib.get_data_path()) / "fonts/ttf")
    except ImportError:  # an extra; there may be fonts all the same
        pass
    return folders


@lru_cache(maxsize=1)
def installed() -> list[Path]:
    """Font files, those with many scripts first, then upright ones of normal weight."""
    files = [file for folder in _folders() if folder.is_dir() for file in sorted(folder.rglob("*"))]
    fonts = {file.name: file for file in files if file.suffix.lower() in ENDINGS}
    fonts = {name: file for name, file in fonts.items() if not name.lower().startswith(_NO_LETTERS)}
    first = [fonts[name] for name in _FIRST if name in fonts]
    plain = [file for name, file in sorted(fonts.items()) if not any(style in name.lower() for style in _STYLES)]
    return list(dict.fromkeys(first + plain))


@lru_cache(maxsize=256)
def load(path: str | None, size: int) -> Font:
    """The font at ``path``; None: the one that comes with Pillow, which has Latin letters only.

    Raises:
        OSError: it is not a font.
    """
    if path is None:
        return ImageFont.load_default(size)  # type: ignore[return-value]  # a bitmap only without FreeType
    return ImageFont.truetype(path, size)


@lru_cache(maxsize=100_000)
def _has(path: str | None, char: str) -> bool:
    """Whether the font has this character: it draws another thing than for one that no font has."""
    font = load(path, 16)
    drawn, box = font.getmask(char), font.getmask("\U0010ffff")
    return (drawn.size, bytes(drawn)) != (box.size, bytes(box))


def lacking(path: str | None, text: str) -> set[str]:
    """Characters of ``text`` that the font cannot draw; white space and marks without a width do not count."""
    return {char for char in set(text) if char.isprintable() and not char.isspace() and not _has(path, char)}


@lru_cache(maxsize=4096)
def font_for(text: str, given: str | None = None) -> tuple[str | None, frozenset[str]]:
    """The first font with all letters and digits of ``text``, else the one that lacks fewest; and all that it lacks.

    Of a text without letters and digits every character counts. ``given``: a font file that is tried first.
    """
    needed = "".join(char for char in text if char.isalnum()) or text
    best: tuple[int, str | None] | None = None
    for path in [*([given] if given else []), *map(str, installed()), None]:
        try:
            count = len(lacking(path, needed))
        except OSError:
            continue
        if best is None or count < best[0]:
            best = count, path
        if not count:
            break
    assert best is not None  # Pillow's own font loads always
    return best[1], frozenset(lacking(best[1], text))


class Face:
    """A text's font, and others for the characters that it lacks, such as an emoji in an English caption.

    Args:
        text: what will be drawn, or what that is a part of.
        size: pixels.
        given: a font file that is tried before those that are installed.
    """

    def __init__(self, text: str, size: int, given: str | None = None) -> None:
        path, lacking = font_for(text, given)
        self.font = load(path, size)
        self.others: dict[str, Font] = {}
        self.missing: set[str] = set()
        """Characters that no font has: they are drawn as boxes."""
        for char in lacking:
            other, none = font_for(char, given)
            if none:
                self.missing.add(char)
            else:
                self.others[char] = load(other, size)

    def _runs(self, text: str) -> list[tuple[str, Font]]:
        runs = groupby(text, key=lambda char: self.others.get(char, self.font))
        return [("".join(run), font) for font, run in runs]

    def getlength(self, text: str) -> float:
        """Width in pixels."""
        return sum(font.getlength(run) for run, font in self._runs(text))

    def draw(self, draw: ImageDraw.ImageDraw, left: float, top: int, text: str, colour: tuple[int, int, int]) -> None:
        """Draw one line; ``top`` is that of the first font's letters."""
        base = top + self.font.getmetrics()[0]
        for run, font in self._runs(text):
            draw.text((left, base), run, fill=colour, font=font, anchor="ls")
            left += font.getlength(run)
