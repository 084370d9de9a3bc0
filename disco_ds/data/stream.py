"""The training stream: batches whose content depends on (seed, position) alone, on any number of ranks and workers.

See :mod:`disco_ds.data.lanes` for the order. Here lanes are dealt to ranks and loader workers, the workers' parts are
put together by position, and the state of every lane travels with the part that it produced, so that what a worker
read ahead is never taken for consumed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from disco_ds.config.schema import DataConfig
from disco_ds.data.cursor import check_stream
from disco_ds.data.decode import Decoder
from disco_ds.data.faults import Tally, log_notes
from disco_ds.data.lanes import Lane, Slices
from disco_ds.data.loader import loader_options, warm_up
from disco_ds.data.sources import Source, expand
from disco_ds.errors import DataError

MIN_READS = 1000
"""Samples read before data.max_bad_fraction is looked at."""

Transform = Callable[[Image.Image], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


@dataclass
class Batch:
    """A rank's part of one global batch, in the order of the stream."""

    images: Tensor
    """[b, 3, H, W] float32; pinned where there is a GPU."""
    texts: Tensor
    """[b, context] int64."""
    keys: list[str]
    """``shard.tar#key`` of each sample."""
    faults: dict[str, int]
    """Occurrences by "source/reason" since this rank's previous batch."""
    reads: int
    """Raw samples read since this rank's previous batch, good and bad."""


@dataclass
class _Part:
    """What one worker adds to a batch. ``places``: where its samples belong in the rank's batch."""

    places: list[int]
    images: Tensor | None
    texts: Tensor | None
    keys: list[str]
    states: dict[str, dict[str, Any]]
    tally: dict[str, Any]


