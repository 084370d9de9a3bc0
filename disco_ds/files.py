"""Files that appear whole or not at all, and lines that stay whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """A temporary name beside ``path`` to write a file or a folder to; renamed to ``path`` when the block ends well.

    When it does not, ``path`` is as it was and nothing is left beside it. Missing parents are made.

    Args:
        sync: flush what was written to the disk before it gets its name.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        if sync:
            for written in filter(Path.is_file, [unfinished, *unfinished.rglob("*")]):
                with written.open("rb+") as file:
                    os.fsync(file.fileno())
        if unfinished.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(unfinished, path)
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a text file (UTF-8) whole or not at all."""
    with replacing(path, sync=sync) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Append a line, on a line of its own even where a kill has torn the one before."""
    with path.open("a+b") as file:
        torn = file.seek(0, os.SEEK_END) > 0
        if torn:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(b"\n" * torn + line.encode() + b"\n")
