"""disco-eval: the same numbers for a run and all that was exported of it, on one process and two ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil

import numpy as np
import open_clip
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image

from disco_ds.cli.eval import main
from disco_ds.cli.export import main as export
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.saved_runs import STEP, WORDS, model_of
from tests.helpers.shards import write_shard
from tests.helpers.towers import exact_similarity, slow_ranks, slow_retrieval

CLASSES = ["red fox", "owl", "7", "bee", "ant", "cow", "zebra"]
TEMPLATES = ["a photo of a {}.", "the {}, a {}"]
COUNT, TORN = 34, 3


def image_bytes(number):
    """A picture of random patches: the features of flat ones would differ by little more than rounding."""
    patches = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(patches).resize((40, 40)).save(buffer, "PNG")
    return buffer.getvalue()


def captions_of(number):
    return [f"picture {number} of a {CLASSES[number % 7]}", f"number {number}", "a picture"][: 1 + number % 3]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Held-out data as shards with one to three captions a sample, as shards without any, and as class folders."""
    folder = tmp_path_factory.mktemp("heldout")
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    (folder / "templates.txt").write_text("\n".join(TEMPLATES))
    samples, bare = {}, {}
    for number in range(COUNT):
        label = CLASSES[number % 7] if number % 2 else str(number % 7)
        label = "3" if number % 7 == 3 else label  # numbers and names
        record = json.dumps({"captions": captions_of(number)}).encode()
        samples[f"{number:04d}"] = {"png": image_bytes(number), "json": record, "cls": label.encode()}
        bare[f"{number:04d}"] = {"png": image_bytes(number), "cls": label.encode()}
        name = CLASSES[number % 7]
        path = folder / "by-name" / name / f"{number:04d}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number))
        ordered = folder / "by-order" / f"n{number % 7:03d}" / "deep" / f"{number:04d}.png"
        ordered.parent.mkdir(parents=True, exist_ok=True)
        ordered.write_bytes(image_bytes(number))
    for name, made in (("pairs", samples), ("bare", bare)):
        keys = sorted(made)
        for shard in range(3):
            write_shard(folder / name / f"{shard}.tar", {key: made[key] for key in keys[shard * 12 : shard * 12 + 12]})
    for number in range(TORN):  # the last of all images: alone in the last batch of four
        (folder / "by-name" / "zebra" / f"torn{number}.png").write_bytes(image_bytes(1)[:60])
    (folder / "by-name" / "owl" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def exports(saved, tmp_path_factory):
    """The exported forms of a run that has open_clip's vocabulary."""
    folder = tmp_path_factory.mktemp("exports")
    for form, name in (("open_clip", "model.pt"), ("safetensors", "model.safetensors"), ("hf", "hub")):
        assert export([str(saved[0] / "zero2-words"), "--to", form, "--out", str(folder / name)]) == 0
    return folder


def run(capsys, *words):
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def answer(capsys, *words, workers=0):
    code, out, err = run(capsys, *words, "--workers", workers, "--json")
    assert code == 0, err
    return json.loads(out)


def pair_options(data):
    return ["--data.val", data / "pairs", "--data.caption_key", "json:captions", "--classes", data / "classes.txt",
            "--templates", data / "templates.txt"]  # fmt: skip


@pytest.fixture(scope="module")
def expected(data, exports):
    """By plain loops over what open_clip itself makes of the exported folder: retrieval, ranks of the right classes."""
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{exports / 'hub'}")
    tokenizer, model = open_clip.get_tokenizer(f"local-dir:{exports / 'hub'}"), model.eval()
    owner = [number for number in range(COUNT) for _ in captions_of(number)]
    with torch.no_grad():
        pixels = [transform(Image.open(io.BytesIO(image_bytes(number))).convert("RGB")) for number in range(COUNT)]
        image = model.encode_image(torch.stack(pixels))
        text = torch.cat([model.encode_text(tokenizer([c])) for n in range(COUNT) for c in captions_of(n)])
        weights = []
        for name in CLASSES:
            prompts = [template.replace("{}", name) for template in TEMPLATES]
            each = [model.encode_text(tokenizer([prompt]), normalize=True)[0].double() for prompt in prompts]
            weights.append(sum(each) / len(each))
    similarity = exact_similarity(image, torch.stack(weights))
    ranks = slow_ranks(similarity, [[number % 7] for number in range(COUNT)])
    return slow_retrieval(exact_similarity(image, text), owner), ranks


def check(found, expected):
    retrieval, ranks = expected
    metrics = found["metrics"]
    assert {name: metrics[f"val/{name}"] for name in retrieval} == pytest.approx(retrieval)
    assert metrics["val/zero_shot_top1"] == pytest.approx(sum(rank == 1 for rank in ranks) / COUNT)
    assert metrics["val/zero_shot_top5"] == pytest.approx(sum(rank <= 5 for rank in ranks) / COUNT)
    own = [[rank == 1 for number, rank in enumerate(ranks) if number % 7 == c] for c in range(7)]
    assert metrics["val/zero_shot_mean_per_class"] == pytest.approx(sum(sum(o) / len(o) for o in own) / 7)
    assert found["per_class"] == {name: [sum(o) / len(o), len(o)] for name, o in zip(CLASSES, own, strict=True)}
    assert metrics["val/zero_shot_samples"] == COUNT


def test_every_way_to_name_a_model_gives_the_plain_loops_numbers(saved, exports, data, expected, tmp_path, capsys):
    shutil.copy(exports / "model.pt", tmp_path / "plain.pt")
    torch.save(dict(torch.load(tmp_path / "plain.pt")), tmp_path / "plain.pt")  # says nothing about itself any more
    (tmp_path / "tiny-eval.json").write_text(json.dumps(WORDS))
    for words in (
        [saved[0] / "zero2-words"],
        [saved[0] / "zero2-words", "--checkpoint", STEP],
        [saved[0] / "zero2-words" / "checkpoints" / STEP],
        [exports / "model.pt"],
        [exports / "model.safetensors"],
        [exports / "hub"],
        [f"local-dir:{exports / 'hub'}"],
        [tmp_path / "plain.pt", "--model", tmp_path / "tiny-eval.json"],
        [tmp_path / "tiny-eval.json", "--pretrained", exports / "model.safetensors"],
    ):
        check(answer(capsys, *words, *pair_options(data)), expected)


def on_this_rank(words, port, store):
    """What the command prints on this rank; it starts its own process group, as under torchrun."""
    world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{store}", **world)  # which the helper ends
    return out.getvalue()


def test_two_ranks_give_the_same(saved, data, expected, tmp_path):
    words = [saved[0] / "zero2-words", *pair_options(data), "--workers", "0", "--json", "--batch", "5"]
    words = [str(word) for word in words]
    first, second = run_ranks(on_this_rank, 2, words, free_port(), str(tmp_path / "store"))
    check(json.loads(first), expected)
    assert second == ""


@pytest.mark.parametrize("form", ["bare", "by-name", "by-order"])
def test_images_without_captions(exports, data, expected, capsys, form):
    where = ["--data.val", data / form, "--no-retrieval"] if form == "bare" else ["--folder", data / form]
    options = ["--classes", data / "classes.txt", "--templates", data / "templates.txt", "--batch", 4]
    found = answer(capsys, exports / "model.pt", *where, *options, workers=int(form == "by-order"))
    ranks = expected[1]
    assert found["metrics"]["val/zero_shot_top1"] == pytest.approx(sum(rank == 1 for rank in ranks) / COUNT)
    assert found["metrics"]["val/images"] == COUNT
    assert not any("R@" in name for name in found["metrics"])
    assert found["metrics"]["val/data_faults"] == (TORN if form == "by-name" else 0)


def test_classes_of_a_folder_are_its_own(exports, data, capsys):
    code, out, _ = run(capsys, exports / "hub", "--folder", data / "by-name", "--workers", 0)
    assert code == 0
    assert "R@1" not in out
    assert f"on {COUNT} samples" in out
    found = answer(capsys, exports / "hub", "--folder", data / "by-name")
    assert sorted(found["per_class"]) == sorted(CLASSES)


def test_a_run_brings_its_data_and_classes(saved, data, expected, tmp_path, capsys):
    folder = shutil.copytree(saved[0] / "zero2-words", tmp_path / "run")
    evaluation = {"classes": CLASSES, "templates": TEMPLATES}
    heldout = {"train": "gone", "val": str(data / "pairs"), "caption_key": "json:captions"}
    content = {"steps": 2, "model": model_of("zero2-words"), "data": heldout, "evaluation": evaluation}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    check(answer(capsys, folder), expected)
    other = answer(capsys, folder, "--classes", data / "classes.txt", "--data.val", data / "pairs" / "0.tar")
    assert other["metrics"]["val/images"] == 12


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ViT-B32"], ["'ViT-B32'", "'ViT-B-32'"]),
        (["RN50"], ["--pretrained", "yfcc15m"]),
        (["RN50", "--pretrained", "gone.pt", "--data.val", "{data}/pairs"], ["gone.pt", "yfcc15m"]),
        (["{exports}/model.pt"], ["--data.val SHARDS, or --folder DIR"]),
        (["{exports}/model.pt", "--pretrained", "openai"], ["--pretrained openai", "open_clip name"]),
        (["{exports}/hub", "--checkpoint", STEP], ["--checkpoint", "run's folder"]),
        (["{data}", "--data.val", "{data}/pairs"], ["neither checkpoints nor open_clip_config.json"]),
        (["{data}/classes.txt", "--data.val", "{data}/pairs"], ["classes.txt", "--model"]),
        (["{exports}/hub", "--data.val", "{data}/none.tar"], ["data.val", "none.tar"]),
        (["{exports}/hub", "--folder", "{data}/pairs"], ["--folder", "sub-folder"]),
        (["{exports}/hub", "--folder", "{data}/by-order", "--classes", "imagenet"], ["7 sub-folders", "1000 classes"]),
        (["{exports}/hub", "--folder", "{data}/by-name", "--data.val", "x"], ["both given"]),
        (["{exports}/hub", "--data.val", "{data}/bare", "--no-retrieval"], ["--classes"]),
        (["{exports}/hub", "--data.val", "{data}/pairs", "--batch", "none"], ["--batch", "'none'"]),
        (["{exports}/hub", "--data.val", "{data}/bare"], ["0 kept", "caption"]),
        (["{exports}/hub", "--data.vall", "x"], ["--data.vall", "disco-eval --help"]),
    ],
)
def test_mistakes_are_one_line(exports, data, capsys, words, told):
    code, _, said = run(capsys, *[word.format(exports=exports, data=data) for word in words])
    assert code == 2
    assert said.startswith("disco-eval: ")
    assert said.count("\n") == 1, said
    assert all(word in said for word in told), said
