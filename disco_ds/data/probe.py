"""The check before a run: does every source give a sample that can be used."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from itertools import islice

from disco_ds.config.schema import DataConfig
from disco_ds.data.decode import Decoder, Pair
from disco_ds.data.faults import SampleFault, Tally
from disco_ds.data.shards import ShardFault, read_shard
from disco_ds.data.sources import Source, expand
from disco_ds.data.stream import Transform
from disco_ds.errors import DataError

PROBE_RECORDS, PROBE_S = 200, 10.0


def probe(config: DataConfig, *, transform: Transform, field: str = "data.train") -> list[Pair]:
    """Read until every source of ``field`` has given one good sample; return those.

    Raises:
        DataError: a source gives none among its first 200 samples or in 10 s; the message names what was seen.
    """
    entries = config.train if field == "data.train" else config.val
    if entries is None:
        raise DataError(f"{field} is not set")
    decoder = Decoder(config, transform)
    return [_first_good(source, decoder, config, field) for source in expand(entries, field)]


def _first_good(source: Source, decoder: Decoder, config: DataConfig, field: str) -> Pair:
    deadline = time.monotonic() + PROBE_S
    seen: Counter[str] = Counter()
    tally = Tally()
    shard = source.shards[0]
    for shard in source.shards:
        try:
            with closing(read_shard(shard, decoder.wanted, access=decoder.access)) as raws:
                for raw in islice(raws, PROBE_RECORDS - tally.reads):
                    tally.reads += 1
                    seen.update(raw.extensions)
                    try:
                        return decoder(raw, seed=0)
                    except SampleFault as fault:
                        tally.fault(source.label, fault.reason, f"{raw.name}: {fault}")
        except ShardFault as fault:
            tally.fault(source.label, fault.reason, fault)
        if tally.reads >= PROBE_RECORDS or time.monotonic() > deadline:
            break
    extensions = ", ".join(f".{name} ({count}x)" for name, count in seen.most_common(12)) or "none"
    notes = "; ".join(tally.notes[:4]) or "the shards hold no samples"
    raise DataError(
        f"{field} {source.label!r}: {tally.reads} samples scanned up to {shard}, 0 kept. "
        f"Extensions seen: {extensions}. Looked for an image in data.image_key = {config.image_key!r} and a caption in "
        f"data.caption_key = {config.caption_key!r}. {notes}"
    )