@dataclass(eq=False)
class _Plan(IterableDataset):
    """All that a worker needs to produce its parts; as torch's loader has it, one iterator a worker."""

    config: DataConfig
    sources: list[Source]
    decoder: Decoder
    tokenizer: Tokenizer
    seed: int
    lanes: int
    rank: int
    world_size: int
    global_batch: int
    position: int
    states: dict[str, dict[str, Any]]

    def __iter__(self) -> Iterator[_Part]:
        """This worker's share of batch after batch, without end."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = list(range(self.rank, self.lanes, self.world_size))[worker::workers]
        tally, position = Tally(), self.position
        lanes = self._lanes(numbers, tally)
        try:
            while True:
                # A batch begins at any position; the rank's samples in it are those whose lane is one of the rank's.
                first = position + (self.rank - position) % self.world_size
                mine = range(first, position + self.global_batch, self.world_size)
                chosen = [(place, lanes[p % self.lanes]) for place, p in enumerate(mine) if p % self.lanes in lanes]
                pairs = [lane.next() for _, lane in chosen]
                yield _Part(
                    places=[place for place, _ in chosen],
                    images=stacked([pair.image for pair in pairs]) if pairs else None,
                    texts=self.tokenizer([pair.caption for pair in pairs]) if pairs else None,
                    keys=[pair.key for pair in pairs],
                    states={str(number): lane.state() for number, lane in lanes.items()},
                    tally=tally.take(),
                )
                position += self.global_batch
        finally:
            for lane in lanes.values():
                lane.close()

    def _lanes(self, numbers: list[int], tally: Tally) -> dict[int, Lane]:
        weights = self.config.weights
        groups = [self.sources] if weights is None else [[source] for source in self.sources]
        slices = [Slices(group, self.lanes, self.seed, str(tag)) for tag, group in enumerate(groups)]
        size = max(1, self.config.shuffle // self.lanes)
        lanes: dict[int, Lane] = {}

        def check() -> None:  # here too: a worker that finds nothing good never comes to hand over a part
            _check_bad([lane.state() for lane in lanes.values()], self.config.max_bad_fraction, tally.faults)

        for number in numbers:
            lanes[number] = Lane(
                number, slices, weights, seed=self.seed, block_size=size, decoder=self.decoder, tally=tally,
                state=self.states.get(str(number)), check=check,
            )  # fmt: skip
        return lanes


class TrainStream:
    """Endless iterator of this rank's :class:`Batch` es.

    Args:
        config: where the data is and how it is read.
        global_batch: pairs per step over all ranks; a multiple of ``world_size``.
        rank, world_size: this rank's place.
        seed: of the order, the choice of captions and the augmentation.
        transform: RGB image to [3, H, W] float32; its randomness comes from torch's, Python's or numpy's global
            generators. Must be picklable when ``config.workers`` > 0.
        tokenizer: list of texts to [n, context] int64; picklable likewise.
        cursor: what :func:`merge_states` made of all ranks' states; the stream goes on after that position.

    Raises:
        DataError: no shards, or a cursor of other data or another seed.
        ConfigError: ``global_batch`` or the lanes are not a multiple of ``world_size``.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        transform: Transform,
        tokenizer: Tokenizer,
        cursor: dict[str, Any] | None = None,
    ) -> None:
        sources = expand(config.train)
        self._head = check_stream(config, sources, global_batch, world_size, seed, cursor)
        lanes = self._head["lanes"]
        own = [str(lane) for lane in range(rank, lanes, world_size)]
        cursor = cursor or {"position": 0, "lane_states": {}}
        self._position = cursor["position"]
        self._states = {lane: state for lane, state in cursor["lane_states"].items() if lane in own}
        self._plan = _Plan(
            config, sources, Decoder(config, transform), tokenizer, seed, lanes, rank, world_size, global_batch,
            self._position, self._states,
        )  # fmt: skip
        self._workers = min(config.workers, len(own))
        self._parts: Iterator[_Part] | None = None
        self._logged, self._faults = Counter[str](), Counter[str]()
        if self._workers:
            warm_up(transform, tokenizer)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        plan = self._plan
        if self._parts is None:
            loader = DataLoader(plan, num_workers=self._workers, **loader_options()) if self._workers else plan
            self._parts = iter(loader)
        parts = self._next_parts(self._parts)
        batch = _joined(parts, plan.global_batch // plan.world_size)
        self._position += plan.global_batch
        for part in parts:
            self._states.update(part.states)
            log_notes("data", part.tally["notes"], self._logged)
        self._faults.update(batch.faults)
        _check_bad(self._states.values(), plan.config.max_bad_fraction, self._faults)
        return batch

    def _next_parts(self, parts: Iterator[_Part]) -> list[_Part]:
        if not self._workers:
            return [next(parts)]
        try:
            return [next(parts) for _ in range(self._workers)]
        except (OSError, EOFError, RuntimeError) as error:
            # What a dead worker left unsent shows as a lost connection, or as torch's RuntimeError when it is missed.
            lost = not isinstance(error, RuntimeError) or re.search("exited unexpectedly|killed by signal", str(error))
            if not lost or "in DataLoader worker process" in str(error):
                raise
            raise DataError(
                f"a loader worker died ({type(error).__name__}: {error}). If it was out of memory, lower data.workers "
                "or data.shuffle"
            ) from error

    def state(self) -> dict[str, Any]:
        """Where this rank's lanes stand after the last batch given out; JSON-able. See :func:`merge_states`."""
        return {**self._head, "position": self._position, "lane_states": dict(self._states)}

    def close(self) -> None:
        """Stop the workers and close the shards."""
        parts, self._parts = self._parts, None
        # torch's loader would do it when it is collected, but not well after an error: its queues may be gone by then
        stop = getattr(parts, "_shutdown_workers", None) or getattr(parts, "close", None)
        if stop is not None:
            stop()


def _check_bad(lanes: Collection[dict[str, Any]], max_bad_fraction: float, faults: Counter[str]) -> None:
    reads, bad = sum(lane["reads"] for lane in lanes), sum(lane["bad"] for lane in lanes)
    if reads >= MIN_READS and bad > max_bad_fraction * reads:
        raise DataError(
            f"{bad} of {reads} samples read are bad, more than data.max_bad_fraction = {max_bad_fraction}; since the "
            f"last start: {dict(faults.most_common(8))}. Mend the data, or raise that limit"
        )


def stacked(images: list[Tensor]) -> Tensor:
    """Equal images as one tensor; in a loader worker in shared memory at once, where it would be copied to later."""
    if get_worker_info() is None:
        return torch.stack(images)
    shape = (len(images), *images[0].shape)
    storage = images[0]._typed_storage()._new_shared(math.prod(shape), device=images[0].device)
    return torch.stack(images, out=images[0].new(storage).view(shape))


def _joined(parts: list[_Part], size: int) -> Batch:
    """The workers' parts, their samples at their places, in pinned memory where there is a GPU."""
    filled = [part for part in parts if part.images is not None and part.texts is not None]
    faults = sum((Counter(part.tally["faults"]) for part in parts), Counter[str]())
    shape_chw, context = filled[0].images.shape[1:], filled[0].texts.shape[1]  # type: ignore[union-attr]
    pin = torch.cuda.is_available()
    images = torch.empty(size, *shape_chw, dtype=torch.float32, pin_memory=pin)
    texts = torch.empty(size, context, dtype=torch.int64, pin_memory=pin)
    keys = [""] * size
    for part in filled:
        places = torch.tensor(part.places)
        images[places], texts[places] = part.images, part.texts  # type: ignore[assignment]
        for place, key in zip(part.places, part.keys, strict=True):
            keys[place] = key
    return Batch(images, texts, keys, dict(faults), sum(part.tally["reads"] for part in parts))
