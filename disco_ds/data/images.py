"""An encoded image as a viewer would show it, in RGB, if it is one that is wanted."""

from __future__ import annotations

import io
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from disco_ds.data.faults import SampleFault


@dataclass(frozen=True)
class ImageRules:
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


def output_px(transform: Any) -> int | None:
    """Longest side of what a torchvision transform gives, from its first step that has a size; None: unknown."""
    for step in getattr(transform, "transforms", [transform]):
        size = getattr(step, "size", None)
        if isinstance(size, int):
            return size
        if isinstance(size, (tuple, list)) and size and all(isinstance(side, int) for side in size):
            return max(size)
    return None


def open_rgb(data: bytes, rules: ImageRules) -> Image.Image:
    """The image as a viewer would show it: upright by its EXIF orientation, transparency on a background, in RGB.

    Raises:
        SampleFault: undecodable_image, truncated_image; too_many_pixels, tiny_image and extreme_aspect (found in the
            header, before decoding).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd EXIF and palettes; size is checked here
            image = Image.open(io.BytesIO(data))
            rules.check(*image.size)
            if rules.draft_px is not None:
                image.draft(None, (rules.draft_px, rules.draft_px))  # without effect on other formats than JPEG
            image.load()
            with suppress(Exception):  # EXIF that cannot be parsed says nothing about the picture
                ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image, rules.background)
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
