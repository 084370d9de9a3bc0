"""One raw sample to an RGB image and a caption, or to the named reason why not."""

from __future__ import annotations

import html
import io
import json
import random
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps
from torch import Tensor
from torch.utils.data import get_worker_info

from disco_ds.config.schema import DataConfig
from disco_ds.data.shards import Access, RawSample


class SampleFault(Exception):
    """A sample cannot be used. ``reason`` is one of missing_image, missing_caption, empty_caption, bad_json,
    undecodable_image, truncated_image, too_many_pixels, tiny_image, extreme_aspect, transform_failed.
    """

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(str(detail))
        self.reason = reason


@dataclass
class Pair:
    """A decoded sample."""

    image: Tensor
    """[3, H, W] float32, as the transform gives it."""
    caption: str
    captions: list[str]
    key: str


@dataclass(frozen=True)
class Pictures:
    """Which images are taken, and how they become RGB."""

    max_pixels: int
    min_size: int = 0
    """Pixels of the shorter side; 0: any."""
    max_aspect: float | None = None
    """Longer over shorter side; None: any."""
    background: tuple[int, ...] = (255, 255, 255)
    """RGB behind transparency."""
    draft_px: int | None = None
    """JPEGs may be decoded at 1/2, 1/4 or 1/8 size, not below this many pixels a side; None: always whole."""

    def check(self, width: int, height: int) -> None:
        """Raises SampleFault: too_many_pixels, tiny_image, extreme_aspect."""
        if width * height > self.max_pixels:
            raise SampleFault("too_many_pixels", f"{width} x {height} is more than data.max_pixels = {self.max_pixels}")
        short, long = sorted((width, height))
        if short < self.min_size:
            raise SampleFault("tiny_image", f"{width} x {height} is below data.min_image_size = {self.min_size}")
        if self.max_aspect is not None and long > self.max_aspect * short:
            raise SampleFault("extreme_aspect", f"{width} x {height} is beyond data.max_aspect = {self.max_aspect}")


class Decoder:
    """The configured way from a shard's bytes to a pair; picklable when the transform is."""

    def __init__(self, config: DataConfig, transform: Callable[[Image.Image], Tensor]) -> None:
        self.image_extensions = tuple(_extension(key) for key in config.image_key.split(";") if key.strip())
        caption, _, self.json_key = config.caption_key.partition(":")
        self.caption_extensions = tuple(_extension(key) for key in caption.split(";") if key.strip())
        self.pictures = Pictures(
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
        extension = _first(self.caption_extensions, raw)
        if extension is None:
            raise SampleFault("missing_caption", f"no .{' or .'.join(self.caption_extensions)} among {raw.extensions}")
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
        texts = [item for item in found if isinstance(item, str)]
        trimmed = [cleaned(item) if self.clean else item.strip() for item in texts]
        kept = [item for item in trimmed if item]
        if not kept:
            raise SampleFault("empty_caption", f".{extension} is empty")
        return kept

    def read(self, raw: RawSample) -> tuple[Image.Image, list[str]]:
        """The image as it is seen, in RGB, and all captions.

        Raises:
            SampleFault: the sample cannot be used.
        """
        extension = _first(self.image_extensions, raw)
        if extension is None:
            raise SampleFault("missing_image", f"no .{' or .'.join(self.image_extensions)} among {raw.extensions}")
        captions = self.captions(raw)
        return open_rgb(raw.files[extension], self.pictures), captions

    def transformed(self, image: Image.Image, captions: list[str], key: str, seed: int) -> Pair:
        """Choose a caption and transform the image; ``seed`` drives the choice and the transform's randomness.

        Raises:
            SampleFault: transform_failed.
        """
        with seeded(seed):
            caption = captions[random.randrange(len(captions))] if len(captions) > 1 else captions[0]
            try:
                pixels = self.transform(image)
            except Exception as error:
                raise SampleFault("transform_failed", f"{type(error).__name__}: {error}") from error
        return Pair(pixels, caption, captions, key)

    def __call__(self, raw: RawSample, seed: int) -> Pair:
        """Decode one sample.

        Raises:
            SampleFault: the sample cannot be used.
        """
        return self.transformed(*self.read(raw), raw.name, seed)


def _extension(key: str) -> str:
    return key.strip().lstrip(".").lower()


def _first(extensions: tuple[str, ...], raw: RawSample) -> str | None:
    return next((extension for extension in extensions if extension in raw.files), None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator that transforms draw from, and put them back afterwards.

    The model's dropout depends on the same generators when samples are decoded in the training process itself. In a
    loader worker nothing does, and putting them back takes as long as seeding.
    """
    if get_worker_info() is not None:
        _seed(seed)
        yield
        return
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    _seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def cleaned(text: str) -> str:
    """A caption without HTML entities (escaped twice too, as they often are), control characters and wide spaces.

    >>> cleaned("Tom &amp;amp; Jerry\\x00\\n &lt;3")
    'Tom & Jerry <3'
    """
    plain = html.unescape(html.unescape(text))
    kept = (" " if char.isspace() else char for char in plain if char.isspace() or unicodedata.category(char) != "Cc")
    return " ".join("".join(kept).split())


def output_px(transform: Any) -> int | None:
    """Longest side of what a torchvision transform gives, from its first step that has a size; None: unknown."""
    for step in getattr(transform, "transforms", [transform]):
        size = getattr(step, "size", None)
        if isinstance(size, int):
            return size
        if isinstance(size, (tuple, list)) and size and all(isinstance(side, int) for side in size):
            return max(size)
    return None


def open_rgb(data: bytes, pictures: Pictures) -> Image.Image:
    """The image as a viewer would show it: upright by its EXIF orientation, transparency on a background, in RGB.

    Raises:
        SampleFault: undecodable_image, truncated_image; too_many_pixels, tiny_image and extreme_aspect (found in the
            header, before decoding).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd EXIF and palettes; size is checked here
            image = Image.open(io.BytesIO(data))
            pictures.check(*image.size)
            if pictures.draft_px is not None:
                image.draft(None, (pictures.draft_px, pictures.draft_px))  # without effect on other formats than JPEG
            image.load()
            with suppress(Exception):  # EXIF that cannot be parsed says nothing about the picture
                ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image, pictures.background)
    except Image.DecompressionBombError as error:
        raise SampleFault("too_many_pixels", error) from None
    except SampleFault:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, …
        reason = "truncated_image" if "truncated" in str(error).lower() else "undecodable_image"
        raise SampleFault(reason, f"{type(error).__name__}: {error}") from None


def _to_rgb(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        drawing = image.convert("RGBA")
        behind = Image.new("RGBA", drawing.size, (*background, 255))
        return Image.alpha_composite(behind, drawing).convert("RGB")
    if image.mode.startswith(("I", "F")):
        return _from_deep(image)
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """16- and 32-bit grey to 8 bits by range; Pillow's own conversion clips everything above 255 to white."""
    values = np.asarray(image).astype(np.float64)
    top = 65535.0 if image.mode.startswith("I") else (1.0 if values.max(initial=0.0) <= 1.0 else 255.0)
    if image.mode == "I" and values.max(initial=0.0) <= 255:
        top = 255.0
    return Image.fromarray((values.clip(0, top) * (255.0 / top)).round().astype(np.uint8), "L").convert("RGB")
