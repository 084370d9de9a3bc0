"""Options and run files: what is read, and what each mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from disco_ds.cli.train import parse as parse_words
from disco_ds.config.options import OPTIONS
from disco_ds.config.schema import RunConfig, total_steps
from disco_ds.errors import ConfigError
from disco_ds.evaluation.zeroshot import TEMPLATES

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "disco_ds" / "config" / "demo.yaml"
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
        "--logging.tensorboard", "--data.val", "null", "--ds_config", "x.json", "--local_rank=1",
    )  # fmt: skip
    assert config.data.train == ["a/{00,03}.tar", "b.tar"]  # a comma in a brace list does not split it
    assert config.data.weights == [1.0, 2.5]
    assert (config.samples, config.steps) == (1000, None)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.loss.keep_logits is False
    assert config.model.config == {"embed_dim": 3}
    assert config.logging.tensorboard is True
    assert config.data.val is None
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
        (["--config", "missing.yaml"], ["missing.yaml", "cannot be read"]),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {trian: x}\nsteps: 1", ["data.trian", "'data.train'"]),
        ("optimiser: {lr: 1}\ndata: {train: x}\nsteps: 1", ["optimiser", "'optimizer'"]),
        ("data: {train: x}\nsteps: 1\noptimizer: 3", ["optimizer", "3"]),
        ("steps: 1", ["bad.yaml: data.train: required", "--data.train VALUE"]),
        ("data: {train: x}\nsteps: 1\noptimizer: {betas: 0.9}", ["bad.yaml: optimizer.betas: expected 2 values"]),
        ("data: {train: x}", ["steps", "samples", "neither"]),
        ("- a\n- b", ["mapping", "list"]),
        ("a: [", ["not valid YAML"]),
    ],
)
def test_named_errors_of_files(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = refused("--config", str(path))
    assert "bad.yaml" in message or "neither" in message
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


def test_a_run_file_of_the_release_before_is_read(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {train: x}\nsteps: 1\nloss: {kind: one_block, overlap: auto}")
    assert parse("--config", str(tmp_path / "run.yaml"))[0].loss.kind == "one_block"


@pytest.mark.parametrize("kind", ["one_block", "sigmoid"])
def test_every_loss_builds_from_its_options(kind):
    from disco_ds.loss.contrastive import build_loss

    config, _ = parse(*BASE, "--loss.kind", kind)
    assert callable(build_loss(kind, **config.loss.options()))


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for name, option in OPTIONS.items():
        assert f"--{name} " in text
        assert option.get("description"), f"{name} has no docstring"
    for name in ("imagenet", *TEMPLATES):  # sets of classes and prompts by name
        assert f'"{name}"' in text


def test_total_steps_rounds_up():
    config = RunConfig(data={"train": "x"}, samples=1001)
    assert total_steps(config, 100) == 11
    assert total_steps(RunConfig(data={"train": "x"}, steps=7), 100) == 7
