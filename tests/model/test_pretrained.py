"""model.pretrained: from files, folders and runs, at other image sizes and context lengths; and what does not fit."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file

from disco_ds.checkpoint.saved import find_saved
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import CheckpointError, ConfigError
from disco_ds.evaluation.choose_model import choose
from disco_ds.model import pretrained
from disco_ds.model.build import build_model
from disco_ds.model.export import export
from disco_ds.model.preprocess import build_tokenizer, context_length, preprocessing
from tests.helpers.ranks import ROOT
from tests.helpers.saved_runs import STEP, assert_engines, model_of, probe
from tests.helpers.tiny import TINY_VOCAB, tiny_batch

SAVED_BEFORE = ROOT / "tests" / "fixtures" / "saved_0.1"
SIGLIP_LIKE = {"mean": [0.5, 0.5, 0.5], "std": [0.4, 0.4, 0.4], "interpolation": "bilinear", "resize_mode": "squash"}


def reference(config, seed=3):
    torch.manual_seed(seed)
    return open_clip.model.CLIP(**config).eval()


@pytest.fixture
def weights(tmp_path):
    """A file with the weights of a tiny model that has nothing of the seed that runs start with."""
    path = tmp_path / "weights.pt"
    torch.save(reference(TINY_VOCAB).state_dict(), path)
    return path


def same(model, expected, batch=None):
    images, texts = probe() if batch is None else batch
    with torch.no_grad():
        found, wanted = model.eval()(images, texts), expected(images, texts)
    torch.testing.assert_close(found.image_features, wanted[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_features, wanted[1], rtol=0, atol=1e-5)
    assert float(found.logit_scale) == pytest.approx(float(wanted[2]), rel=1e-5)


def test_files_of_every_kind(tmp_path, weights):
    state, expected = torch.load(weights), reference(TINY_VOCAB)
    files = {
        "trainer.pt": {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}},
        "vector.bin": {**state, "logit_scale": state["logit_scale"].reshape(1)},
    }
    for name, content in files.items():
        torch.save(content, tmp_path / name)
    save_file(state, tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors", *files):
        model = build_model(ModelConfig(name="t", config=TINY_VOCAB, pretrained=str(tmp_path / name)), seed=0)
        same(model, expected)
        assert model.logit_scale.shape == (1,)


def test_a_tag_is_downloaded_by_open_clips_own_means(monkeypatch, weights, caplog):
    asked = []
    monkeypatch.setattr(pretrained, "get_pretrained_cfg", lambda model, tag: {"mean": (0.1, 0.2, 0.3), "url": tag})
    monkeypatch.setattr(pretrained, "download_pretrained", lambda config: asked.append(config["url"]) or str(weights))
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tagged", TINY_VOCAB)
    model = build_model(ModelConfig(name="tagged", pretrained="some_tag"), seed=0)
    assert asked == ["some_tag"]
    assert tuple(preprocessing(model)["mean"]) == (0.1, 0.2, 0.3)
    same(model, reference(TINY_VOCAB))
    assert not caplog.records
    monkeypatch.setattr(pretrained, "get_pretrained_cfg", lambda model, tag: {"url": tag, "quick_gelu": True})
    build_model(ModelConfig(name="tagged", pretrained="some_tag"), seed=0)
    assert "trained with quick_gelu True, tagged has the other" in caplog.text

    def offline(config):
        raise OSError("no route to host")

    monkeypatch.setattr(pretrained, "download_pretrained", offline)
    with pytest.raises(ConfigError, match=r"some_tag of tagged could not be downloaded \(no route to host\)"):
        build_model(ModelConfig(name="tagged", pretrained="some_tag"), seed=0)


@pytest.mark.parametrize("case", ["zero3", "zero2-bias", "zero3-timm"])
def test_runs_and_what_was_exported_of_them(saved, tmp_path, case):
    """A run's folder, a checkpoint and every exported form start the same model, with the run's preprocessing."""
    folder, engines = saved
    kept = find_saved(folder / case)
    sources = [folder / case, folder / case / "checkpoints" / STEP]
    for form, ending in (("open_clip", ".pt"), ("safetensors", ".safetensors"), ("hf", "")):
        sources.append(export(kept, form, tmp_path / f"out{ending}").path)
    sources.append(f"local-dir:{tmp_path / 'out'}")
    for source in sources:
        model = build_model(ModelConfig(**{**model_of(case), "pretrained": str(source)}), seed=5).eval()
        with torch.no_grad():
            assert_engines(model(*probe()), engines[case])
    model = build_model(ModelConfig(name=f"local-dir:{tmp_path / 'out'}"), seed=5).eval()  # architecture and weights
    with torch.no_grad():
        assert_engines(model(*probe()), engines[case])


@pytest.mark.parametrize("name", ["export-open_clip.pt", "export-hf"])
def test_exports_of_the_release_before(name):
    """They start a run, can be evaluated, and open_clip loads them, with the features that their engine gave."""
    path = SAVED_BEFORE / name
    features = json.loads((SAVED_BEFORE / "features.json").read_text())["zero2"]
    config = json.loads((SAVED_BEFORE / "export-open_clip.json").read_text())
    open_clip.add_model_config(SAVED_BEFORE / "export-open_clip.json")
    words = {"pretrained": str(path)} if path.is_file() else {}
    theirs = open_clip.create_model("export-open_clip" if words else f"local-dir:{path}", **words).eval()
    ours = build_model(ModelConfig(name="t", config=config, pretrained=str(path)), seed=5).eval()
    images, texts = probe()
    with torch.no_grad():
        for found in (theirs(images, texts), ours(images, texts), choose(str(path)).build()[0](images, texts)):
            assert_engines(found, ([features["image"], features["text"]], features["logit_scale"], None))


def test_preprocessing_goes_from_run_to_run(saved, tmp_path, caplog):
    folder, _ = saved
    out = export(find_saved(folder / "zero2-words"), "hf", tmp_path / "first").path
    content = json.loads((out / "open_clip_config.json").read_text())
    content["preprocess_cfg"].update(SIGLIP_LIKE)
    (out / "open_clip_config.json").write_text(json.dumps(content))
    config = ModelConfig(**{**model_of("zero2-words"), "pretrained": str(out)})
    found = preprocessing(build_model(config, seed=0))
    assert {key: found[key] for key in SIGLIP_LIKE} == SIGLIP_LIKE
    # a run that started from it, exported in turn
    run = shutil.copytree(folder / "zero2-words", tmp_path / "run")
    (run / "config.yaml").write_text(json.dumps({"model": {**model_of("zero2-words"), "pretrained": str(out)}}))
    again = export(find_saved(run), "hf", tmp_path / "second").path
    _, _, transform = open_clip.create_model_and_transforms(f"local-dir:{again}")
    assert transform.transforms[-1].mean == SIGLIP_LIKE["mean"]
    assert any("prepared with" in note for note in export(find_saved(run), "open_clip", tmp_path / "third.pt").notes)
    assert not caplog.records
    shutil.rmtree(out)
    export(find_saved(run), "open_clip", tmp_path / "fourth.pt")
    assert f"the preprocessing of {out} is not known" in caplog.text


@pytest.mark.parametrize("layout", ["clip", "custom_text"])
def test_another_image_size_and_context_length(tmp_path, weights, layout):
    """Interpolated as open_clip does, which is asked to load the same file into a model of the new sizes."""
    config = {**TINY_VOCAB, "custom_text": layout == "custom_text"}
    name = f"resized-{layout}"
    (tmp_path / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / f"{name}.json")
    expected = open_clip.create_model(name, pretrained=str(weights), force_image_size=48, force_context_length=24)
    sizes = {"image_size": 48, "context_length": 24}
    run = ModelConfig(name="t", config=config, pretrained=str(weights), **sizes)
    model = build_model(run, seed=0)
    images, texts = torch.randn(4, 3, 48, 48), tiny_batch(4)[1].repeat(1, 2)[:, :24]
    same(model, expected.eval(), (images, texts))
    assert preprocessing(model)["size"] in (48, (48, 48))
    assert context_length(model) == 24
    assert build_tokenizer(run)(["a cat"]).shape == (1, 24)
    with torch.no_grad():  # and without weights it is simply a model of that size
        plain = build_model(ModelConfig(name="t", config=config, **sizes), 0)
        assert plain(images, texts).image_features.shape == (4, 32)


def test_a_timm_vit_at_another_size(tmp_path):
    """timm resamples the embedding of its own ViTs; the features follow timm's own set_input_size."""
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
    config = {**TINY_VOCAB, "vision_cfg": vision, "custom_text": True}
    (tmp_path / "timm-vit.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "timm-vit.json")
    torch.manual_seed(1)  # open_clip itself builds timm's models at the size in their name only
    expected = open_clip.create_model("timm-vit", pretrained=None, pretrained_text=False).eval()
    torch.save(expected.state_dict(), tmp_path / "vit.pt")
    expected.visual.set_input_size(64)
    run = ModelConfig(name="t", config=config, pretrained=str(tmp_path / "vit.pt"), image_size=64)
    model, images = build_model(run, seed=0).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        found = model(images).image_features
        wanted = expected.encode_image(images, normalize=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_clips_weights_for_a_model_with_a_bias(weights):
    config = {**TINY_VOCAB, "init_logit_bias": -10.0}
    model = build_model(ModelConfig(name="t", config=config, pretrained=str(weights)), 0)
    assert model.logit_bias.item() == -10.0


def other_text(**fields):
    return reference({**TINY_VOCAB, "text_cfg": {**TINY_VOCAB["text_cfg"], **fields}}).state_dict()


def torn(path):
    torch.save(OrderedDict(a=torch.ones(100)), path)
    path.write_bytes(path.read_bytes()[:300])


def folder_without_weights(path):
    path.mkdir()
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY_VOCAB}))


