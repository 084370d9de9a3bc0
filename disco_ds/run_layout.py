"""The names inside a run's folder: ``runs_dir/NAME/…``."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.yaml"
"""The run's options as they were resolved; ``--config`` reads it back."""
METRICS = "metrics.jsonl"
EVALS = "eval.jsonl"
STARTS = "starts.jsonl"
"""A line for each start: when, on what, with which settings."""
SKIPPED = "skipped.jsonl"
"""A line for each step left out, with the keys of its samples."""
MEMORY = "memory.json"
"""Bytes planned and bytes measured, on GPUs."""
HELDOUT = "heldout.json"
"""The images that the newest evaluation shows, with the captions ranked first."""
RESULT = "result.json"
PAGE = "report.html"
PICTURE = "report.png"
CHECKPOINTS = "checkpoints"
EXPORT = "export"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint's folder, ``RUN/checkpoints/step-…``, belongs to."""
    return checkpoint.absolute().parent.parent
