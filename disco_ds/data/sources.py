"""From the entries of data.train and data.val to shards: paths, brace lists, globs, folders, list files, URLs."""

from __future__ import annotations

import glob
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import braceexpand

from disco_ds.errors import DataError

log = logging.getLogger("disco_ds.data")

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")
LIST_ENDINGS = (".txt", ".list")


@dataclass(frozen=True)
class Source:
    """One entry of data.train or data.val and the shards behind it."""

    label: str
    """Short name of the entry, unique among the entries; faults are counted under it."""
    shards: tuple[str, ...]
    """Absolute paths, URLs or ``pipe:`` commands, sorted; one named twice is read twice as often."""


def expand(entries: str | Sequence[str], field: str = "data.train") -> list[Source]:
    """One :class:`Source` for each entry.

    An entry is ``demo``, a tar file, a brace list ``/data/{000..099}.tar``, a glob, a folder (all tars below it), a
    ``.txt``/``.list`` file (one entry a line, ``#`` comments), or anything with ``://`` or ``pipe:`` in front, which is
    handed to webdataset after its braces are expanded.

    Raises:
        DataError: an entry names nothing that exists; ``field`` is the configuration field that the message speaks of.
    """
    listed = [entries] if isinstance(entries, str) else list(entries)
    if not listed:
        raise DataError(f"{field} is empty; give at least one tar file, folder, glob, brace list or URL")
    labels = _labels(listed)
    return [Source(label, tuple(sorted(_shards(entry, field)))) for label, entry in zip(labels, listed, strict=True)]


def fingerprint(sources: Sequence[Source]) -> str:
    """A short hash of the shards' names without their folders, so that data that moved as a whole is still the same."""
    names = [[base_name(shard) for shard in source.shards] for source in sources]
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


def is_remote(shard: str) -> bool:
    """True for URLs and ``pipe:`` commands: what cannot be looked at without reading it."""
    return shard.startswith("pipe:") or re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", shard) is not None


def base_name(shard: str) -> str:
    """A shard's name without its folder; a ``pipe:`` command as it is."""
    return shard if shard.startswith("pipe:") else shard.rsplit("/", 1)[-1]


def _labels(entries: list[str]) -> list[str]:
    """The last part of each entry's path; a number where two would be alike."""
    names = [re.sub(r"\s+", " ", base_name(entry.rstrip("/")))[-60:] for entry in entries]
    times = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return [name if count == 1 else f"{name}#{count}" for name, count in zip(names, times, strict=True)]


def _shards(entry: str, field: str) -> list[str]:
    if entry == "demo":
        from disco_ds.data.demo import demo_shards  # only here: its packages are an extra

        demo = demo_shards()
        return demo.val if field == "data.val" else demo.train
    if is_remote(entry):
        return list(braceexpand.braceexpand(entry, escape=False))
    path = Path(entry).expanduser()
    if path.is_dir():
        return _folder(path, field)
    if path.is_file():
        return _list_file(path, field) if path.name.lower().endswith(LIST_ENDINGS) else [str(path.absolute())]
    if re.search(r"\{.*(\.\.|,).*\}", entry):
        return _brace_list(entry, field)
    if re.search(r"[*?\[]", entry):
        found = _matching(str(path))
        if not found:
            raise DataError(f"{field}: no file matches the glob {entry!r} ({_nearest(path)})")
        return found
    raise DataError(
        f"{field}: {entry!r} does not exist ({_nearest(path)}); expected a tar file, a folder of tar files, a glob, a "
        f'brace list such as "/data/{{000..099}}.tar", a .txt list file, a URL, a pipe: command, or "demo"'
    )


def _brace_list(entry: str, field: str) -> list[str]:
    names = [str(Path(name).expanduser()) for name in braceexpand.braceexpand(entry, escape=False)]
    existing = [_matching(name if re.search(r"[*?\[]", name) else glob.escape(name)) for name in names]
    found = [path for paths in existing for path in paths]
    missing = [name for name, paths in zip(names, existing, strict=True) if not paths]
    if not found:
        nearest = _nearest(Path(names[0]))
        raise DataError(f"{field}: none of the {len(names)} files of {entry!r} exists, {names[0]!r} first ({nearest})")
    if missing:
        counts = f"{len(missing)} of {len(names)}"
        log.warning("%s: %s files of %r do not exist, %r first", field, counts, entry, missing[0])
    return found + [str(Path(name).absolute()) for name in missing if not re.search(r"[*?\[]", name)]


def _matching(pattern: str) -> list[str]:
    """The files that a glob names, without the indices that release 0.1 wrote beside shards."""
    names = sorted(glob.glob(pattern, recursive=True))
    return [str(Path(name).absolute()) for name in names if Path(name).is_file() and not name.endswith(".index.json")]


def _folder(path: Path, field: str) -> list[str]:
    found = [str(file.absolute()) for file in path.rglob("*") if file.name.lower().endswith(TAR_ENDINGS)]
    if not found:
        held = ", ".join(sorted({file.suffix or file.name for file in path.iterdir()})[:8])
        no_tar = f"{field}: no tar file ({', '.join(TAR_ENDINGS)}) in or below the folder {str(path)!r}"
        raise DataError(f"{no_tar}; it holds {held}" if held else f"{no_tar}; it is empty")
    return found


def _list_file(path: Path, field: str) -> list[str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    if not entries:
        raise DataError(f"{field}: the list file {str(path)!r} names nothing; expected a shard, URL or pattern a line")
    shards: list[str] = []
    for entry in entries:
        relative = not is_remote(entry) and entry != "demo" and not entry.startswith(("/", "~"))
        shards += _shards(str(path.parent / entry) if relative else entry, f"{field} (line in {path})")
    return shards


def _nearest(path: Path) -> str:
    existing = next(parent for parent in path.absolute().parents if parent.is_dir())
    return f"the last folder on the way that exists is {str(existing)!r}"
