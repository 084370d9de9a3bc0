"""Run files: what is read, what each mistake is answered with; ds_configs by name."""

from __future__ import annotations

import pytest

from disco_ds.config.read import DS_CONFIGS, find_ds_config, read_run
from disco_ds.engine.ds_schema import read_ds_config
from disco_ds.errors import ConfigError
from tests.helpers.ranks import ROOT


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
    with pytest.raises(ConfigError) as caught:
        read_run(path, {})
    message = str(caught.value)
    assert "bad.yaml" in message or "neither" in message
    assert all(word in message for word in words), message


def test_what_is_given_goes_under_the_names_that_the_command_has_for_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: x, workers: 2}\nsteps: 5")
    run = read_run(path, {"data.workers": "3", "samples": 64})
    assert (run.data.workers, run.steps, run.samples) == (3, None, 64)
    with pytest.raises(ConfigError, match=r"^--workers: Input should be a valid integer"):
        read_run(path, {"data.workers": "many"}, {"data.workers": "--workers"})
    with pytest.raises(ConfigError, match=r"^--run .*nowhere.yaml: cannot be read"):
        read_run(tmp_path / "nowhere.yaml", {}, {"config": "--run"})
    path.write_text("data: x.tar\nsteps: 5")
    with pytest.raises(ConfigError, match=r"run.yaml: data: expected a group of fields; found 'x.tar'"):
        read_run(path, {"data.workers": 3})


def test_a_run_file_of_the_release_before_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: x, index: null}\nsteps: 1\nloss: {kind: one_block, overlap: auto}")
    assert read_run(path, {}).loss.kind == "one_block"


def test_a_ds_config_is_a_path_or_the_name_of_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_ds_config("zero2") == DS_CONFIGS / "zero2.json"
    assert find_ds_config(DS_CONFIGS / "zero1.json") == DS_CONFIGS / "zero1.json"
    assert read_ds_config("zero3", deepspeed=False)["zero_optimization"]["stage"] == 3
    (tmp_path / "zero2").write_text("{}")
    assert find_ds_config("zero2").resolve() == tmp_path / "zero2"  # a file of the user's comes first
    for name in ("zero4", "ds_configs/zero3.json"):
        with pytest.raises(ConfigError, match=r"shipped: zero0, zero1, zero2, .*\. Did you mean 'zero3'") as caught:
            find_ds_config(name)
        assert name in str(caught.value)


def test_the_shipped_ds_configs_are_those_of_the_repository():
    shown = {path.name: path.read_bytes() for path in (ROOT / "ds_configs").iterdir()}
    assert shown == {path.name: path.read_bytes() for path in DS_CONFIGS.iterdir()}
    assert {"zero1.json", "zero2.json", "zero3.json", "zero2_offload.json", "zero3_offload.json"} <= shown.keys()
