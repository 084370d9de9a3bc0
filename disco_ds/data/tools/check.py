"""Look at every sample of some shards as training would, and say what was found; or write the good ones anew."""

from __future__ import annotations

import io
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

from disco_ds.config.schema import DataConfig
from disco_ds.data.decode import Decoder
from disco_ds.data.faults import SampleFault
from disco_ds.data.shards import RawSample, ShardFault, read_shard
from disco_ds.data.sources import TAR_ENDINGS, Source
from disco_ds.data.tools.preparation import Preparation
from disco_ds.data.tools.write import shard_writer
from disco_ds.errors import DataError
from disco_ds.files import remove

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
    """Tokens of each caption before it is cut, with those for start and end; empty without a model."""
    faults: Counter[str] = field(default_factory=Counter)
    """Occurrences by "source/reason"."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few of each kind in words."""
    written: int = 0
    """Shards written."""

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
class Job:
    """One piece of work: every ``step``-th sample of a shard from ``first`` on."""

    decoder: Decoder
    model: Preparation | None
    shard: str
    label: str
    first: int = 0
    step: int = 1
    out: str | None = None
    """File that takes the good samples."""


def no_transform(image: Image.Image) -> torch.Tensor:
    """What stands for the transform where there is no model."""
    return torch.empty(0)


def list_jobs(
    sources: list[Source], data: DataConfig, model: Preparation | None, workers: int, out: Path | None = None
) -> list[Job]:
    """The work on all shards of ``sources``, cut into slices where there are fewer shards than ``workers``.

    Raises:
        DataError: ``out`` holds a file that would be written, or two shards have the same name.
    """
    decoder = Decoder(data, model.transform if model else no_transform)
    pairs = sorted({(shard, source.label) for source in sources for shard in source.shards})
    targets = _targets([shard for shard, _ in pairs], out) if out is not None else {}
    step = -(-workers // len(pairs)) if out is None and len(pairs) < workers else 1
    return [
        Job(decoder, model, shard, label, first, step, targets.get(shard)) for shard, label in pairs
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
    return targets


def check_shard(job: Job) -> Report:
    """Do one piece of work.

    Raises:
        DataError: ``job.out`` cannot be written.
    """
    report = Report(shards=int(job.first == 0))
    if job.out is None:
        for _ in _good(job, job.decoder.wanted, report):
            pass
        return report
    with shard_writer(Path(job.out)) as writer:
        for raw in _good(job, None, report):
            writer.write({"__key__": raw.key, **raw.files})
    if report.good:
        report.written = 1
    else:
        remove(Path(job.out))
    return report


def _good(job: Job, wanted: frozenset[str] | None, report: Report) -> Iterator[RawSample]:
    """The samples that can be used; everything is counted in ``report``."""
    try:
        for raw in read_shard(job.shard, wanted, job.first, job.step, job.decoder.access):
            report.samples += 1
            if raw.duplicates:
                report.fault(job.label, "duplicate_key", raw.name)
            try:
                image, captions = job.decoder.read(raw)
                job.decoder.transformed(image, captions, raw.name, seed=raw.number)
            except SampleFault as fault:
                report.fault(job.label, fault.reason, f"{raw.name}: {fault}")
                continue
            _describe(job, raw, image.size, captions, report)
            yield raw
    except ShardFault as fault:
        if job.first == 0:  # each slice meets it; it is one fault
            report.fault(job.label, fault.reason, fault)


def _describe(job: Job, raw: RawSample, size: tuple[int, int], captions: list[str], report: Report) -> None:
    report.good += 1
    report.widths.append(size[0])
    report.heights.append(size[1])
    data = next(raw.files[extension] for extension in job.decoder.image_extensions if extension in raw.files)
    with Image.open(io.BytesIO(data)) as image:  # the header only; the whole of it was decoded before
        report.modes[f"{image.format} {image.mode}"] += 1
    report.image_bytes += len(data)
    report.characters.extend(map(len, captions))
    if job.model is not None:
        report.tokens.extend(map(job.model.count_tokens, captions))
