"""Every command in the documentation: its program, options and files are there; links lead somewhere.

The first recipe of the cookbook is run as it stands, with a tiny model in the place of its own.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disco_ds.cli import options
from disco_ds.cli import plan as plan_command
from tests.ranks import ROOT, rank_environment
from tests.shards import image_bytes
from tests.tiny import TINY

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent


def commands(page: Path) -> list[str]:
    """The commands in a page's shell blocks and indented blocks, continued lines joined, comments off."""
    text = page.read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}(?:python|make) .*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    lines = "\n".join([*blocks, *indented]).replace("\\\n", " ").splitlines()
    bare = [re.sub(r"\s{2,}#.*$", "", line).strip() for line in lines]
    return [part.strip() for line in bare if line and not line.startswith("#") for part in line.split(" && ")]


COMMANDS = sorted({(command, page.name) for page in PAGES for command in commands(page)})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that commands name."""
    (tmp_path / "plan").mkdir()
    for name in ("run.yaml", "plan/run.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump({"data": {"train": "x.tar"}, "steps": 1}))
    (tmp_path / "plan" / "ds_config.json").write_text("{}")
    for name in ("ds_configs", "launch", "disco_ds", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "page"), COMMANDS, ids=[f"{page}: {command[:60]}" for command, page in COMMANDS])
def test_a_command_is_one(folder, command, page):
    check(shlex.split(re.sub(r"^(\w+=\S+ )+", "", command), comments=True))


def check(words: list[str]) -> None:
    """The checks for one command; an unknown program fails, so that nothing goes unseen."""
    program = words[0]
    if "launch/train.py" in words:
        rest = words[words.index("launch/train.py") + 1 :]
        if "--help" not in rest:
            config, launch = options.parse(rest, prog="launch/train.py", demo=ROOT / "disco_ds" / "demo.yaml")
            assert config.data.train
            assert launch.ds_config is None or Path(launch.ds_config).is_file(), launch.ds_config
    elif program == "torchrun" and "disco_ds.cli.eval" in words:
        check(["disco-eval", *words[words.index("disco_ds.cli.eval") + 1 :]])
    elif program == "disco-plan" and words[1] != "trace":
        assert plan_command.main(words[1:]) in (0, 1)
    elif program.startswith("disco-"):
        name = program.removeprefix("disco-")
        module = importlib.import_module("disco_ds.cli.plan_trace" if words[1] == "trace" else f"disco_ds.cli.{name}")
        module._parser().parse_args(words[2:] if words[1] == "trace" else words[1:])
    elif program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] in (["python", "-m"], ["python3", "-m"]):
        assert importlib.util.find_spec(words[2]), words[2]
        assert all((ROOT / w).exists() for w in words if w.startswith("tests/")), words
    elif program == "python":
        source = (ROOT / words[1]).read_text()
        assert all(f'"{flag}"' in source for flag in words if flag.startswith("--")), words
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        extras = re.search(r"\[([\w,]+)\]", " ".join(words))
        assert extras is None or all(re.search(rf"^{name} = \[", project, re.M) for name in extras.group(1).split(","))
    elif program == "sbatch":
        assert (ROOT / "launch" / "slurm.sh").stat().st_mode & 0o100
    else:
        raise AssertionError(f"a command of no kind that is known here: {words}")


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_has_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    listed = (ROOT / "mkdocs.yml").read_text()
    assert all(f" {page}" in listed for page in pages), [page for page in pages if f" {page}" not in listed]


def run(folder: Path, command: str, expected: int = 0) -> str:
    words = shlex.split(command)
    program = [sys.executable] if words[0] == "python" else [str(BIN / words[0])]
    environment = {k: v for k, v in rank_environment(0, 1).items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expected, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_recipe(folder):
    """The cookbook's commands in their order, with a tiny model and a short run."""
    page = (ROOT / "docs" / "cookbook.md").read_text()
    recipe = re.search(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert recipe is not None
    (folder / "photos").mkdir()
    for number in range(40):
        (folder / "photos" / f"{number:03d}.png").write_bytes(image_bytes(number))
        (folder / "photos" / f"{number:03d}.txt").write_text(f"picture number {number}")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    for command in recipe.group(1).replace("\\\n", " ").splitlines():
        command = command.replace("ViT-S-32-alt", "tiny.json").replace("--global_batch 512", "--global_batch 8")
        run(folder, command.replace("--samples 2000000", "--samples 32 --data.workers 0"))
    assert (folder / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (folder / "runs" / "photos" / "report.html").read_text()
    assert (folder / "photos-clip" / "open_clip_config.json").is_file()
