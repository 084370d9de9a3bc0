"""--help of the commands that take a model, and their names."""

from __future__ import annotations

import importlib

import pytest

from tests.helpers.ranks import ROOT


@pytest.mark.parametrize(
    ("name", "defaults"),
    [("eval", ["(default: the run's; 256)", "(default: the run's; 4 at most)"]), ("export", ["(default: fp32)"])],
)
def test_help_fits_a_screen(capsys, name, defaults):
    with pytest.raises(SystemExit):
        importlib.import_module(f"disco_ds.cli.{name}").main(["--help"])
    shown = capsys.readouterr().out
    lines = shown.rstrip().splitlines()
    assert len(lines) <= 40
    assert lines[-1].startswith(f"disco-{name} ")
    assert all(default in " ".join(shown.split()) for default in defaults)
    assert f'disco-{name} = "disco_ds.cli.{name}:main"' in (ROOT / "pyproject.toml").read_text()
