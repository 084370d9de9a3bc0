"""Images as a viewer shows them, in RGB; the limits on size and shape; and the ways of decoding."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from disco_ds.config.schema import DataConfig
from disco_ds.data.decode import Decoder
from disco_ds.data.faults import SampleFault
from disco_ds.data.images import ImageRules, open_rgb, output_px
from disco_ds.data.shards import RawSample
from tests.helpers.shards import data_config, image_bytes, to_tensor


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def resized(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height)))


def noisy_image(width: int, height: int, format: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


def pixel(data: bytes, x: int = 0, y: int = 0) -> tuple[int, ...]:
    return open_rgb(data, ImageRules(10_000)).getpixel((x, y))


def test_transparency_is_composited_on_white():
    assert pixel(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)))) == (255, 255, 255)
    assert pixel(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)))) == (255, 127, 127)
    assert pixel(encoded(Image.new("LA", (4, 4), (0, 0)))) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert pixel(encoded(palette)) == (10, 20, 30)
    assert pixel(encoded(palette, transparency=1)) == (255, 255, 255)
    assert pixel(encoded(Image.new("RGB", (4, 4), (9, 8, 7)), transparency=(9, 8, 7))) == (255, 255, 255)


def test_deep_grey_cmyk_and_one_bit():
    deep = Image.fromarray(np.full((4, 4), 32896, np.uint16))
    assert pixel(encoded(deep)) == (128, 128, 128)
    assert pixel(encoded(Image.new("CMYK", (4, 4), (0, 0, 0, 255)), "TIFF")) == (0, 0, 0)
    assert pixel(encoded(Image.new("1", (4, 4), 1))) == (255, 255, 255)
    assert pixel(encoded(Image.new("F", (4, 4), 0.5), "TIFF")) == (128, 128, 128)


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (8, 4), (255, 255, 255))
    image.putpixel((0, 0), (0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to see it upright
    turned = open_rgb(encoded(image, exif=exif.tobytes()), ImageRules(10_000))
    assert turned.size == (4, 8)
    assert turned.getpixel((3, 0)) == (0, 0, 0)


def test_pixel_limit_is_read_from_the_header():
    with pytest.raises(SampleFault, match=r"16 x 16 is more than data\.max_pixels = 255"):
        open_rgb(image_bytes(0), ImageRules(255))
    assert open_rgb(image_bytes(0), ImageRules(256)).size == (16, 16)


@pytest.mark.parametrize(("size", "limits", "reason"), [
    ((8, 30), {"min_size": 8}, None), ((7, 30), {"min_size": 8}, "tiny_image"),
    ((10, 40), {"max_aspect": 4.0}, None), ((41, 10), {"max_aspect": 4.0}, "extreme_aspect"),
    ((10, 41), {"max_aspect": 4.0}, "extreme_aspect"), ((1, 1000), {}, None)
])  # fmt: skip
def test_limits_are_exact(size, limits, reason):
    rules = ImageRules(10_000, **limits)
    if reason is None:
        assert open_rgb(resized(*size), rules).size == size
    else:
        with pytest.raises(SampleFault, match=rf"{size[0]} x {size[1]} .*data\.m") as caught:
            open_rgb(resized(*size), rules)
        assert caught.value.reason == reason


def test_background_of_transparent_images():
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(buffer, "PNG")
    for colour, expected in ((None, (255, 255, 255)), ("black", (0, 0, 0)), ("#102030", (16, 32, 48))):
        config = data_config("unused", **({"background": colour} if colour else {}))
        assert open_rgb(buffer.getvalue(), Decoder(config, to_tensor).image_rules).getpixel((0, 0)) == expected
    with pytest.raises(ValidationError, match=r"data\.train|background"):
        DataConfig(train="x", background="whitish")


def clip_transform(training: bool):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(size=32), is_train=training)


@pytest.mark.parametrize("training", [True, False])
def test_draft_decodes_less_of_a_large_jpeg(training):
    transform = clip_transform(training)
    assert output_px(transform) == 32
    assert output_px(to_tensor) is None
    decoders = {draft: Decoder(data_config("unused", draft=draft), transform) for draft in (False, True)}
    for size, expected in (((640, 480), (80, 60)), ((70, 130), (35, 65)), ((63, 300), (63, 300)), ((20, 20), (20, 20))):
        data = noisy_image(*size, "JPEG")
        assert open_rgb(data, decoders[False].image_rules).size == size
        assert open_rgb(data, decoders[True].image_rules).size == expected
    for mode in ("L", "CMYK"):
        assert open_rgb(noisy_image(640, 480, "JPEG", mode), decoders[True].image_rules).size == (80, 60)
    assert open_rgb(noisy_image(640, 480), decoders[True].image_rules).size == (640, 480)
    raw = RawSample("s.tar", 0, "k", {"jpg": noisy_image(640, 480, "JPEG", quality=95), "txt": b"x"})
    whole, draft = (decoders[value](raw, seed=1).image for value in (False, True))
    assert whole.shape == draft.shape == torch.Size([3, 32, 32])
    assert not torch.equal(whole, draft)
    if not training:  # a crop is drawn in pixels of the image that was decoded
        assert (whole - draft).abs().mean() < 0.15  # of a standard deviation
