"""What is wrong with samples: counted, and the first few of each kind named."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("disco_ds.data")

NOTES_PER_REASON = 3
"""Faults of one kind that a process describes; the rest it only counts."""


class SampleFault(Exception):
    """A sample cannot be used. ``reason`` is one of missing_image, missing_caption, empty_caption, bad_json,
    undecodable_image, truncated_image, too_many_pixels, tiny_image, extreme_aspect, transform_failed.
    """

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(str(detail))
        self.reason = reason


@dataclass
class Tally:
    """What was read and what was wrong with it, since it was last emptied."""

    reads: int = 0
    """Raw samples looked at."""
    faults: Counter[str] = field(default_factory=Counter)
    """Occurrences by "source/reason"; shards' faults and duplicate files are among them."""
    notes: list[str] = field(default_factory=list)
    """The first few of each kind in words."""
    _described: Counter[str] = field(default_factory=Counter)

    def fault(self, source: str, reason: str, detail: object) -> None:
        kind = f"{source}/{reason}"
        self.faults[kind] += 1
        if self._described[kind] < NOTES_PER_REASON:
            self._described[kind] += 1
            self.notes.append(f"{kind}: {detail}")

    def take(self) -> dict[str, Any]:
        """The counts as a dictionary, set to zero here; what was described stays described."""
        taken = {"reads": self.reads, "faults": dict(self.faults), "notes": self.notes}
        self.reads, self.faults, self.notes = 0, Counter(), []
        return taken


def log_notes(source: str, notes: list[str], logged: Counter[str]) -> None:
    """Log what workers noted, the first few of each kind over all; ``logged`` counts the kinds between calls."""
    for note in notes:
        kind = note.split(": ", 1)[0]
        logged[kind] += 1
        if logged[kind] <= NOTES_PER_REASON:
            last = ", further ones are only counted" if logged[kind] == NOTES_PER_REASON else ""
            log.warning("dropped from the %s: %s%s", source, note, last)
