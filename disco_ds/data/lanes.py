"""The order of samples: lanes, each with its own endless sequence of slices of shards and its own shuffled blocks.

Sample ``p`` of the stream comes from lane ``p mod lanes``, so the order over all is fixed by what each lane gives, and
a lane needs nothing but the seed, its number and where it stands. Ranks and workers only divide the lanes among them.

A slice is a whole shard, or every m-th sample of one when there are fewer shards than lanes. Pass 0 over all slices in
a seeded order is followed by pass 1 in another, without end; lane ``l`` reads entries ``l``, ``l + lanes``, … of that.
It reads ahead one block of raw samples, puts the block in a seeded order, and decodes as it gives them out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from disco_ds.data.decode import Decoder, Pair
from disco_ds.data.faults import SampleFault, Tally
from disco_ds.data.shards import RawSample, ShardFault, read_shard
from disco_ds.data.sources import Source, is_remote
from disco_ds.errors import DataError

MIN_ENTRIES_WITHOUT_SAMPLE = 32
"""A lane whose last so many slices (and two passes' worth) gave nothing stops the run."""


def draw(*what: object) -> random.Random:
    """A generator that depends on ``what`` alone: Python's seeding from text, the same on every platform."""
    return random.Random("/".join(map(str, what)))


@dataclass(frozen=True)
class Slice:
    """Every ``step``-th sample of a shard from number ``first`` on."""

    shard: str
    label: str
    first: int
    step: int

    def counts(self, fault: ShardFault) -> bool:
        """Whether it counts here: a file's fault is met by each slice and is one, a URL may fail for one alone."""
        return self.first == 0 or (fault.reason == "unreadable_shard" and is_remote(self.shard))


class Slices:
    """The endless sequence of slices that all lanes share."""

    def __init__(self, sources: Sequence[Source], lanes: int, seed: int, tag: str = "") -> None:
        self.shards = [(shard, source.label) for source in sources for shard in source.shards]
        if len(sources) > 1:
            self.shards.sort()
        self.step = -(-lanes // len(self.shards)) if len(self.shards) < lanes else 1
        self.count = len(self.shards) * self.step
        self.lanes = lanes

        @lru_cache(maxsize=4)
        def order(number: int) -> list[int]:
            shuffled = list(range(self.count))
            draw(seed, "pass", tag, number).shuffle(shuffled)
            return shuffled

        self._order = order

    def entry(self, lane: int, number: int) -> Slice:
        """Entry ``number`` of a lane's own sequence."""
        which, place = divmod(lane + number * self.lanes, self.count)
        shard, first = divmod(self._order(which)[place], self.step)
        return Slice(*self.shards[shard], first, self.step)

    def pass_of(self, lane: int, number: int) -> int:
        """The pass over the data to which that entry belongs."""
        return (lane + number * self.lanes) // self.count


class Blocks:
    """A lane's raw samples in the order of use, read a block at a time, from any point of it."""

    def __init__(
        self, slices: Slices, lane: int, seed: int, tag: int, size: int, decoder: Decoder, tally: Tally, at: list[int]
    ) -> None:
        """``at``: a :meth:`state`. ``tag``: the source, where each has slices of its own."""
        self.slices, self.lane, self.seed, self.tag, self.size = slices, lane, seed, tag, size
        self.decoder, self.tally = decoder, tally
        self.entry, self.offset, self.block, self.index = at
        self.start = at[:2]
        self.entries_without_sample = 0
        self._open: Generator[RawSample, None, None] | None = None
        self._held: list[tuple[RawSample, str]] = []
        """What is left of the block, the next one last."""

    def next(self) -> tuple[RawSample, str]:
        """The next raw sample with its source's label."""
        if not self._held:
            self._fill()
        item = self._held.pop()
        self.index += 1
        if not self._held:
            self.start = [self.entry, self.offset]
            self.block, self.index = self.block + 1, 0
        return item

    def _fill(self) -> None:
        # First blocks of growing size, so that the lanes do not all come to their block's end, and read, at once.
        size = self.size if self.block else max(1, self.size * (self.lane + 1) // self.slices.lanes)
        held = self._read(size)
        draw(self.seed, "block", self.tag, self.lane, self.block).shuffle(held)
        if self.index >= len(held):
            raise DataError(
                f"lane {self.lane} stood at sample {self.index} of a block that now holds {len(held)}: a shard of "
                "data.train is shorter than when the checkpoint was written, or cannot be read"
            )
        self._held = held[self.index :][::-1]

    def _read(self, size: int) -> list[tuple[RawSample, str]]:
        """``size`` raw samples in reading order, fewer where a pass over the data ends.

        A block within one pass is what makes "no sample twice in a pass" hold for data smaller than the block.
        """
        counted = self.index > 0  # the block was read before, and so was what is wrong with its shards
        held: list[tuple[RawSample, str]] = []
        while len(held) < size:
            part = self.slices.entry(self.lane, self.entry)
            if self._open is None:
                first = part.first + self.offset * part.step
                self._open = read_shard(part.shard, self.decoder.wanted, first, part.step, self.decoder.access)
            try:
                raw = next(self._open, None)
            except ShardFault as fault:
                raw = None
                if part.counts(fault) and not counted:
                    self.tally.fault(part.label, fault.reason, fault)
            if raw is not None:
                held.append((raw, part.label))
                self.offset += 1
                if raw.duplicates and not counted:
                    self.tally.fault(part.label, "duplicate_key", raw.name)
            elif self._advance() and held:
                break
        return held

    def _advance(self) -> bool:
        """Go to the next slice; True if a new pass begins there."""
        before = self.slices.pass_of(self.lane, self.entry)
        self.entry, self.offset, self._open = self.entry + 1, 0, None
        self.entries_without_sample += 1
        per_pass = -(-self.slices.count // self.slices.lanes)
        if self.entries_without_sample > max(2 * per_pass, MIN_ENTRIES_WITHOUT_SAMPLE):
            raise DataError(
                f"lane {self.lane} read {self.entries_without_sample} slices of shards in a row (two passes over its "
                "data) without one usable sample; faults since the last batch: "
                f"{dict(self.tally.faults) or 'none, the shards are empty'}. "
                "Check data.train, data.image_key and data.caption_key"
            )
        return self.slices.pass_of(self.lane, self.entry) != before

    def state(self) -> list[int]:
        """Where the block begins (slice, sample in it), its number, how far it is used."""
        return [*self.start, self.block, self.index]

    def close(self) -> None:
        """Close the shard that is open."""
        if self._open is not None:
            self._open.close()


class Lane:
    """One lane: an endless sequence of decoded pairs, and the few numbers from which it goes on."""

    def __init__(
        self,
        number: int,
        slices: Sequence[Slices],
        weights: Sequence[float] | None,
        *,
        seed: int,
        block_size: int,
        decoder: Decoder,
        tally: Tally,
        state: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``slices``: one for all sources, or one a source if ``weights`` is given. ``check`` runs at bad samples."""
        self.number, self.weights, self.seed, self.decoder, self.tally = number, weights, seed, decoder, tally
        self.check = check
        state = state or {"n": 0, "reads": 0, "bad": 0, "at": [[0, 0, 0, 0] for _ in slices]}
        self.n, self.reads, self.bad = state["n"], state["reads"], state["bad"]
        self.blocks = [
            Blocks(part, number, seed, tag, block_size, decoder, tally, at)
            for tag, (part, at) in enumerate(zip(slices, state["at"], strict=True))
        ]

    def next(self) -> Pair:
        """The next good sample. Its source, caption and augmentation depend on (seed, lane, n) alone."""
        rng = draw(self.seed, "sample", self.number, self.n)
        seed = rng.getrandbits(63)
        blocks = self.blocks[0] if self.weights is None else rng.choices(self.blocks, self.weights)[0]
        while True:
            raw, label = blocks.next()
            self.reads += 1
            self.tally.reads += 1
            try:
                pair = self.decoder(raw, seed)
            except SampleFault as fault:
                self.bad += 1
                self.tally.fault(label, fault.reason, f"{raw.name}: {fault}")
                self.check()
                continue
            blocks.entries_without_sample = 0
            self.n += 1
            return pair

    def state(self) -> dict[str, Any]:
        """JSON-able; :class:`Lane` made with it goes on with the next sample."""
        at = [blocks.state() for blocks in self.blocks]
        return {"n": self.n, "reads": self.reads, "bad": self.bad, "at": at}

    def close(self) -> None:
        """Close what is open."""
        for blocks in self.blocks:
            blocks.close()
