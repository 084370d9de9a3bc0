"""Options as the schema has them: in words, on their page, and in a wheel."""

from __future__ import annotations

import json
import re

from disco_ds.config.options import OPTIONS, SECTIONS, default_words, page, type_words
from disco_ds.config.schema import RunConfig
from tests.helpers.ranks import ROOT


def test_every_field_is_an_option():
    run = RunConfig(data={"train": "x"}, steps=1).model_dump()
    dotted = {f"{name}.{leaf}" for name in SECTIONS if name != "run" for leaf in run[name]}
    assert OPTIONS.keys() == dotted | (run.keys() - SECTIONS.keys())
    assert all(section["description"] for section in SECTIONS.values())


def test_types_and_defaults_in_words():
    words = {name: (type_words(OPTIONS[name]), default_words(OPTIONS[name])) for name in OPTIONS}
    assert words["seed"] == ("INT", "0")
    assert words["data.train"] == ("TEXT", "required")
    assert words["data.val"] == ("TEXT", "null")
    assert words["data.draft"] == ("true|false", "false")
    assert words["optimizer.betas"] == ("FLOAT", "0.9 0.98")
    assert words["model.config"] == ("JSON", "null")
    assert words["loss.keep_logits"] == ("true|false|auto", "auto")
    assert words["resume"] == ("auto|never|PATH", "auto")


def test_the_page_of_options_is_the_schemas():
    found = (ROOT / "docs" / "options.md").read_text()
    assert found == page(), "run: python -m disco_ds.config.options > docs/options.md"
    assert found.count("\n| `") == len(OPTIONS) + 3


def test_a_wheel_has_every_file_and_command():
    project, package = (ROOT / "pyproject.toml").read_text(), ROOT / "disco_ds"
    patterns = json.loads(re.search(r"package-data\]\ndisco_ds = (.*)", project)[1])
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    packed |= {path for path in package.rglob("*.py") if (path.parent / "__init__.py").exists()}
    assert {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts} == packed
    for name, module in re.findall(r'^(disco-\w+) = "([\w.]+):main"$', project, re.MULTILINE):
        assert "\ndef main(" in ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(), name
    assert 'disco-train = "disco_ds.cli.train:main"' in project
