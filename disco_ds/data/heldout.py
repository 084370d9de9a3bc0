"""Held-out data: every sample once over all ranks, in any number of ranks and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from disco_ds.config.schema import DataConfig
from disco_ds.data.decode import Decoder, Pair
from disco_ds.data.faults import SampleFault, Tally, log_notes
from disco_ds.data.lanes import Slice
from disco_ds.data.loader import loader_options
from disco_ds.data.shards import ShardFault, read_shard
from disco_ds.data.sources import Source, expand
from disco_ds.data.stream import Tokenizer, Transform, stacked
from disco_ds.errors import DataError


@dataclass
class HeldoutBatch:
    """Some of a rank's held-out samples; the last batches are shorter, and ranks may have unequal numbers of them."""

    images: Tensor
    """[b, 3, H, W] float32."""
    texts: Tensor
    """[b, context] int64: the first caption of each sample."""
    captions: list[list[str]]
    """All captions of each sample, the first one first."""
    keys: list[str]
    """``shard.tar#key`` of each sample."""
    labels: list[str | None]
    """Content of .cls (a class name, or an index as text), or None."""
    index: Tensor
    """[b] int64: a number that is unique over all ranks and orders the samples as the sorted shards do; it has gaps."""
    faults: dict[str, int] = field(default_factory=dict)
    """Occurrences by "source/reason" since the same worker's previous batch."""


def read_heldout(
    config: DataConfig,
    *,
    transform: Transform,
    tokenizer: Tokenizer,
    rank: int,
    world_size: int,
    batch: int,
) -> Iterator[HeldoutBatch]:
    """This rank's share of ``config.val``, in batches of at most ``batch``.

    Args:
        config: ``val`` and the keys; samples that cannot be used are dropped, the same ones on any number of ranks.
        transform, tokenizer: as in training, without randomness; picklable when there are workers.
        rank, world_size: this rank's place.
        batch: samples at a time.

    Raises:
        DataError: ``config.val`` is None or names nothing that exists.
    """
    if config.val is None:
        raise DataError("data.val is not set: there is nothing to evaluate on")
    reader = _Reader(expand(config.val, "data.val"), Decoder(config, transform), tokenizer, rank, world_size, batch)
    options = {**loader_options(), "persistent_workers": False}  # these workers have one pass to make
    logged: Counter[str] = Counter()
    for part, notes in DataLoader(reader, num_workers=config.workers, **options) if config.workers else reader:
        log_notes("held-out data", notes, logged)
        yield part


@dataclass(eq=False)
class _Reader(IterableDataset):
    """One rank's slices of the held-out shards, dealt to its workers."""

    sources: list[Source]
    decoder: Decoder
    tokenizer: Tokenizer
    rank: int
    world_size: int
    batch: int

    def __iter__(self) -> Iterator[tuple[HeldoutBatch, list[str]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        tally = Tally()
        held: list[tuple[Pair, str | None, int]] = []
        for item in self._pairs(self.rank * workers + worker, self.world_size * workers, tally):
            if len(held) == self.batch:
                yield self._batched(held, tally)
                held = []
            held.append(item)
        if held:  # the last batch waits for the end, so that it carries the faults after it
            yield self._batched(held, tally)

    def _pairs(self, reader: int, readers: int, tally: Tally) -> Iterator[tuple[Pair, str | None, int]]:
        shards = sorted((shard, source.label) for source in self.sources for shard in source.shards)
        # Few shards are cut so finely that every reader has about as many samples; many are dealt whole.
        step = readers if len(shards) < 4 * readers else 1
        for number, (shard, label) in enumerate(shards):
            if step == 1 and number % readers != reader:
                continue
            first = (reader + number) % step  # turned from shard to shard: tiny ones must not all fall to reader 0
            try:
                for raw in read_shard(shard, self.decoder.wanted | {"cls"}, first, step, self.decoder.access):
                    if raw.duplicates:
                        tally.fault(label, "duplicate_key", raw.name)
                    try:
                        pair = self.decoder(raw, seed=0)
                    except SampleFault as fault:
                        tally.fault(label, fault.reason, f"{raw.name}: {fault}")
                        continue
                    name = raw.files.get("cls")
                    text = None if name is None else name.decode("utf-8", errors="replace").strip()
                    yield pair, text, (number << 40) + raw.number
            except ShardFault as fault:
                if Slice(shard, label, first, step).counts(fault):
                    tally.fault(label, fault.reason, fault)

    def _batched(self, held: list[tuple[Pair, str | None, int]], tally: Tally) -> tuple[HeldoutBatch, list[str]]:
        pairs, labels, index = zip(*held, strict=True)
        taken = tally.take()
        batch = HeldoutBatch(
            images=stacked([pair.image for pair in pairs]),
            texts=self.tokenizer([pair.captions[0] for pair in pairs]),
            captions=[pair.captions for pair in pairs],
            keys=[pair.key for pair in pairs],
            labels=list(labels),
            index=torch.tensor(index, dtype=torch.int64),
            faults=taken["faults"],
        )
        return batch, taken["notes"]
