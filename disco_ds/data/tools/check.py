"""Look at every sample of some shards as training would, and say what was found; or write the good ones anew."""

from __future__ import annotations

import io
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from disco_ds.data.decode import Decoder, SampleFault
from disco_ds.data.shards import RawSample, ShardFault, read_shard
from disco_ds.data.sources import TAR_ENDINGS, Source
from disco_ds.data.tools.tokens import TokenCounter
from disco_ds.data.tools.write import ShardWriter
from disco_ds.errors import DataError

EXAMPLES = 3
"""Faults of one kind that are described; the rest are counted."""


@dataclass
class Report:
    """What was found in some shards."""

    shards: int = 0
    samples: int = 0
    """Samples read, good and bad."""
    good: int = 0
    """Samples that training can use."""
    image_bytes: int = 0
    """Bytes of the good samples' images, encoded."""
    widths: array[int] = field(default_factory=lambda: array("L"))
    """Pixels, of each good image as it is seen (after its EXIF orientation); heights likewise."""
    heights: array[int] = field(default_factory=lambda: array("L"))
    modes: Counter[str] = field(default_factory=Counter)
    """Format and mode of the good images, as in "JPEG RGB"."""
    characters: array[int] = field(default_factory=lambda: array("L"))
    """Length of each caption of the good samples, trimmed."""
    tokens: array[int] = field(default_factory=lambda: array("L"))
    """Tokens of each caption before it is cut, with those for start and end; empty without a tokenizer."""
    faults: Counter[str] = field(default_factory=Counter)
    """Occurrences by "source/reason"."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few of each kind in words."""
    written: int = 0
    """Shards written by ``fix``."""

    def fault(self, label: str, reason: str, detail: object) -> None:
        """Count one fault, and keep it in words if it is among the first of its kind."""
        kind = f"{label}/{reason}"
        self.faults[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < EXAMPLES:
            shown.append(str(detail))

    def add(self, other: Report) -> None:
        """Take in what was found elsewhere."""
        for name in ("shards", "samples", "good", "image_bytes", "written"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("widths", "heights", "characters", "tokens"):
            getattr(self, name).extend(getattr(other, name))
        self.modes.update(other.modes)
        self.faults.update(other.faults)
        for kind, shown in other.examples.items():
            self.examples[kind] = (self.examples.get(kind, []) + shown)[:EXAMPLES]


@dataclass(frozen=True)
class Look:
    """One piece of work: every ``step``-th sample of a shard from ``first`` on."""

    decoder: Decoder
    """Its transform is a :class:`Sizes`."""
    tokens: TokenCounter | None
    shard: str
    label: str
    first: int = 0
    step: int = 1
    out: str | None = None
    """File that takes the good samples."""


class Sizes:
    """A transform that notes the size of the image it gets, and then does what the model's transform does."""

    def __init__(self, then: Callable[[Image.Image], Tensor] | None = None) -> None:
        self.then = then
        self.transforms = getattr(then, "transforms", [])
        """As torchvision has it: data.draft looks for the model's resolution here."""
        self.size = (0, 0)

    def __call__(self, image: Image.Image) -> Tensor:
        self.size = image.size
        return self.then(image) if self.then is not None else torch.empty(0)


def looks(
    sources: list[Source], decoder: Decoder, tokens: TokenCounter | None, workers: int, out: Path | None = None
) -> list[Look]:
    """The work on all shards of ``sources``, cut into slices where there are fewer shards than ``workers``.

    Raises:
        DataError: ``out`` holds a file that would be written, or two shards have the same name.
    """
    pairs = sorted({(shard, source.label) for source in sources for shard in source.shards})
    targets = _targets([shard for shard, _ in pairs], out) if out is not None else {}
    step = -(-workers // len(pairs)) if out is None and len(pairs) < workers else 1
    return [
        Look(decoder, tokens, shard, label, first, step, targets.get(shard)) for shard, label in pairs
        for first in range(step)
    ]  # fmt: skip


def _targets(shards: list[str], out: Path) -> dict[str, str]:
    targets: dict[str, str] = {}
    taken: dict[str, str] = {}
    for shard in dict.fromkeys(shards):
        name = shard.rsplit("/", 1)[-1].partition("?")[0]
        if shard.startswith("pipe:") or not name.lower().endswith(TAR_ENDINGS):
            raise DataError(
                f"--fix: {shard!r} has no file name that ends in .tar to write it under; give a path or URL"
            )
        if name in taken:
            raise DataError(f"--fix: {taken[name]} and {shard} would both be written to {out / name}; fix them apart")
        if (out / name).exists():
            raise DataError(f"--fix: {out / name} is there already and is not written over; give an empty folder")
        taken[name], targets[shard] = shard, str(out / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--fix: the folder {out} cannot be made: {error.strerror}") from error
    return targets


def look(job: Look) -> Report:
    """Do one piece of work.

    Raises:
        DataError: ``job.out`` cannot be written.
    """
    report = Report(shards=int(job.first == 0))
    if job.out is None:
        for _ in _good(job, job.decoder.wanted, report):
            pass
        return report
    with ShardWriter(Path(job.out)) as writer:
        for raw in _good(job, None, report):
            writer.add(raw.key, raw.files)
        if report.good:
            writer.publish()
            report.written = 1
    return report


def _good(job: Look, wanted: frozenset[str] | None, report: Report) -> Iterator[RawSample]:
    """The samples that can be used; everything is counted in ``report``."""
    try:
        for raw in read_shard(job.shard, wanted, job.first, job.step, job.decoder.access):
            report.samples += 1
            if raw.duplicates:
                report.fault(job.label, "duplicate_key", raw.name)
            try:
                pair = job.decoder(raw, seed=raw.number)
            except SampleFault as fault:
                report.fault(job.label, fault.reason, f"{raw.name}: {fault}")
                continue
            _describe(job, raw, pair.captions, report)
            yield raw
    except ShardFault as fault:
        if job.first == 0:  # each slice meets it; it is one fault
            report.fault(job.label, fault.reason, fault)


def _describe(job: Look, raw: RawSample, captions: list[str], report: Report) -> None:
    report.good += 1
    sizes: Any = job.decoder.transform
    report.widths.append(sizes.size[0])
    report.heights.append(sizes.size[1])
    extension = next(extension for extension in job.decoder.image_extensions if extension in raw.files)
    report.modes[_mode(raw.files[extension])] += 1
    report.image_bytes += len(raw.files[extension])
    report.characters.extend(map(len, captions))
    if job.tokens is not None:
        report.tokens.extend(map(job.tokens, captions))


def _mode(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:  # the header only; the whole of it was decoded before
        return f"{image.format} {image.mode}"
