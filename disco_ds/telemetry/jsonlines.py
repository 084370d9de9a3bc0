"""Metrics files: one JSON object a line, flushed at once, whose ``step`` is unique and increasing.

When a run goes on from step k, the lines of later steps, and one that a kill has torn, move to
``metrics.dropped.jsonl``. A number that JSON has no word for is null, and ``non_finite`` beside it says what it was.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disco_ds.files import replacing


class JsonLines:
    """The file of a run that goes on after ``start_step``; see :func:`set_aside_after`."""

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.last_step = set_aside_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object and flush it.

        Raises:
            ValueError: its step is not after the last one's.
            OSError: the disk is full, say; what could not be written waits in memory and goes out with the next line.
        """
        step = values["step"]
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} comes after step {self.last_step}; steps must increase")
        self.last_step = step
        self._file.write(json.dumps(_valid(values), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Set the lines after ``step`` aside, if there are any."""
        if self.last_step is not None and self.last_step > step:
            self._file.close()
            self.last_step = set_aside_after(self.path, step)
            self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def set_aside_after(path: Path, step: int) -> int | None:
    """Move the lines of a metrics file that are after ``step``, out of order or unreadable to ``<stem>.dropped.jsonl``.

    A kill in between can leave a line in both, never in neither. Returns the step of the last line that stays, if any.
    """
    if not path.exists():
        return None
    content, last = path.read_bytes(), None
    kept, dropped = [], []
    for line in content.splitlines():
        found = _step_of(line)
        if found is not None and found <= step and (last is None or found > last):
            kept.append(line + b"\n")
            last = found
        else:
            dropped.append(line + b"\n")
    if dropped:
        with path.with_name(f"{path.stem}.dropped.jsonl").open("ab") as file:
            file.writelines(dropped)
            file.flush()
            os.fsync(file.fileno())
    if content != b"".join(kept):
        with replacing(path, sync=True) as unfinished:
            unfinished.write_bytes(b"".join(kept))
    return last


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file, oldest first; unreadable lines are passed over, a missing file has none."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def _valid(values: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinities as null, and by name under "non_finite"."""
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**values, **dict.fromkeys(odd), **({"non_finite": odd} if odd else {})}
