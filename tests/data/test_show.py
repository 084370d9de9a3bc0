"""disco-data show: the picture holds what the model gets, and captions in any length and script fit."""

from __future__ import annotations

import json
import logging

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image, ImageFont

from disco_ds.cli.data.main import main
from disco_ds.config.schema import ModelConfig, RunConfig
from disco_ds.data.tools.preparation import prepare
from disco_ds.data.tools.sheet import MIN_CELL_PX, Tile, contact_sheet, lacking, load_font, to_picture, wrap
from disco_ds.model.build import build_model
from disco_ds.model.preprocess import build_transform
from tests.helpers.shards import image_bytes, make_shards, write_shard
from tests.helpers.tiny import TINY

LONG = "a " + "very " * 300 + "long caption"
TEXTS = ["short", LONG, "http://example.com/" + "x" * 300, "Красная машина у реки", "قطة على كرسي", "雨の日", "😀", ""]


def test_the_command(tmp_path, capsys, caplog):
    captions = [text for text in TEXTS if text] * 3
    write_shard(tmp_path / "a.tar", {f"k{i}": {"png": image_bytes(i, 40), "txt": text.encode()}
                for i, text in enumerate(captions)} | {"bad": {"png": b"x", "txt": b"y"}})  # fmt: skip
    out = tmp_path / "new" / "sheet.png"
    with caplog.at_level(logging.WARNING, "disco_ds.data"):
        assert main(["show", str(tmp_path), "--model", "demo", "--out", str(out), "--count", "9"]) == 0
    assert "9 images of 32 x 32 pixels" in capsys.readouterr().out
    assert "the font lacks" in caplog.text
    assert "give --font FILE" in caplog.text
    with Image.open(out) as sheet:
        assert sheet.size[0] > 3 * 192
        assert sheet.size[1] > 3 * 192
    assert main(["show", str(tmp_path), "--model", "demo", "--out", str(out), "--evaluation", "--seed", "4"]) == 0


def test_fewer_samples_than_places(tmp_path, capsys):
    make_shards(tmp_path, [2, 1])
    assert main(["show", str(tmp_path), "--model", "demo", "--out", str(tmp_path / "s.png"), "--count", "16"]) == 0
    assert "3 images" in capsys.readouterr().out


def test_a_runs_images_are_prepared_as_its_weights_want_them(tmp_path, capsys, caplog):
    """The transform is that of training, from a folder named by model.pretrained or model.name; no weights are read."""
    make_shards(tmp_path / "d", [3])
    preprocess = {"mean": [0.5] * 3, "std": [0.4] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    hub, run = tmp_path / "hub", tmp_path / "run.yaml"
    hub.mkdir()
    (hub / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": preprocess}))
    weights = hub / "open_clip_pytorch_model.bin"
    image = Image.effect_mandelbrot((50, 30), (-2, -1, 1, 1), 20).convert("RGB")
    words = ["show", "--run", str(run), "--out", str(tmp_path / "s.png")]
    for model in ({"name": "tiny", "config": TINY, "pretrained": str(hub)}, {"name": f"local-dir:{hub}"}):
        torch.save(open_clip.model.CLIP(**TINY).state_dict(), weights)
        run.write_text(json.dumps({"steps": 1, "model": model, "data": {"train": str(tmp_path / "d")}}))
        trained = build_model(ModelConfig(**model), seed=0)
        weights.write_bytes(b"none of these are read")
        prepared = prepare(RunConfig(**json.loads(run.read_text())), training=False)
        assert (prepared.mean, prepared.std) == ((0.5,) * 3, (0.4,) * 3)
        assert torch.equal(prepared.transform(image), build_transform(trained, training=False)(image))
        assert main(words) == 0
        assert "3 images of 32 x 32 pixels" in capsys.readouterr().out
    weights.unlink()
    assert prepare(RunConfig(**json.loads(run.read_text()))).mean == (0.5,) * 3  # its description is enough
    assert not caplog.records
    model = {"name": "tiny", "config": TINY, "pretrained": str(tmp_path / "gone.pt")}
    run.write_text(json.dumps({"steps": 1, "model": model, "data": {"train": str(tmp_path / "d")}}))
    assert main(words) == 0
    assert "gone.pt is not known, open_clip's own is assumed" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "s.png"], "--model NAME or --run FILE"),
        (["--out", "s.png", "--model", "demo", "--font", "none.ttf"], "--font none.ttf"),
        (["--out", "s.png", "--model", "demo", "--font", __file__], "not a font"),
        (["--out", "s.what", "--model", "demo"], "--out"),
        (["--model", "demo"], "--out"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, arguments, words):
    make_shards(tmp_path / "d", [2])
    arguments = [str(tmp_path / word) if word in ("s.png", "s.what") else word for word in arguments]
    assert main(["show", str(tmp_path / "d"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_the_normalisation_is_undone():
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    pixels = torch.tensor([0.0, 64.0, 255.0]).view(3, 1, 1).expand(3, 4, 6) / 255
    normalised = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    picture = to_picture(normalised, mean, std)
    assert picture.size == (6, 4)
    assert picture.getpixel((3, 2)) == (0, 64, 255)


@pytest.mark.parametrize("text", TEXTS)
def test_lines_fit(text):
    font = load_font(14)
    lines = wrap(text, font, 200)
    assert all(font.getlength(line) <= 200 for line in lines)
    assert len(lines) <= 8
    if text == LONG:
        assert lines[-1].endswith("…")
    else:
        assert "".join(lines).replace(" ", "").startswith(text.replace(" ", "")[:100])


def test_what_a_font_lacks_is_known():
    own = ImageFont.load_default(14)
    assert not lacking("plain words, 3", own)
    assert lacking("雨 a 😀 b", own) == {"雨", "😀"}


def test_captions_are_drawn_beneath():
    def sheet(caption, tokens=3):
        return contact_sheet([Tile(torch.ones(3, 32, 32), caption, "a.tar#k", tokens, 16)], (0, 0, 0), (1, 1, 1))

    few, many = sheet("one"), sheet("one " * 60)
    assert few.size[0] == many.size[0] == MIN_CELL_PX + 24
    assert few.size[1] < many.size[1]
    assert few.tobytes() != sheet("two").tobytes()
    pixels = [np.asarray(sheet("one", tokens)).astype(int) for tokens in (16, 17)]
    red = [int((array[..., 0] > array[..., 1] + 60).sum()) for array in pixels]
    assert red[0] == 0
    assert red[1] > 20
