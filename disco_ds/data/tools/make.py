"""Shards from files: ``disco-data make``. The same source gives the same bytes, and a killed one goes on.

Every shard is a fixed range of the source's entries, appears under its name when it is whole, and gets a line in
``make-done.jsonl`` then. ``make.json`` says of what source and with what options the folder is made.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from disco_ds.data.tools.listing import Entry, Listing, Options
from disco_ds.data.tools.write import shard_writer, writing
from disco_ds.errors import DataError
from disco_ds.files import append_line, replace_text, replacing

VERSION = 1
WHAT, DONE, MISSING = "make.json", "make-done.jsonl", "missing.txt"


@dataclass(frozen=True)
class Task:
    """One shard to write."""

    path: str
    entries: list[Entry]


@dataclass
class Made:
    """What became of one shard."""

    shard: str
    samples: int
    bytes: int = 0
    extensions: list[str] = field(default_factory=list)
    """Endings of the images in it."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(sample, reason) of what could not be written."""


def open_folder(out: Path, listing: Listing, options: Options, source: Path) -> dict[str, Made]:
    """Begin in ``out``, or go on there: gives the shards that are finished.

    Raises:
        DataError: the folder holds something else, or what was made of another source or with other options.
    """
    asked: dict[str, Any] = {"version": VERSION, "fingerprint": listing.fingerprint, "options": asdict(options)}
    what = out / WHAT
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not what.exists():
            if any(out.iterdir()):
                raise DataError(f"OUT {out} holds files that disco-data make did not begin; give an empty folder")
            replace_text(what, json.dumps({"source": str(source.absolute()), **asked}, indent=2) + "\n")
            return {}
        found = json.loads(what.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {error}; give an empty folder as OUT") from error
    if found.get("version") != VERSION or found.get("fingerprint") != asked["fingerprint"]:
        raise DataError(
            f"OUT {out} was begun from {found.get('source')} as it was then; that is not SOURCE {source} as it is now. "
            "Give another folder, or remove this one to start anew"
        )
    if found["options"] != asked["options"]:
        pairs = [(key, found["options"].get(key), value) for key, value in asked["options"].items()]
        words = ", ".join(f"{key} was {before!r} and is now {now!r}" for key, before, now in pairs if before != now)
        raise DataError(f"OUT {out} was begun with other options: {words}. Put them back, or give another folder")
    return _finished(out)


def _finished(out: Path) -> dict[str, Made]:
    finished: dict[str, Made] = {}
    path = out / DONE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            made = Made(**json.loads(line))
        except (ValueError, TypeError):
            continue  # the process was killed while it wrote this; its shard is made again
        if made.shard == "" or (out / made.shard).exists():
            finished[made.shard] = made
    return finished


def record_finished(out: Path, made: Made) -> None:
    """Remember that a shard is finished.

    Raises:
        DataError: the folder cannot be written.
    """
    with writing(out / DONE):
        append_line(out / DONE, json.dumps(asdict(made)))


def split_of(group: str, val_fraction: float) -> str:
    """ "val" for about that fraction of all groups, by a hash that stays the same for ever; else "train"."""
    drawn = int(hashlib.sha256(group.encode("utf-8", "surrogateescape")).hexdigest()[:13], 16) / 16**13
    return "val" if drawn < val_fraction else "train"


def tasks(listing: Listing, options: Options, out: Path, skip: set[str]) -> Iterator[Task | Made]:
    """Every shard that is not in ``skip``, and at the end, if any, a Made of what belongs to no shard."""
    held: dict[str, list[Entry]] = {"train": [], "val": []}
    counts = dict.fromkeys(held, 0)
    stray = Made("", 0)

    def close(split: str) -> Iterator[Task]:
        path = out / f"{split}-{counts[split]:05d}.tar"
        counts[split] += 1
        entries, held[split] = held[split], []
        if path.name not in skip:
            yield Task(str(path), entries)

    for entry in listing.entries():
        if entry.fault is not None:
            stray.missing.append((entry.name, entry.fault))
            continue
        split = split_of(entry.group, options.val_fraction)
        held[split].append(entry)
        if len(held[split]) == options.samples_per_shard:
            yield from close(split)
    for split, left in held.items():
        if left:
            yield from close(split)
    if stray.missing and stray.shard not in skip:
        yield stray


def make_shard(task: Task | Made) -> Made:
    """Write one shard; a Made is given back as it is.

    Raises:
        DataError: the shard cannot be written.
    """
    if isinstance(task, Made):
        return task
    path = Path(task.path)
    made = Made(path.name, 0)
    extensions = set()
    with shard_writer(path) as writer:  # over a shard without its line in make-done.jsonl
        for entry in task.entries:
            try:
                files = _files_of(entry)
            except _Missing as fault:
                made.missing.append((entry.name, str(fault)))
                continue
            writer.write({"__key__": entry.key, **files})
            extensions.add(next(iter(files)))
            made.samples += 1
            made.bytes += sum(map(len, files.values()))
    made.extensions = sorted(extensions)
    return made


class _Missing(Exception):
    """A sample cannot be written."""


def _files_of(entry: Entry) -> dict[str, bytes]:
    """The files of a sample by extension, the image first."""
    if isinstance(entry.image, str):
        image, extension = _read(entry.image), Path(entry.image).suffix.lstrip(".").lower()
    else:
        image, extension = entry.image, ""
    if not extension:
        extension = _format(image)
    files = {extension: image}
    files |= {end: text.encode("utf-8", "surrogateescape") for end, text in entry.texts}
    files |= {end: _read(path) for end, path in entry.files}
    if not image:
        raise _Missing("the image is empty")
    if not files["txt"].strip():
        raise _Missing("the caption is empty")
    return files


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise _Missing("no such file") from None
    except (OSError, ValueError) as error:
        raise _Missing(f"cannot be read: {error}") from None


def _format(image: bytes) -> str:
    try:
        with Image.open(io.BytesIO(image)) as found:
            return {"JPEG": "jpg"}.get(found.format or "", (found.format or "").lower())
    except Exception as error:  # Pillow's plugins raise what they like
        raise _Missing(f"not an image ({type(error).__name__})") from None


def write_missing(out: Path, finished: dict[str, Made]) -> list[tuple[str, str]]:
    """Write ``missing.txt`` (sample and reason, one a line); gives what is in it.

    Raises:
        DataError: the folder cannot be written.
    """
    missing = sorted({(name, reason) for made in finished.values() for name, reason in made.missing})
    path = out / MISSING
    text = "".join(f"{name}\t{reason}\n" for name, reason in missing)
    with writing(path):
        if missing:
            with replacing(path) as unfinished:
                unfinished.write_bytes(text.encode("utf-8", "surrogateescape"))
        else:
            path.unlink(missing_ok=True)
    return missing
