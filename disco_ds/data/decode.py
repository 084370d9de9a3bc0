"""One raw sample to an RGB image and a caption, or to the named reason why not."""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from disco_ds.config import DataConfig
from disco_ds.data.shards import RawSample


class SampleFault(Exception):
    """A sample cannot be used. ``reason`` is one of missing_image, missing_caption, empty_caption, bad_json,
    undecodable_image, truncated_image, too_many_pixels, transform_failed.
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


class Decoder:
    """The configured way from bytes to a pair; picklable when the transform is."""

    def __init__(self, config: DataConfig, transform: Callable[[Image.Image], Tensor]) -> None:
        self.image_extensions = tuple(_extension(key) for key in config.image_key.split(";") if key.strip())
        caption, _, self.json_key = config.caption_key.partition(":")
        self.caption_extensions = tuple(_extension(key) for key in caption.split(";") if key.strip())
        self.max_pixels = config.max_pixels
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
        trimmed = [item.strip() for item in found if isinstance(item, str)]
        kept = [item for item in trimmed if item]
        if not kept:
            raise SampleFault("empty_caption", f".{extension} is empty")
        return kept

    def __call__(self, raw: RawSample, seed: int) -> Pair:
        """Decode one sample; ``seed`` chooses among several captions and drives the transform's randomness.

        Raises:
            SampleFault: the sample cannot be used.
        """
        extension = _first(self.image_extensions, raw)
        if extension is None:
            raise SampleFault("missing_image", f"no .{' or .'.join(self.image_extensions)} among {raw.extensions}")
        captions = self.captions(raw)
        image = open_rgb(raw.files[extension], self.max_pixels)
        with seeded(seed):
            caption = captions[random.randrange(len(captions))] if len(captions) > 1 else captions[0]
            try:
                pixels = self.transform(image)
            except Exception as error:
                raise SampleFault("transform_failed", f"{type(error).__name__}: {error}") from error
        return Pair(pixels, caption, captions, raw.name)


def _extension(key: str) -> str:
    return key.strip().lstrip(".").lower()


def _first(extensions: tuple[str, ...], raw: RawSample) -> str | None:
    return next((extension for extension in extensions if extension in raw.files), None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator that transforms draw from, and put them back afterwards.

    The model's dropout depends on the same generators when samples are decoded in the training process itself.
    """
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def open_rgb(data: bytes, max_pixels: int) -> Image.Image:
    """The image as a viewer would show it: upright by its EXIF orientation, transparency on white, in RGB.

    Raises:
        SampleFault: undecodable_image, truncated_image, too_many_pixels (found in the header, before decoding).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd EXIF and palettes; size is checked here
            image = Image.open(io.BytesIO(data))
            width, height = image.size
            if width * height > max_pixels:
                raise SampleFault("too_many_pixels", f"{width} x {height} is more than data.max_pixels = {max_pixels}")
            image.load()
            with suppress(Exception):  # EXIF that cannot be parsed says nothing about the picture
                ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image)
    except Image.DecompressionBombError as error:
        raise SampleFault("too_many_pixels", error) from None
    except SampleFault:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, …
        reason = "truncated_image" if "truncated" in str(error).lower() else "undecodable_image"
        raise SampleFault(reason, f"{type(error).__name__}: {error}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        drawing = image.convert("RGBA")
        white = Image.new("RGBA", drawing.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, drawing).convert("RGB")
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
