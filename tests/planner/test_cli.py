"""disco-plan as people and programs use it: exit status, messages, JSON, files that a run takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from disco_ds.cli.plan import main
from disco_ds.config.read import read_run
from disco_ds.config.schema import RunConfig
from disco_ds.engine.buckets import fill_buckets
from disco_ds.engine.ds_config import resolve
from disco_ds.engine.ds_schema import read_ds_config
from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import shipped
from disco_ds.planner.devices import device_with
from disco_ds.planner.memory import CATEGORIES
from disco_ds.planner.models import ModelSource
from disco_ds.planner.search import Planner, Request
from disco_ds.planner.text import SCHEMA
from disco_ds.planner.tracing.selfcheck import PROBE
from disco_ds.planner.write import write_plan


def run(capsys, *words):
    status = main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_answer_is_in_the_first_two_lines_and_lines_are_short(capsys):
    status, out, _ = run(capsys, "--gpus", "64", "--mem", "40G", "--compare")
    first, second = out.splitlines()[:2]
    assert status == 0
    found = re.fullmatch(r"ViT-B-32: largest batch (\d+) = 64 GPUs x (\d+) fits: ([\d.]+) of 39.39 GiB", first)
    assert int(found[1]) == 64 * int(found[2])
    assert float(found[3]) <= 39.39
    assert "ZeRO" in second
    assert "40 GB" in second
    assert max(map(len, out.splitlines())) <= 100
    for name in CATEGORIES:
        assert re.search(rf"^  {name} +[\d.]+", out, re.MULTILINE)
    assert "would change the largest batch most" in out
    assert out.count("one_block") >= 4  # the table


def test_a_batch_that_does_not_fit_says_what_does(capsys):
    words = ("--gpus", "8", "--gpu", "A100-40G", "--global-batch", "32768", "--checkpointing", "none", "--zero", "0")
    status, out, _ = run(capsys, *words, "--micro-batch", "4096", "--precision", "amp")
    assert status == 1
    assert "does not fit" in out.splitlines()[0]
    assert "nearest that fits: batch 32768" in out
    assert run(capsys, *words, "--micro-batch", "256", "--precision", "amp")[0] == 0


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--mem", "40X"], "--mem 40X"),
        (["--gpu", "A100"], "--gpu A100"),
        ([], "--mem"),
        (["--mem", "40G", "--gpu", "H100"], "--gpu"),
        (["--mem", "40G", "--model", "ViT-B-33"], "ViT-B-33"),
        (["--mem", "40G", "--gpus", "0"], "--gpus"),
        (["--mem", "40G", "--gpus", "8", "--global-batch", "1001"], "--global-batch 1001"),
        (["--mem", "40G", "--per-gpu-batch", "100", "--micro-batch", "33"], "--micro-batch 33"),
        (["--mem", "40G", "--gpus", "2", "--global-batch", "64", "--per-gpu-batch", "16"], "--per-gpu-batch 16"),
        (["--mem", "40G", "--zero", "4"], "--zero"),
        (["--mem", "40G", "--checkpointing", "every:0"], "--checkpointing"),
        (["--mem", "40G", "--frag", "0.5"], "--frag"),
        (["--mem", "40G", "--frag", "many"], "--frag"),
        (["--mem", "40G", "--reserve", "50"], "--reserve"),
        (["--mem", "40G", "--reserve", "1MB"], "--reserve"),
        (["--mem", "40G", "--ds-config", "/nowhere.json"], "--ds-config /nowhere.json"),
        (["--mem", "40G", "--offload", "all", "--zero", "2"], "--offload"),
        (["--mem", "40G", "--offload", "optimizer", "--zero", "0"], "--offload"),
        (["--mem", "40G", "--what"], "--what"),
        (["trace"], "trace"),
        (["trace", "ViT-B-32", "--checkpointing", "some"], "--checkpointing some"),
    ],
)
def test_bad_input_is_status_2_and_names_the_option(capsys, unchecked, words, option):
    status, out, err = run(capsys, *words)
    assert status == 2
    assert out == ""
    assert option in err
    assert "Traceback" not in err


def test_json_has_the_documented_fields(capsys):
    status, out, _ = run(
        capsys, "--gpus", "8", "--mem", "80G", "--global-batch", "4096", "--per-gpu-batch", "512", "--json",
        "--model", "ViT-L-14",
    )  # fmt: skip
    answer = json.loads(out)
    assert status == 0
    assert answer["schema"] == SCHEMA
    assert answer["fits"] is True
    assert answer["global_batch"] == 4096
    assert answer["per_gpu_batch"] == answer["micro_batch"] * answer["accumulation"] == 512
    assert sum(answer["breakdown_bytes"].values()) == answer["peak_bytes"] == max(answer["moments_bytes"].values())
    assert answer["limit_bytes"] - answer["peak_bytes"] == answer["headroom_bytes"]
    assert answer["binding"] in answer["breakdown_bytes"]
    assert answer["assumptions"]
    status, out, _ = run(capsys, "--gpus", "1", "--mem", "16G", "--model", "ViT-bigG-14", "--zero", "0", "--json")
    assert status == 1
    assert json.loads(out)["nearest"]["fits"] is True


def test_a_ds_config_decides_stage_buckets_and_batch(capsys, tmp_path):
    path = tmp_path / "ds.json"
    content = {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 256,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    path.write_text(json.dumps(content))
    words = ("--gpus", "8", "--mem", "40G", "--ds-config", str(path), "--json")
    answer = json.loads(run(capsys, *words)[1])
    assert (answer["settings"]["zero"], answer["micro_batch"], answer["accumulation"]) == (2, 256, 2)
    # DeepSpeed's default bucket is 5e8 elements, allocated whole
    content["zero_optimization"]["reduce_bucket_size"] = 10_000_000
    path.write_text(json.dumps(content))
    lower = json.loads(run(capsys, *words)[1])
    assert answer["moments_bytes"]["reduction"] - lower["moments_bytes"]["reduction"] > 2 * 400_000_000
    status, _, err = run(capsys, *words[:-1], "--zero", "1")
    assert status == 2
    assert "--zero is 1" in err
    path.write_text('{"bf16": true}')  # as a run checks it
    status, _, err = run(capsys, *words)
    assert status == 2
    assert "ds.json: bf16: expected an object" in err


@pytest.mark.parametrize("extra", [(), ("--zero", "3"), ("--precision", "amp", "--micro-batch", "512"),
                                   ("--zero", "3", "--offload", "all")])  # fmt: skip
def test_the_written_files_resolve_to_the_plan(capsys, tmp_path, extra):
    status, out, _ = run(
        capsys, "--gpus", "8", "--mem", "80G", "--global-batch", "8192", *extra, "--write", str(tmp_path / "plan"),
        "--json",
    )  # fmt: skip
    answer = json.loads(out)
    assert status == 0
    files = tmp_path / "plan"
    config = read_run(files / "run.yaml", {})
    assert isinstance(config, RunConfig)
    resolved = resolve(
        config, read_ds_config(files / "ds_config.json"), world_size=8, on_gpu=True, source="ds_config.json"
    )
    model = shipped("ViT-B-32")
    zero = resolved.deepspeed["zero_optimization"]
    fill_buckets(zero, model.parameters, model.largest, on_gpu=True, source="ds_config.json")
    batch, chosen = resolved.batch, answer["settings"]
    assert (batch.global_batch, batch.micro_batch, batch.accumulation) == (
        8192, answer["micro_batch"], answer["accumulation"],
    )  # fmt: skip
    assert (resolved.precision, resolved.zero_stage) == (chosen["precision"], chosen["zero"])
    assert config.model.checkpointing == chosen["checkpointing"]
    assert "auto" not in zero.values()
    assert zero.get("reduce_bucket_size", 0) <= model.parameters + 1
    capsys.readouterr()  # DeepSpeed's greetings
    # what was written is planned as the same step
    again = run(capsys, "--gpus", "8", "--mem", "80G", "--ds-config", str(files / "ds_config.json"), "--json",
                "--checkpointing", answer["settings"]["checkpointing"])[1]  # fmt: skip
    assert json.loads(again)["peak_bytes"] == answer["peak_bytes"]


def test_the_written_run_has_the_sizes_that_were_planned(capsys, tmp_path, unchecked):
    model, files = tmp_path / "small.json", tmp_path / "plan"
    model.write_text(json.dumps(PROBE))
    words = ("--gpus", "2", "--mem", "24G", "--model", str(model), "--checkpointing", "none", "--global-batch", "64")
    sizes = ("--image-size", "64", "--context-length", "24")
    status, out, err = run(capsys, *words, *sizes, "--write", str(files), "--json")
    assert status == 0, err
    config = read_run(files / "run.yaml", {})
    assert (config.model.name, config.model.image_size, config.model.context_length) == (str(model), 64, 24)
    planned = ModelSource(config.model.name, lambda _: None, config.model.model_dump()).get("bf16", "none")
    assert (planned.image_size, planned.context_length) == ([64, 64], 24)
    own = json.loads(run(capsys, *words, "--json")[1])
    assert json.loads(out)["breakdown_bytes"]["activations"] > own["breakdown_bytes"]["activations"]


def test_the_written_run_has_every_option_that_was_planned_with(tmp_path):
    options_given = {"tile": 512, "keep_logits": True, "reduce_once": False, "images_on_device": "cached",
                     "reuse_last": True}  # fmt: skip
    source = ModelSource("ViT-B-32")
    request = Request(gpus=8, gpu=device_with("80G"), global_batch=8192, micro_batch=256, **options_given)
    _, path = write_plan(tmp_path, Planner(source).best(request), source)
    config = read_run(path, {})
    assert (config.loss.tile, config.loss.keep_logits) == (512, True)
    assert (config.cached.images, config.cached.reduce, config.cached.reuse_last) == ("device", "each", True)
    with pytest.raises(ConfigError, match="disco is planned for comparison"):
        write_plan(tmp_path, Planner(source).best(replace(request, loss="disco")), source)


def test_a_plan_that_does_not_fit_is_not_written_and_says_so(capsys, tmp_path):
    words = ("--gpus", "8", "--mem", "24G", "--global-batch", "262144", "--micro-batch", "32768")
    status, out, _ = run(capsys, *words, "--write", str(tmp_path / "plan"))
    assert status == 1
    assert not (tmp_path / "plan").exists()
    assert f"--write {tmp_path / 'plan'}: nothing was written, since this does not fit" in out


def test_an_accumulation_alone_in_a_ds_config_is_kept(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 4}))
    words = ("--gpus", "8", "--mem", "40G", "--ds-config", str(path), "--json")
    for extra in ((), ("--global-batch", "8192"), ("--micro-batch", "64")):
        assert json.loads(run(capsys, *words, *extra)[1])["accumulation"] == 4
    status, _, err = run(capsys, *words, "--global-batch", "1040")
    assert status == 2
    assert "--global-batch 1040 does not divide by --gpus 8 x gradient_accumulation_steps 4; nearest that do: " in err
    assert "1024 and 1056" in err


def test_a_picture_is_drawn_or_matplotlib_is_asked_for(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert run(capsys, "--gpus", "8", "--mem", "24G", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    status, _, err = run(capsys, "--gpus", "8", "--mem", "24G", "--plot", str(tmp_path / "no" / "plan.png"))
    assert status == 2
    assert "--plot" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, "--gpus", "8", "--mem", "24G", "--plot", str(path))
    assert status == 2
    assert "matplotlib is missing" in err


def test_a_known_model_is_answered_without_torch_and_pydantic():
    code = (
        "import sys; from disco_ds.cli.plan import main; status = main(['--gpus', '64', '--mem', '40G']); "
        "heavy = {'torch', 'pydantic', 'deepspeed', 'open_clip', 'numpy', 'yaml'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_a_reader_that_has_enough_ends_it_quietly():
    command = f"{shlex.quote(sys.executable)} -m disco_ds.cli.plan --gpus 8 --mem 40G --compare | head -1"
    done = subprocess.run(["bash", "-c", command + "; exit ${PIPESTATUS[0]}"], capture_output=True, text=True)
    assert done.stdout.startswith("ViT-B-32")
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # all may fit into the pipe
