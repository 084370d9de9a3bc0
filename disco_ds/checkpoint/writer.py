"""How DeepSpeed's files reach the disk: flushed, hashed on the way, and a failure kept instead of raised.

DeepSpeed's ``save_checkpoint`` has barriers between its writes, where others would wait for a rank that has raised. So
every rank comes to the end, and all of them learn there whose write has failed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine


class FileWriter(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine for one save of one rank.

    Args:
        root: the folder that the names in ``files`` are relative to.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}
        """Size and SHA-256 of each, as manifests have them."""
        self.error: str | None = None
        """What went wrong first; from then on nothing is written."""

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write one file, as ``torch.save`` does. Never raises for what the disk does."""
        if self.error is not None:
            return
        try:
            with Path(path).open("wb") as file:
                hashed = _Hashed(file)
                torch.save(state_dict, hashed)  # type: ignore[arg-type]  # it needs write and flush only
                file.flush()
                os.fsync(file.fileno())
            name = str(Path(path).relative_to(self.root))
            self.files[name] = {"bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            self.error = f"{path}: {str(cause).splitlines()[0]}"


class _Hashed:
    """A file to write to that knows the SHA-256 of what it was given."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.bytes, self.digest = file, 0, hashlib.sha256()
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)


@contextmanager
def writing_with(engine: Any, writer: FileWriter) -> Iterator[None]:
    """Let a DeepSpeedEngine save through ``writer``; its recovery scripts, which nothing here needs, are left out.

    ``checkpoint_engine`` and ``_copy_recovery_script`` are as in deepspeed 0.19.8.
    """
    before = engine.checkpoint_engine
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield
    finally:
        engine.checkpoint_engine = before
        del engine._copy_recovery_script
