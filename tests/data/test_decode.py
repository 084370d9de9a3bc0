"""From files to captions, and what is dropped on the way."""

from __future__ import annotations

import pytest

from disco_ds.data.decode import Decoder, cleaned
from disco_ds.data.shards import RawSample
from tests.data.test_images import resized
from tests.helpers.shards import data_config, heldout, image_bytes, sample, to_tensor, write_shard, write_tar


def read(folder, **fields):
    (batch,) = heldout(str(folder), batch=100, **fields)
    faults = {kind.rsplit("/", 1)[1]: count for kind, count in batch.faults.items()}
    return [key.rsplit("#", 1)[1] for key in batch.keys], faults


def test_extensions_in_any_case_and_odd_text(tmp_path):
    captions = [b"\xef\xbb\xbf with a mark ", b"caf\xe9", "雨 عيد".encode()]
    write_tar(
        tmp_path / "a.tar",
        [(f"k{i}.{e}", d) for i, c in enumerate(captions) for e, d in (("PNG", image_bytes(i)), ("TXT", c))],
    )
    (batch,) = heldout(str(tmp_path))
    assert [c[0] for c in batch.captions] == ["with a mark", "caf\ufffd", "雨 عيد"]


def test_captions_from_json(tmp_path):
    texts = [
        b'{"text": " a "}',
        b'{"text": ["", "b", " c"]}',
        b'{"text": ""}',
        b"{",
        b'{"other": "x"}',
        b'["text"]',
        b'{"text": 3}',
    ]
    write_shard(tmp_path / "a.tar", {f"k{i}": {"png": image_bytes(i), "json": text} for i, text in enumerate(texts)})
    (batch,) = heldout(str(tmp_path), caption_key="json:text")
    assert batch.captions == [["a"], ["b", "c"]]
    name = tmp_path.name
    assert batch.faults == {f"{name}/empty_caption": 1, f"{name}/bad_json": 1, f"{name}/missing_caption": 3}


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
