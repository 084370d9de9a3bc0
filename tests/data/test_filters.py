"""The optional filters and ways of decoding: off by default, exact at their limits, counted when on."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from disco_ds.config.schema import DataConfig
from disco_ds.data import read_heldout
from disco_ds.data.decode import Decoder, Pictures, SampleFault, cleaned, open_rgb, output_px
from disco_ds.data.shards import RawSample
from tests.helpers.shards import data_config, image_bytes, letters, sample, to_tensor, write_shard


def encoded(width: int, height: int, format: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


def read(folder, **fields):
    options = {"transform": to_tensor, "tokenizer": letters, "rank": 0, "world_size": 1, "batch": 100, "workers": 0}
    batches = list(read_heldout(data_config("unused", val=str(folder), **fields), **options))
    faults = {kind.rsplit("/", 1)[1]: count for batch in batches for kind, count in batch.faults.items()}
    return [key.rsplit("#", 1)[1] for batch in batches for key in batch.keys], faults


def test_small_and_long_images_are_counted(tmp_path):
    sizes = {"s": (32, 32), "wide": (32, 8), "tall": (9, 32), "tiny": (7, 7), "both": (70, 7)}
    write_shard(tmp_path / "a.tar", {k: {"png": image_bytes(1), "txt": b"x"} | {"png": resized(*size)}
                for k, size in sizes.items()})  # fmt: skip
    with pytest.raises(RuntimeError):  # off: all five are there, in sizes that to_tensor cannot stack
        read(tmp_path)
    fields = {"min_image_size": 8, "max_aspect": 3.6}
    with pytest.raises(RuntimeError):
        read(tmp_path, **fields)
    assert read(tmp_path, min_image_size=10, max_aspect=3.6) == (["s"], {"tiny_image": 4})
    assert read(tmp_path, max_aspect=1.0, min_image_size=8) == (["s"], {"tiny_image": 2, "extreme_aspect": 2})


def resized(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(("size", "limits", "reason"), [
    ((8, 30), {"min_size": 8}, None), ((7, 30), {"min_size": 8}, "tiny_image"),
    ((10, 40), {"max_aspect": 4.0}, None), ((41, 10), {"max_aspect": 4.0}, "extreme_aspect"),
    ((10, 41), {"max_aspect": 4.0}, "extreme_aspect"), ((1, 1000), {}, None)
])  # fmt: skip
def test_limits_are_exact(size, limits, reason):
    pictures = Pictures(10_000, **limits)
    if reason is None:
        assert open_rgb(resized(*size), pictures).size == size
    else:
        with pytest.raises(SampleFault, match=rf"{size[0]} x {size[1]} .*data\.m") as caught:
            open_rgb(resized(*size), pictures)
        assert caught.value.reason == reason


@pytest.mark.parametrize(("text", "expected"), [
    ("Tom &amp; Jerry", "Tom & Jerry"), ("Tom &amp;amp; Jerry &lt;3", "Tom & Jerry <3"), ("a\x00b\x1bc\x7f", "abc"),
    (" a\t\r\n b\u00a0 c\x85d ", "a b c d"), ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
    ("caf\u00e9 雨 عيد", "café 雨 عيد"), ("&nosuch; & 5 < 6", "&nosuch; & 5 < 6"), ("&#0;&nbsp;\x00", "\ufffd")
])  # fmt: skip
def test_captions_are_cleaned(text, expected):
    assert cleaned(text) == expected


def test_cleaning_is_off_by_default_and_may_leave_nothing(tmp_path):
    def captions(**fields):
        raw = RawSample("s.tar", 0, "k", {"txt": b"a &amp;\x00  b"})
        return Decoder(data_config("unused", **fields), to_tensor).captions(raw)

    assert captions() == ["a &amp;\x00  b"]
    assert captions(clean_captions=True) == ["a & b"]
    write_shard(tmp_path / "a.tar", {"k": sample(1), "l": sample(2, txt=b"\x00&nbsp;")})
    assert read(tmp_path, clean_captions=True) == (["k"], {"empty_caption": 1})


def test_background_of_transparent_images():
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(buffer, "PNG")
    for colour, expected in ((None, (255, 255, 255)), ("black", (0, 0, 0)), ("#102030", (16, 32, 48))):
        config = data_config("unused", **({"background": colour} if colour else {}))
        assert open_rgb(buffer.getvalue(), Decoder(config, to_tensor).pictures).getpixel((0, 0)) == expected
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
        data = encoded(*size, "JPEG")
        assert open_rgb(data, decoders[False].pictures).size == size
        assert open_rgb(data, decoders[True].pictures).size == expected
    for mode in ("L", "CMYK"):
        assert open_rgb(encoded(640, 480, "JPEG", mode), decoders[True].pictures).size == (80, 60)
    assert open_rgb(encoded(640, 480), decoders[True].pictures).size == (640, 480)
    raw = RawSample("s.tar", 0, "k", {"jpg": encoded(640, 480, "JPEG", quality=95), "txt": b"x"})
    whole, draft = (decoders[value](raw, seed=1).image for value in (False, True))
    assert whole.shape == draft.shape == torch.Size([3, 32, 32])
    assert not torch.equal(whole, draft)
    if not training:  # a crop is drawn in pixels of the image that was decoded
        assert (whole - draft).abs().mean() < 0.15  # of a standard deviation
