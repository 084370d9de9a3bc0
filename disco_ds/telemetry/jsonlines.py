"""Metrics files: one JSON object a line, whose ``step`` is unique and increasing.

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

from disco_ds.files import append_line, replacing


def write_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one object; raises OSError where the disk is full, say."""
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    valid = {**values, **dict.fromkeys(odd), **({"non_finite": odd} if odd else {})}
    append_line(path, json.dumps(valid, ensure_ascii=False, allow_nan=False))


def set_aside_after(path: Path, step: int) -> None:
    """Move the lines of a metrics file that are after ``step``, out of order or unreadable to ``<stem>.dropped.jsonl``.

    A kill in between can leave a line in both, never in neither.
    """
    if not path.exists():
        return
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
