"""One raw sample to an RGB image and a caption, or to the named reason why not."""

from __future__ import annotations

import html
import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor
from torch import Tensor
from torch.utils.data import get_worker_info

from disco_ds.config.schema import DataConfig
from disco_ds.data.faults import SampleFault
from disco_ds.data.images import ImageRules, open_rgb, output_px
from disco_ds.data.shards import Access, RawSample
from disco_ds.random_state import random_states, set_random_states

CPU = torch.device("cpu")


@dataclass
class Pair:
    """A decoded sample."""

    image: Tensor
    """[3, H, W] float32, as the transform gives it."""
    caption: str
    captions: list[str]
    key: str


class Decoder:
    """The configured way from a shard's bytes to a pair; picklable when the transform is."""

    def __init__(self, config: DataConfig, transform: Callable[[Image.Image], Tensor]) -> None:
        self.image_extensions = _extensions(config.image_key)
        caption, _, self.json_key = config.caption_key.partition(":")
        self.caption_extensions = _extensions(caption)
        self.image_rules = ImageRules(
            max_pixels=config.max_pixels,
            min_size=config.min_image_size,
            max_aspect=config.max_aspect,
            background=ImageColor.getrgb(config.background)[:3],
            draft_px=output_px(transform) if config.draft else None,
        )
        self.clean = config.clean_captions
        self.access = Access(config.retries, config.retry_s)
        """How the shards of these samples are opened."""
        self.transform = transform
        self.wanted = frozenset(self.image_extensions + self.caption_extensions)

    def captions(self, raw: RawSample) -> list[str]:
        """All captions of a sample, trimmed, empty ones left out; at least one.

        Raises:
            SampleFault: missing_caption, empty_caption, bad_json.
        """
        extension = _find("caption", self.caption_extensions, raw)
        text = raw.files[extension].decode("utf-8-sig", errors="replace")
        found: Any = [text]
        if self.json_key:
            try:
                record = json.loads(text)
            except ValueError as error:
                raise SampleFault("bad_json", error) from None
            value = record.get(self.json_key) if isinstance(record, dict) else None
            found = value if isinstance(value, list) else [value]
            if not any(isinstance(item, str) for item in found):
                keys = sorted(record)[:8] if isinstance(record, dict) else type(record).__name__
                raise SampleFault("missing_caption", f"no text under {self.json_key!r}; .{extension} holds {keys}")
        trimmed = [cleaned(item) if self.clean else item.strip() for item in found if isinstance(item, str)]
        if not any(trimmed):
            raise SampleFault("empty_caption", f".{extension} is empty")
        return [item for item in trimmed if item]

    def read(self, raw: RawSample) -> tuple[Image.Image, list[str]]:
        """The image as it is seen, in RGB, and all captions; raises SampleFault."""
        extension = _find("image", self.image_extensions, raw)
        captions = self.captions(raw)
        return open_rgb(raw.files[extension], self.image_rules), captions

    def transformed(self, image: Image.Image, captions: list[str], key: str, seed: int) -> Pair:
        """Choose a caption and transform the image, both driven by ``seed``; raises SampleFault: transform_failed."""
        with _seeded(seed):
            caption = captions[random.randrange(len(captions))] if len(captions) > 1 else captions[0]
            try:
                pixels = self.transform(image)
            except Exception as error:
                raise SampleFault("transform_failed", f"{type(error).__name__}: {error}") from error
        return Pair(pixels, caption, captions, key)

    def __call__(self, raw: RawSample, seed: int) -> Pair:
        """Decode one sample; raises SampleFault."""
        return self.transformed(*self.read(raw), raw.name, seed)


def _extensions(keys: str) -> tuple[str, ...]:
    return tuple(key.strip().lstrip(".").lower() for key in keys.split(";") if key.strip())


def _find(what: str, extensions: tuple[str, ...], raw: RawSample) -> str:
    """The first of the extensions that a sample has."""
    for extension in extensions:
        if extension in raw.files:
            return extension
    raise SampleFault(f"missing_{what}", f"no .{' or .'.join(extensions)} among {raw.extensions}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every generator that transforms draw from, and put them back afterwards.

    The model's dropout depends on the same generators when samples are decoded in the training process itself. In a
    loader worker nothing does, and putting them back takes as long as seeding.
    """
    before = random_states(CPU) if get_worker_info() is None else None
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        if before is not None:
            set_random_states(before, CPU)


def cleaned(text: str) -> str:
    """A caption without HTML entities (escaped twice too, as they often are), control characters and wide spaces.

    >>> cleaned("Tom &amp;amp; Jerry\\x00\\n &lt;3")
    'Tom & Jerry <3'
    """
    plain = html.unescape(html.unescape(text))
    kept = (" " if char.isspace() else char for char in plain if char.isspace() or unicodedata.category(char) != "Cc")
    return " ".join("".join(kept).split())
