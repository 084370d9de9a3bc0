"""Small tar shards for tests: good ones whose pixels tell the sample's number, and every kind of bad one."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from disco_ds.config.schema import DataConfig
from disco_ds.data.heldout import HeldoutBatch, read_heldout
from disco_ds.data.stream import TrainStream


def image_bytes(number: int, size: int = 16, format: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """A flat image whose colour is the number in base 256 (PNG keeps it exactly)."""
    colour = (number // 65536 % 256, number // 256 % 256, number % 256)
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), colour).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


def sample(number: int, **files: bytes) -> dict[str, bytes]:
    """A good sample ``{number:06d}`` with the caption "picture {number}"; ``files`` replaces or adds by extension."""
    return {"png": image_bytes(number), "txt": f"picture {number}".encode(), **files}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A tar with these (name, content) members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A shard with samples by key."""
    return write_tar(path, [(f"{key}.{ext}", data) for key, files in samples.items() for ext, data in files.items()])


def make_shards(folder: Path, sizes: Iterable[int], start: int = 0, prefix: str = "s") -> list[Path]:
    """Good shards with so many samples each, numbered through from ``start``."""
    paths, number = [], start
    for shard, size in enumerate(sizes):
        path = folder / f"{prefix}{shard:03d}.tar"
        paths.append(write_shard(path, {f"{n:06d}": sample(n) for n in range(number, number + size)}))
        number += size
    return paths


def truncate(path: Path, keep: int) -> Path:
    """Cut a file to its first ``keep`` bytes."""
    path.write_bytes(path.read_bytes()[:keep])
    return path


def _truncated_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()[:1500]


@cache
def _bomb() -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(buffer, "PNG")
    return buffer.getvalue()


DIRT: dict[str, Callable[[], dict[str, bytes]]] = {
    "missing_image": lambda: {"txt": b"no picture"},
    "missing_caption": lambda: {"png": image_bytes(1)},
    "empty_caption": lambda: sample(1, txt=b" \n\t "),
    "undecodable_image": lambda: sample(1, png=b"this is no image"),
    "truncated_image": lambda: {"jpg": _truncated_jpeg(), "txt": b"half a picture"},
    "too_many_pixels": lambda: sample(1, png=_bomb()),
}
"""A sample of each kind that is dropped, by the reason under which it is counted."""


def dirty_samples(counts: Mapping[str, int]) -> dict[str, dict[str, bytes]]:
    """So many bad samples of each reason, with keys of their own."""
    return {f"bad-{reason}-{i}": DIRT[reason]() for reason, count in counts.items() for i in range(count)}


def json_sample(number: int, captions: list[str]) -> dict[str, bytes]:
    """A sample with its captions in .json and no .txt."""
    return {"png": image_bytes(number), "json": json.dumps({"captions": captions}).encode()}


def to_tensor(image: Image.Image) -> torch.Tensor:
    """A transform without randomness: [3, H, W] in 0..255."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def noisy(image: Image.Image) -> torch.Tensor:
    """A transform whose result depends on the three generators that transforms use."""
    import random

    noise = torch.rand(()) + random.random() + float(np.random.rand())
    return to_tensor(image) + noise


def letters(texts: list[str]) -> torch.Tensor:
    """A tokenizer: the first 12 characters' code points."""
    return torch.tensor([[ord(c) for c in text.ljust(12)[:12]] for text in texts], dtype=torch.int64)


def data_config(train: Any, **fields: Any) -> DataConfig:
    """A configuration for small data: no workers, small blocks."""
    return DataConfig(**{"train": train, "workers": 0, "shuffle": 64, **fields})


def train_stream(config: DataConfig, global_batch: int, **options: Any) -> TrainStream:
    """A stream with the transforms of this module; options replace what TrainStream gets."""
    defaults = {"rank": 0, "world_size": 1, "seed": 0, "transform": to_tensor, "tokenizer": letters}
    return TrainStream(config, global_batch=global_batch, **{**defaults, **options})


def heldout(val: Any, rank: int = 0, world_size: int = 1, batch: int = 4, workers: int = 0, **fields: Any
            ) -> list[HeldoutBatch]:  # fmt: skip
    """The batches of a rank; ``fields`` are those of the configuration."""
    options = {"transform": to_tensor, "tokenizer": letters, "rank": rank, "world_size": world_size, "batch": batch}
    return list(read_heldout(data_config("unused", val=val, workers=workers, **fields), **options))
