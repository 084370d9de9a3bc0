"""Steps left out because a loss or gradient was not finite: counted, named, and too many in a row end the run."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch import Tensor

from disco_ds.distributed import everyones
from disco_ds.errors import DivergedError
from disco_ds.files import append_line
from disco_ds.run_layout import SKIPPED
from disco_ds.telemetry.sinks import Telemetry

_KEYS_SHOWN = 8


class Skips:
    """Counts skipped steps and writes what is known of each to ``skipped.jsonl``.

    Args:
        telemetry: the run's, for its folder and for a warning when the file cannot be written.
        control: process group for small objects.
        allowed: skipped steps in a row that the run survives.
        total, in_a_row: those before a resume.
    """

    def __init__(self, telemetry: Telemetry, control: Any, allowed: int, total: int = 0, in_a_row: int = 0) -> None:
        self.telemetry, self.control, self.allowed = telemetry, control, allowed
        self.path = telemetry.run_dir / SKIPPED
        self.total, self.in_a_row = total, in_a_row

    def note(self, step: int, skipped: bool, bad_rows: Tensor, keys: list[str]) -> str | None:
        """Take note of a step; returns what to tell the user of a skipped one. A collective when it was skipped.

        Args:
            step: the step just made, counted from 1.
            skipped: whether the update was left out; the same on every rank.
            bad_rows: (b,) bool, this rank's pairs whose features are not finite.
            keys: this rank's b sample keys.

        Raises:
            DivergedError: more steps in a row than allowed, on every rank.
        """
        if not skipped:
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        bad = [key for key, is_bad in zip(keys, bad_rows.tolist(), strict=True) if is_bad]
        by_rank = {rank: found for rank, found in enumerate(everyones(bad, self.control)) if found}
        if dist.get_rank() == 0:
            with self.telemetry.log_and_continue(SKIPPED):
                append_line(self.path, json.dumps({"step": step, "samples": by_rank}))
        shown = [f"{key} (rank {rank})" for rank, found in by_rank.items() for key in found][:_KEYS_SHOWN]
        total = sum(map(len, by_rank.values()))
        what = (
            f"features of {total} samples are not finite: {', '.join(shown)}" + (" …" if total > len(shown) else "")
            if total
            else "all features are finite, the gradient is not"
        )
        message = f"step {step} was left out on all ranks: {what}; see {self.path}"
        if self.in_a_row > self.allowed:
            raise DivergedError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite (optimizer.max_skipped "
                f"{self.allowed}); the last one: {message}. Weights and checkpoints hold nothing of it: look at these "
                f"samples, lower optimizer.lr, or go back with --resume PATH/OF/AN/EARLIER/CHECKPOINT"
            )
        return message
