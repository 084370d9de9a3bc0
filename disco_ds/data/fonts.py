"""A font for a caption in any script, out of what is installed."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

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
    """The first font that has every character of ``text``, else the one that lacks fewest; and what it lacks.

    ``given``: a font file that is tried first.
    """
    best: tuple[str | None, frozenset[str]] | None = None
    for path in [*([given] if given else []), *map(str, installed()), None]:
        try:
            missing = frozenset(lacking(path, text))
        except OSError:
            continue
        if not missing:
            return path, missing
        if best is None or len(missing) < len(best[1]):
            best = path, missing
    assert best is not None  # Pillow's own font loads always
    return best
