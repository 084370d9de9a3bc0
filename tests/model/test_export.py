"""disco-export: what open_clip loads from the exported file or folder gives the engine's features."""

from __future__ import annotations

import json
import shutil

import open_clip
import pytest
import torch
from PIL import Image

from disco_ds.cli.export import main
from tests.helpers.saved_runs import STEP, assert_engines, model_of, probe


def run(capsys, *words):
    """Exit status, and what was said."""
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


def loaded(to, path, case, folder):
    """The exported model as open_clip loads it, with its transform for evaluation."""
    if to == "hf":
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{path}")
    else:
        name = f"exported-{case}"
        (folder / f"{name}.json").write_text(json.dumps(model_of(case)["config"]))
        open_clip.add_model_config(folder / f"{name}.json")
        model, _, transform = open_clip.create_model_and_transforms(name, pretrained=str(path))
    return model.eval(), transform


@pytest.mark.parametrize("to", ["open_clip", "safetensors", "hf"])
def test_open_clip_loads_it_with_the_engines_features(saved, tmp_path, capsys, to):
    folder, engines = saved
    ending = {"open_clip": ".pt", "safetensors": ".safetensors", "hf": ""}[to]
    for case, engine in engines.items():
        if to != "open_clip" and case not in ("zero3-locked", "zero2-resnet", "zero2-bias"):
            continue  # the forms differ in how they are written only
        out = tmp_path / f"{case}{ending}"
        code, said = run(capsys, folder / case, "--to", to, "--out", out)
        assert code == 0, said
        model, transform = loaded(to, out, case, tmp_path)
        with torch.no_grad():
            assert_engines(model(*probe()), engine, within=0.05 if "bf16" in case else 1e-5)
        assert model.logit_scale.shape == ()
        assert transform(Image.new("RGB", (50, 40))).shape == (3, 32, 32)


def test_bf16_rounds_matrices_and_nothing_else(saved, tmp_path, capsys):
    folder, _ = saved
    for case in ("zero2-bias", "zero2-resnet"):
        for precision in ("fp32", "bf16"):
            out = tmp_path / f"{case}-{precision}.pt"
            assert run(capsys, folder / case, "--to", "open_clip", "--out", out, "--precision", precision)[0] == 0
        exact, rounded = (torch.load(tmp_path / f"{case}-{p}.pt", weights_only=True) for p in ("fp32", "bf16"))
        model, _ = loaded("open_clip", tmp_path / f"{case}-bf16.pt", case, tmp_path)
        parameters = {name for name, _ in model.named_parameters()} - {"logit_scale", "logit_bias"}
        for name, value in rounded.items():
            assert value.dtype == (torch.bfloat16 if name in parameters else exact[name].dtype), name
            assert torch.equal(value, exact[name].to(value.dtype)), name
        assert "visual.bn1.running_var" in rounded or case != "zero2-resnet"


def test_what_is_said_loads_it(saved, tmp_path, capsys):
    """The lines printed are Python that works, for a file too: a model of one's own gets its JSON beside it."""
    folder, engines = saved
    run_folder = shutil.copytree(folder / "zero3", tmp_path / "mine")
    for to in ("open_clip", "safetensors", "hf"):
        code, said = run(capsys, run_folder, "--to", to, "--json")
        assert code == 0, said
        told = json.loads(said)
        assert told["path"].startswith(str(run_folder / "export" / f"mine-{STEP}"))
        made = None
        for line in told["usage"]:
            made = eval(line, {"open_clip": open_clip})
        with torch.no_grad():
            features = made[0].eval()(*probe())[0]
        torch.testing.assert_close(features, torch.from_numpy(engines["zero3"][0][0]), rtol=0, atol=1e-5)
    left = sorted(path.name for path in (run_folder / "export").iterdir())
    assert left == [f"mine-{STEP}-hf", f"mine-{STEP}.json", f"mine-{STEP}.pt", f"mine-{STEP}.safetensors"]


