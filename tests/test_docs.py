"""Every command in the documentation: its program, options and files are there; links lead somewhere.

The first recipe of the cookbook is run as it stands, with a tiny model in the place of its own, and on its data and run
the commands of all pages that need no GPU, hub or data of the user's.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from disco_ds.cli import plan as plan_command
from disco_ds.cli.train import parse
from disco_ds.config.read import find_ds_config
from tests.helpers.ranks import ROOT, user_environment
from tests.helpers.shards import image_bytes
from tests.helpers.tiny import TINY

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


def module_of(command: str) -> ModuleType:
    """The module of a command, by its name without "disco-"."""
    return importlib.import_module(f"disco_ds.cli.{'data.main' if command == 'data' else command}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that commands name."""
    for name in ("plan", "runs/b32-32k"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("run.yaml", "plan/run.yaml", "runs/b32-32k/config.yaml"):
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
    starts = [word for word in words if word in ("launch/train.py", "disco_ds.cli.train", "disco-train")]
    if starts:
        rest = words[words.index(starts[0]) + 1 :]
        if "--help" not in rest:
            config, launch = parse(rest)
            assert config.data.train
            assert find_ds_config(launch.ds_config).is_file()
    elif program == "torchrun" and "disco_ds.cli.eval" in words:
        check(["disco-eval", *words[words.index("disco_ds.cli.eval") + 1 :]])
    elif program == "disco-plan" and words[1] != "trace":
        assert plan_command.main(words[1:]) in (0, 1)
    elif program.startswith("disco-"):
        name = program.removeprefix("disco-")
        module = module_of("trace" if words[1] == "trace" else name)
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
    elif program in ("git", "cd"):
        assert words in (["git", "clone", "https://github.com/disco-ds/disco_ds"], ["cd", "disco_ds"])
    elif program == "sbatch":
        assert (ROOT / "launch" / "slurm.sh").stat().st_mode & 0o100
    else:
        raise AssertionError(f"a command of no kind that is known here: {words}")


@pytest.mark.parametrize("command", ["ckpt", "data", "eval", "export", "plan", "report"])
def test_help_fits_a_screen_and_has_an_example(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = module_of(command)._parser().format_help()
    assert len(shown.splitlines()) <= 46, shown
    usage, _, rest = shown.partition("\n\n")
    assert f"disco-{command} " in rest, shown
    assert usage.startswith(f"usage: disco-{command}")


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
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env=user_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expected, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def in_process(folder: Path, command: str) -> None:
    """One of the project's commands, without the seconds that a new Python takes to import torch."""
    program, *words = shlex.split(command)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert module_of(program.removeprefix("disco-")).main(words) == 0, command
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The first recipe, carried out with a tiny model and a short run; its run under all names that pages use."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "launch").symlink_to(ROOT / "launch")
    page = (ROOT / "docs" / "cookbook.md").read_text()
    steps = re.search(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert steps is not None
    (folder / "photos").mkdir()
    for number in range(40):
        (folder / "photos" / f"{number:03d}.png").write_bytes(image_bytes(number))
        (folder / "photos" / f"{number:03d}.txt").write_text(f"picture number {number}")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    for command in steps.group(1).replace("\\\n", " ").splitlines():
        command = command.replace("ViT-S-32-alt", "tiny.json").replace("--global_batch 512", "--global_batch 8")
        command = command.replace("--samples 2000000", "--samples 32 --data.workers 0")
        in_process(folder, command) if command.startswith("disco-") else run(folder, command)
    for name in ("clip", "clip-lr", "demo"):
        shutil.copytree(folder / "runs" / "photos", folder / "runs" / name)
    return folder


@pytest.mark.ranks
def test_the_first_recipe(recipe):
    assert (recipe / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (recipe / "runs" / "photos" / "report.html").read_text()
    assert (recipe / "photos-clip" / "open_clip_config.json").is_file()


ELSEWHERE = ("/data/", "imagenet", "laion", "run.yaml")  # what only a user, the hub or the demo's data has
OWN = [
    (command, page)
    for command, page in COMMANDS
    if page != "cookbook.md" and not any(word in command for word in ELSEWHERE)
    if re.match(r"disco-(?!plan)|python launch|torchrun .*disco_ds", command)
]


@pytest.mark.parametrize(("command", "page"), OWN, ids=[f"{page}: {command[:60]}" for command, page in OWN])
@pytest.mark.ranks
def test_a_command_runs(recipe, command, page):
    """The commands of the other pages that need no GPU, on the recipe's data and run."""
    (newest,) = (path.name for path in (recipe / "runs" / "clip" / "checkpoints").iterdir() if path.is_dir())
    command = re.sub(r"step-\d+", newest, command).replace("ViT-B-32", "tiny.json")
    command = command.replace("make photos/ shards/", "make photos/ more/")
    if command.startswith("disco-"):
        in_process(recipe, command)
        return
    train = " --model.name tiny.json --data.train 'shards/train-*.tar' --data.val 'shards/val-*.tar'"
    train += " --data.workers 0 --global_batch 8"
    command = command.replace("--nproc_per_node 8", "--nproc_per_node 2").replace("--steps 20", "--steps 2")
    run(recipe, command + (train if "launch/train.py" in command else ""))
