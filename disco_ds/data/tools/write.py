"""Writing tar shards: the same bytes each time, and a file that appears only when it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webdataset import TarWriter

from disco_ds.errors import DataError
from disco_ds.files import replacing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DataError, with the path, where the block meets an OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def shard_writer(path: Path) -> Iterator[TarWriter]:
    """Takes samples as webdataset has them: ``{"__key__": …, extension: bytes, …}``; the shard appears at the end.

    Raises:
        DataError: the file cannot be written.
    """
    compress = "gz" if path.name.lower().endswith("gz") else None
    options = {"encoder": False, "compress": compress, "keep_meta": True, "mtime": 0}
    with writing(path), replacing(path) as unfinished, TarWriter(str(unfinished), **options) as writer:
        yield writer