def test_nothing_is_overwritten_unless_asked(saved, tmp_path, capsys):
    folder, _ = saved
    out = tmp_path / "model.pt"
    out.write_bytes(b"precious")
    code, said = run(capsys, folder / "zero2", "--to", "open_clip", "--out", out)
    assert (code, out.read_bytes()) == (2, b"precious")
    assert "exists" in said
    assert "--force" in said
    assert run(capsys, folder / "zero2", "--to", "open_clip", "--out", out, "--force")[0] == 0
    assert torch.load(out, weights_only=True)["logit_scale"].shape == ()
    (tmp_path / "model.json").write_text('{"embed_dim": 1}')
    code, said = run(capsys, folder / "zero2", "--to", "safetensors", "--out", tmp_path / "model.safetensors")
    assert (code, (tmp_path / "model.safetensors").exists()) == (2, False)
    assert "model.json exists and describes another model" in said
    assert run(capsys, folder / "zero2", "--to", "open_clip", "--out", out, "--force")[0] == 0
    assert json.loads((tmp_path / "model.json").read_text())["embed_dim"] > 1
    hub = tmp_path / "hub"
    (hub / "deep").mkdir(parents=True)
    code, said = run(capsys, folder / "zero2", "--to", "hf", "--out", hub, "--force")
    assert code == 2
    assert "other things" in said
    shutil.rmtree(hub / "deep")
    for _ in range(2):
        assert run(capsys, folder / "zero2", "--to", "hf", "--out", hub, "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "model.json", "model.pt"]


def test_a_failed_write_leaves_nothing(saved, tmp_path, capsys, monkeypatch):
    folder, _ = saved

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("disco_ds.model.export.torch.save", full)
    code, said = run(capsys, folder / "zero2", "--to", "open_clip", "--out", tmp_path / "new" / "model.pt")
    assert code == 2
    assert "No space left" in said
    assert list((tmp_path / "new").iterdir()) == []


def test_the_newest_that_verifies_is_taken(saved, tmp_path, capsys):
    folder, _ = saved
    run_folder = shutil.copytree(folder / "zero0", tmp_path / "run")
    newer = shutil.copytree(run_folder / "checkpoints" / STEP, run_folder / "checkpoints" / "step-00000009")
    damaged = next((newer / "engine").glob("*model_states.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    code, said = run(capsys, run_folder, "--to", "safetensors", "--json")
    assert code == 0, said
    assert json.loads(said)["checkpoint"].endswith(STEP)
    code, said = run(capsys, run_folder, "--to", "safetensors", "--checkpoint", "step-00000009", "--force")
    assert code == 2
    assert "step-00000009" in said
    assert "SHA-256" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "--to", "hf"], ["nowhere does not exist", "run's folder"]),
        (["{runs}", "--to", "hf"], ["holds no checkpoint"]),
        (["{runs}/zero2", "--to", "onnx"], ["onnx", "open_clip"]),
        (["{runs}/zero2", "--to", "hf", "--checkpoint", "step-7"], ["step-7", STEP]),
        (["{runs}/zero2", "--to", "safetensors", "--out", "model.bin"], ["model.bin", "ends in .safetensors"]),
        (["{runs}/zero2"], ["--to", "disco-export --help"]),
    ],
)
def test_mistakes_are_one_line(saved, capsys, words, told):
    code, said = run(capsys, *[word.format(runs=saved[0]) for word in words])
    assert code == 2
    assert said.startswith("disco-export: ")
    assert said.count("\n") == 1
    assert all(word in said for word in told), said


def with_other_model(saved, case, folder, section, **fields):
    """A copy of a run whose checkpoint says that it has another model."""
    run_folder = shutil.copytree(saved[0] / case, folder / "run")
    manifest = run_folder / "checkpoints" / STEP / "manifest.json"
    content = json.loads(manifest.read_text())
    content["model"]["config"][section].update(fields)
    manifest.write_text(json.dumps(content))
    return run_folder


def test_weights_of_another_model_are_named(saved, tmp_path, capsys):
    run_folder = with_other_model(saved, "zero2", tmp_path, "vision_cfg", width=96)
    code, said = run(capsys, run_folder, "--to", "hf")
    assert code == 2
    assert "are not those of t" in said
    assert not (run_folder / "export").exists()


def test_a_tokenizer_that_cannot_be_had_is_told(saved, tmp_path, capsys, monkeypatch):
    """open_clip looks for a hub's tokenizer in the folder itself; weights are worth having without it."""
    run_folder = with_other_model(saved, "zero2-words", tmp_path, "text_cfg", hf_tokenizer_name="someone/something")

    class Tokenizer:
        def __init__(self, name, **_):
            if name == "someone/something":
                raise OSError("no network")

    monkeypatch.setattr(open_clip.factory, "HFTokenizer", Tokenizer)
    code, said = run(capsys, run_folder, "--to", "hf")
    assert code == 0
    assert "note: the tokenizer someone/something is not in the folder" in said
    monkeypatch.setattr(Tokenizer, "__init__", lambda self, name, **_: None)
    written = []
    monkeypatch.setattr(Tokenizer, "save_pretrained", written.append, raising=False)
    assert "note" not in run(capsys, run_folder, "--to", "hf", "--force")[1]
    assert len(written) == 1
