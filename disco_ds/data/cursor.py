"""The stream's place in the data: what it hangs on, and whether it can be found again."""

from __future__ import annotations

import math
from typing import Any

from disco_ds.config.schema import DataConfig
from disco_ds.data.sources import Source, fingerprint
from disco_ds.errors import ConfigError, DataError

CURSOR_VERSION = 1
_MEANINGS = {
    "version": "the format of the stream's state",
    "seed": "seed",
    "lanes": "data.lanes",
    "shuffle": "data.shuffle",
    "weighted": "whether data.weights is given",
    "sources": "the shards of data.train (a hash of their names)",
}


def default_lanes(global_batch: int, world_size: int) -> int:
    """Enough lanes for the world sizes that divide the batch, not so many that each has little to read."""
    return math.lcm(math.gcd(global_batch, 960), world_size)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one cursor, JSON-able: what a checkpoint stores and ``TrainStream(cursor=…)`` reads.

    Raises:
        ValueError: the states are of different steps or streams, or a lane is missing.
    """
    heads = [{key: value for key, value in state.items() if key != "lane_states"} for state in states]
    if any(head != heads[0] for head in heads):
        raise ValueError(f"the ranks' stream states are not of one moment: {heads}")
    merged = {lane: at for state in states for lane, at in state["lane_states"].items()}
    if merged and len(merged) != heads[0]["lanes"]:
        raise ValueError(f"states of {len(merged)} of {heads[0]['lanes']} lanes; give those of every rank")
    return {**heads[0], "lane_states": {lane: merged[lane] for lane in sorted(merged, key=int)}}


def check_stream(
    config: DataConfig,
    sources: list[Source],
    global_batch: int,
    world_size: int,
    seed: int,
    cursor: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the order of samples hangs on, as it is kept with the stream's place.

    Raises:
        ConfigError: the ranks do not divide the batch or the lanes.
        DataError: the place in ``cursor`` is one in another order.
    """
    if global_batch % world_size:
        raise ConfigError(f"global_batch {global_batch} is not a multiple of the {world_size} ranks")
    lanes = config.lanes or (cursor["lanes"] if cursor else default_lanes(global_batch, world_size))
    if lanes % world_size:
        hint = f"it was fixed by the checkpoint; use a divisor of {lanes}" if cursor else "set it to a multiple"
        raise ConfigError(f"data.lanes {lanes} is not a multiple of the {world_size} ranks: {hint}")
    head: dict[str, Any] = {
        "version": CURSOR_VERSION,
        "seed": seed,
        "lanes": lanes,
        "shuffle": config.shuffle,
        "weighted": config.weights is not None,
        "sources": fingerprint(sources),
    }
    for key, meaning in _MEANINGS.items():
        if cursor is not None and cursor.get(key) != head[key]:
            raise DataError(
                f"the checkpoint's place in the data cannot be found again: {meaning} was {cursor.get(key)!r} and "
                f"is now {head[key]!r}. Put it back, or start a new run from the checkpoint's weights"
            )
    return head
