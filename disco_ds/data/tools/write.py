"""Writing tar shards: the same bytes each time, and a file that appears only when it is whole."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from disco_ds.errors import DataError


class ShardWriter:
    """A shard under a temporary name, which :meth:`publish` gives its own; without that nothing is left.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            if path.name.lower().endswith("gz"):
                self._tar = tarfile.open(self._part, "w:gz")  # noqa: SIM115
            else:
                self._tar = tarfile.open(self._part, "w")  # noqa: SIM115
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from error

    def add(self, key: str, files: Mapping[str, bytes]) -> None:
        """Add the files of one sample, by extension, in their order."""
        try:
            for extension, content in files.items():
                info = tarfile.TarInfo(f"{key}.{extension}")  # owner, mode and time are always the same
                info.size = len(content)
                self._tar.addfile(info, io.BytesIO(content))
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error

    def publish(self, over: bool = False) -> None:
        """Close the shard and give it its name. ``over``: a file of this name may be replaced."""
        try:
            self._tar.close()
            if not over and self.path.exists():
                raise DataError(f"{self.path} appeared while it was being written and is not written over")
            self._part.replace(self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk was met before
            self._tar.close()
        self._part.unlink(missing_ok=True)
