"""Sizes of DeepSpeed's buckets: what "auto" becomes, and what is lowered. Asked by engine and planner; without torch.

DeepSpeed allocates ``reduce_bucket_size`` elements whole, whatever the model's size (5e8 by default: more than a
ViT-B/32 itself), so a bucket here is never larger than the model, and never smaller than its largest parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disco_ds.errors import ConfigError

LOWERED = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
FILLED = (*LOWERED, "stage3_max_live_parameters", "stage3_param_persistence_threshold", "overlap_comm")
"""Keys of zero_optimization for which "auto" is known."""


@dataclass(frozen=True)
class Buckets:
    """The sizes that decide memory, in elements."""

    reduce: int
    max_live: int
    reuse_distance: int
    overlap: bool


def fill(zero: dict[str, Any], parameters: int, largest: int, *, on_gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section zero_optimization with values in place of "auto", and with buckets that the model can fill.

    Args:
        zero: the section.
        parameters: elements of all trained parameters.
        largest: elements of the largest one.

    Returns:
        The section, and what has changed in it, for people.
    """
    whole = parameters + parameters % 2  # DeepSpeed asserts even buckets, for the alignment of 16-bit elements
    bucket = max(largest, min(parameters, 50_000_000))
    values = {
        **dict.fromkeys(LOWERED, bucket + bucket % 2),
        "stage3_max_live_parameters": max(2 * largest, parameters // 4),
        "stage3_param_persistence_threshold": min(100_000, max(parameters // 1000, 1)),
        "overlap_comm": on_gpu,
    }
    filled: dict[str, Any] = dict(zero)
    changes: dict[str, Any] = {}
    for key in zero.keys() & values.keys():
        if zero[key] == "auto":
            filled[key] = changes[key] = values[key]
        elif key in LOWERED and zero[key] > whole:
            filled[key] = whole
            changes[key] = f"{whole} (lowered from {zero[key]:g}: the model has no more)"
    return filled, {key: changes[key] for key in zero if key in changes}


def fill_buckets(zero: dict[str, Any], parameters: int, largest: int, *, on_gpu: bool, source: str) -> dict[str, Any]:
    """:func:`fill` in place, for a run; returns what has changed, by dotted name.

    Raises:
        ConfigError: a ZeRO-3 persistence threshold above the largest parameter; ``source`` names the file.
    """
    filled, changes = fill(zero, parameters, largest, on_gpu=on_gpu)
    zero.update(filled)
    threshold = zero.get("stage3_param_persistence_threshold", 100_000)
    if zero["stage"] == 3 and threshold > largest:
        raise ConfigError(
            f"{source}: zero_optimization.stage3_param_persistence_threshold {threshold:g} is above the largest "
            f'parameter ({largest} elements): ZeRO-3 would partition nothing. Lower it, or write "auto"'
        )
    return {f"zero_optimization.{key}": value for key, value in changes.items()}


def planned(zero: dict[str, Any], parameters: int, largest: int, *, on_gpu: bool) -> Buckets:
    """What a run with this section will have, DeepSpeed's own defaults for keys that are not there."""
    zero, _ = fill(zero, parameters, largest, on_gpu=on_gpu)
    return Buckets(
        reduce=zero.get("reduce_bucket_size", 500_000_000),
        max_live=zero.get("stage3_max_live_parameters", 1_000_000_000),
        reuse_distance=zero.get("stage3_max_reuse_distance", 1_000_000_000),
        overlap=zero.get("overlap_comm", zero.get("stage") == 3),
    )
