"""The command line of disco-train: what is read, what each mistake is answered with, and its help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disco_ds.cli import train
from disco_ds.cli.train import parse as parse_words
from disco_ds.config.options import LAUNCH, OPTIONS
from disco_ds.errors import ConfigError
from disco_ds.evaluation.zeroshot import TEMPLATES

BASE = ["--data.train", "a.tar", "--steps", "3"]


def parse(*argv):
    return parse_words(argv)


def refused(*argv):
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return str(caught.value)


def test_flags_reach_their_fields():
    config, launch = parse(
        "--data.train", "a/{00,03}.tar", "b.tar", "--data.weights", "1", "2.5", "--samples", "1000",
        "--optimizer.betas", "0.8", "0.9", "--loss.keep_logits", "false", "--model.config", '{"embed_dim": 3}',
        "--logging.tensorboard", "--data.val", "null", "--ds_config", "x.json", "--local_rank=1", "--profile",
        "--cached.reuse_last", "true", "--evaluation.classes", "names.txt",
    )  # fmt: skip
    assert config.data.train == ["a/{00,03}.tar", "b.tar"]  # a comma in a brace list does not split it
    assert config.data.weights == [1.0, 2.5]
    assert (config.samples, config.steps) == (1000, None)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.loss.keep_logits is False
    assert config.model.config == {"embed_dim": 3}
    assert config.logging.tensorboard is True
    assert config.data.val is None
    assert config.logging.profile_steps == 3
    assert config.cached.reuse_last is True
    assert config.evaluation.classes == Path("names.txt")
    assert (launch.ds_config, launch.plan) == ("x.json", None)


def test_repeated_list_flags_add_up():
    config, _ = parse("--data.train", "a.tar", "--data.train", "b.tar", "--steps", "1")
    assert config.data.train == ["a.tar", "b.tar"]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_flags_win_over_the_file(tmp_path, suffix):
    content = {"steps": 5, "seed": 3, "data": {"train": "x.tar", "workers": 2}, "optimizer": {"lr": 1.0}}
    path = tmp_path / f"run.{suffix}"
    path.write_text(yaml.safe_dump(content) if suffix == "yaml" else json.dumps(content))
    config, _ = parse("--config", str(path), "--optimizer.lr", "0.5", "--samples", "64", "--data.workers", "0")
    assert (config.optimizer.lr, config.seed, config.data.train, config.data.workers) == (0.5, 3, "x.tar", 0)
    assert (config.steps, config.samples) == (None, 64)  # a length given as a flag replaces the file's in any unit


def test_without_config_and_data_it_is_the_demo():
    config, launch = parse("--plan", "auto")
    assert config.data.train == "demo"
    assert config.name == "demo"
    assert (launch.ds_config, launch.plan) == ("zero2", "auto")


def test_resolved_config_reads_back(tmp_path):
    config, _ = parse(*BASE, "--optimizer.betas", "0.1", "0.2", "--resume", "some/where")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again, _ = parse("--config", str(tmp_path / "config.yaml"))
    assert again == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modle.name", "x"], ["--modle.name", "'model.name'"]),
        (["--lr", "1"], ["--lr", "'optimizer.lr'"]),
        (["--model.nam=x"], ["--model.nam", "'model.name'"]),
        (["--optimizer.lr", "-1"], ["--optimizer.lr", "greater than 0", "'-1'"]),
        (["--precision", "fp8"], ["--precision", "'bf16'", "'fp8'"]),
        (["--seed", "x"], ["--seed", "integer", "'x'"]),
        (["--name", "a/b"], ["--name", "'a/b'"]),
        (["--samples", "9"], ["steps=3", "samples=9"]),
        (["--model.config", "{"], ["--model.config", "JSON"]),
        (["--data.weights", "1", "2"], ["data.weights", "2 entries for 1"]),
        (["--schedule.warmup_steps", "1", "--schedule.warmup_samples", "1"], ["warmup_steps", "warmup_samples"]),
        (["stray"], ["'stray'"]),
        (["--loss.kind", "clip"], ["--loss.kind", "'one_block' or 'sigmoid'", "'clip'"]),
        (["--loss.kind", "sigmoid", "--loss.keep_logits", "true"], ["loss.keep_logits", "'sigmoid'"]),
        (["--config", "missing.yaml"], ["--config missing.yaml", "cannot be read"]),
        (["--plan", "yes"], ["--plan", "'auto'", "'yes'"]),
        (["--data.draft", "maybe"], ["--data.draft", "boolean", "'maybe'"]),
        (["--seed"], ["--seed", "expected one argument", "--help"]),
        (["--optimizer.betas", "0.9", "1.5"], ["--optimizer.betas", "less than 1", "'1.5'"]),
        (["--optimizer.betas", "-0.1", "0.9"], ["--optimizer.betas", "greater than or equal to 0"]),
        (["--optimizer.betas", "0.9"], ["--optimizer.betas: expected 2 values, found 1: 0.9"]),
        (["--optimizer.betas", "0.9", "0.95", "0.99"], ["--optimizer.betas: expected 2 values, found 3: 0.9 0.95"]),
        (["--optimizer.lr", "inf"], ["--optimizer.lr", "finite", "'inf'"]),
        (["--optimizer.weight_decay", "nan"], ["--optimizer.weight_decay", "finite"]),
        (["--optimizer.weight_decay", "20", "--optimizer.lr", "0.1"], ["optimizer.weight_decay 20", "less than 1"]),
        (["--optimizer.eps", "1e6"], ["--optimizer.eps", "less than or equal to 1"]),
        (["--schedule.lr_end", "inf"], ["--schedule.lr_end", "finite"]),
        (["--data.weights", "nan"], ["--data.weights", "finite"]),
    ],
)
def test_named_errors_of_flags(argv, words):
    message = refused(*BASE, *argv)
    assert all(word in message for word in words), message


def test_one_template_is_no_file(tmp_path):
    config, _ = parse(*BASE, "--evaluation.templates", "a photo of a {}.")
    assert config.evaluation.templates == ["a photo of a {}."]
    (tmp_path / "run.yaml").write_text('data: {train: x}\nsteps: 1\nevaluation: {templates: "{}"}')
    assert parse("--config", str(tmp_path / "run.yaml"))[0].evaluation.templates == ["{}"]
    config, _ = parse(*BASE, "--evaluation.templates", "prompts.txt")
    assert config.evaluation.templates == Path("prompts.txt")


def test_the_bounds_of_the_optimizer_can_be_reached():
    config, _ = parse(*BASE, "--optimizer.betas", "0", "0.999", "--optimizer.eps", "1", "--optimizer.weight_decay", "0")
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.0, 0.999), 1.0)


@pytest.mark.parametrize("kind", ["one_block", "sigmoid"])
def test_every_loss_builds_from_its_options(kind):
    from disco_ds.loss.contrastive import build_loss

    config, _ = parse(*BASE, "--loss.kind", kind)
    assert callable(build_loss(kind, **config.loss.options()))


def test_help_explains_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        train.main(["--help"], prog="launch/train.py")
    page = capsys.readouterr().out
    text = " ".join(page.split())
    assert page.startswith("usage: launch/train.py ")
    assert "deepspeed launch/train.py --config" in text
    for name, option in {**LAUNCH, **OPTIONS}.items():
        assert f"--{name} " in text
        assert " ".join(option["description"].split()) in text.replace("- ", "-"), name  # a line may end at a hyphen
    for name in ("imagenet", *TEMPLATES):  # sets of classes and prompts by name
        assert f'"{name}"' in text
    assert max(map(len, page.splitlines())) < 86  # the examples have the longest


def test_the_example_in_the_help_is_read():
    epilog = train._parser("disco-train").epilog.replace("\\\n", " ").splitlines()
    assert [line.split(" disco_ds.cli.train ")[0] for line in epilog[1:]] == [
        "deepspeed --module", "torchrun --nproc_per_node 8 -m",
    ]  # fmt: skip
    config, _ = parse(*epilog[2].replace("'", "").split(" disco_ds.cli.train ")[1].split())
    assert (config.data.train, config.global_batch) == ("/data/{00000..00099}.tar", 32768)


def test_a_mistake_is_one_line_and_status_2_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from disco_ds.cli.train import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as error: print(error.code, sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    for words, told in (
        (["--optimizer.lr", "0"], "error: --optimizer.lr: Input should be greater than 0; found '0'\n"),
        (["--loss.keep_logits", "x"], "error: --loss.keep_logits: Input should be a valid boolean, unable to interpret "
         "input or Input should be 'auto'; found 'x'\n"),
        (["--ds_config", "zero9"], "error: --ds_config zero9: neither a file nor one of those shipped: zero0, "),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "2 []\n", done.stderr
        assert done.stderr.startswith(told)
        assert done.stderr.count("\n") == 1


def test_the_other_ranks_of_a_machine_leave_the_message_to_the_first(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as leaving:
        train.main(["--lr", "1"])
    assert (leaving.value.code, capsys.readouterr().err) == (2, "")


def test_a_process_without_launcher_names_the_gpus_that_it_leaves(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    train._name_other_gpus("disco-train")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "one GPU of 4" in said
    assert "torchrun --nproc_per_node 4 -m disco_ds.cli.train" in said
    train._name_other_gpus("launch/train.py")
    assert "torchrun --nproc_per_node 4 launch/train.py" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    train._name_other_gpus("disco-train")
    assert capsys.readouterr().err == ""