UNFIT = {
    "wide.pt": (
        lambda path: torch.save(reference({**TINY_VOCAB, "embed_dim": 48}).state_dict(), path),
        ["have other shapes", "(64, 48) there, (64, 32) in the model", "model.name"],
    ),
    "deep.pt": (lambda path: torch.save(other_text(layers=3), path), ["12 are none of the model's", "resblocks.2"]),
    "shallow.pt": (
        lambda path: torch.save({k: v for k, v in other_text().items() if "resblocks.1." not in k}, path),
        ["24 of the model's", "are missing", "resblocks.1"],
    ),
    "width.pt": (
        lambda path: torch.save(other_text(width=32, context_length=8), path),
        ["positional_embedding", "other shapes"],
    ),
    "state.pt": (lambda path: torch.save({"optimizer": {"lr": 1.0}, "step": 3}, path), ["no state dict"]),
    "torn.pt": (torn, ["cannot be read"]),
    "numbers.npz": (lambda path: np.savez(path, a=np.ones(3)), ["does not fit"]),
    "empty": (lambda path: path.mkdir(), ["open_clip_config.json", "run's folder"]),
    "bare": (folder_without_weights, ["no weights"]),
    "gone.pt": (lambda path: None, ["no file, no folder and no tag"]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_named_before_the_model_is_built(tmp_path, monkeypatch, name):
    make, expected = UNFIT[name]
    make(tmp_path / name)
    create, built = open_clip.create_model, []
    monkeypatch.setattr(open_clip, "create_model", lambda *a, **o: built.append(o.get("device")) or create(*a, **o))
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(name="t", config=TINY_VOCAB, pretrained=str(tmp_path / name)), seed=0)
    assert all(words in str(caught.value) for words in [name, *expected]), caught.value
    assert str(caught.value).startswith("model.pretrained: ")
    assert "cpu" not in built or name == "numbers.npz"


def test_a_damaged_run_is_named(saved, tmp_path):
    run = shutil.copytree(saved[0] / "zero2", tmp_path / "run")
    next((run / "checkpoints" / STEP / "engine").glob("*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint verifies"):
        build_model(ModelConfig(**{**model_of("zero2"), "pretrained": str(run)}), seed=0)
