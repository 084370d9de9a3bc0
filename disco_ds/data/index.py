"""The index of a shard: where each sample begins, so that a reader goes straight to it.

``s000.tar.index.json`` holds the byte offset of every sample's first header, and by what the tar is known again: its
size and a hash of a few of those headers. So shards and indices may be copied, which changes times, and a tar that was
written anew is noticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from disco_ds.data.sources import INDEX_ENDING, is_remote

log = logging.getLogger("disco_ds.data")

VERSION = 1
HEADER_BYTES = 512


def index_path(shard: str, folder: str | None = None) -> Path:
    """Where the index of a local shard is looked for: beside it, or in ``folder``."""
    beside = Path(f"{shard}{INDEX_ENDING}")
    return beside if folder is None else Path(folder).expanduser() / beside.name


def mark(shard: str, offsets: Sequence[int]) -> dict[str, Any]:
    """What tells this tar from another: its size in bytes, and a hash of the first, middle and last samples' headers.

    Raises:
        OSError: the shard cannot be read.
    """
    digest = hashlib.sha256()
    with open(shard, "rb") as file:
        for place in sorted({0, len(offsets) // 2, len(offsets) - 1} if offsets else ()):
            file.seek(offsets[place])
            digest.update(file.read(HEADER_BYTES))
        return {"bytes": os.fstat(file.fileno()).st_size, "headers": digest.hexdigest()[:16]}


def write_index(shard: str, offsets: Sequence[int], folder: str | None = None) -> Path:
    """Write the index of a shard; it appears whole or not at all.

    Raises:
        OSError: the shard cannot be read, or the index not written.
    """
    path = index_path(shard, folder)
    content = {"version": VERSION, "samples": len(offsets), **mark(shard, offsets), "offsets": list(offsets)}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, separators=(",", ":")))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


@dataclass
class Offsets:
    """Where the samples of a shard begin."""

    values: MutableSequence[int]
    """Byte offset of each sample's first header, from the first sample on."""
    complete: bool
    """False: more may follow; who reads past them adds them."""

    def begins(self, number: int, offset: int) -> bool:
        """Whether that sample is known to begin there."""
        return number < len(self.values) and self.values[number] == offset


def known_offsets(shard: str, folder: str | None = None) -> Offsets | None:
    """What is known of a local shard: its index, else what this process came past when it read parts of it.

    So slices of one shard, which a process reads side by side, do not each go through all its headers.
    """
    if is_remote(shard):
        return None
    indexed = find_offsets(shard, folder)
    return Offsets(indexed, True) if indexed is not None else _come_past(shard, _state(shard))


@lru_cache(maxsize=256)
def _come_past(shard: str, state: tuple[int, int]) -> Offsets:
    return Offsets(array("Q"), False)


def find_offsets(shard: str, folder: str | None = None) -> MutableSequence[int] | None:
    """The offsets of a shard's samples, or None where there is no index that fits it."""
    if is_remote(shard):
        return None
    path = index_path(shard, folder)
    try:
        state = path.stat()
    except OSError:
        return None
    return _checked(shard, path, state.st_mtime_ns, _state(shard))


@lru_cache(maxsize=64)
def _checked(shard: str, path: Path, changed_ns: int, shard_state: tuple[int, int]) -> MutableSequence[int] | None:
    """As find_offsets. A shard is opened once for each of its slices, so that this is remembered; so is a warning."""
    try:
        content = json.loads(path.read_text())
        offsets = content["offsets"]
        known = {key: content[key] for key in ("bytes", "headers")}
        fits = content["version"] == VERSION and known == mark(shard, offsets)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used (%s: %s); remove it, or run disco-data index", path, type(error).__name__, error)
        return None
    if not fits:
        log.warning("%s is not of the present %s and is left out; run disco-data index again", path, shard)
        return None
    return offsets


def _state(shard: str) -> tuple[int, int]:
    try:
        state = os.stat(shard)
    except OSError:
        return -1, -1
    return state.st_size, state.st_mtime_ns
