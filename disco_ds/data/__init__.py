"""Shards to batches: the deterministic, resumable training stream, the held-out reader, the embedded default."""

from disco_ds.data.cursor import default_lanes, merge_states
from disco_ds.data.demo import DemoShards, demo_shards
from disco_ds.data.heldout import HeldoutBatch, read_heldout
from disco_ds.data.probe import probe
from disco_ds.data.sources import expand
from disco_ds.data.stream import Batch, TrainStream
from disco_ds.errors import DataError

__all__ = [
    "Batch",
    "DataError",
    "DemoShards",
    "HeldoutBatch",
    "TrainStream",
    "default_lanes",
    "demo_shards",
    "expand",
    "merge_states",
    "probe",
    "read_heldout",
]
