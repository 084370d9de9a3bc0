"""What the ``disco-data`` commands share: which shards, read with which fields of a run's data section."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from disco_ds.cli.flags import add_option, given_options
from disco_ds.config.options import OPTIONS
from disco_ds.config.read import read_run
from disco_ds.config.schema import RunConfig
from disco_ds.data.sources import Source, expand
from disco_ds.data.tools.pool import cores
from disco_ds.errors import ConfigError

_GIVEN_ELSEWHERE = ("data.train", "data.val", "data.weights", "model.name")


def add_shards(parser: argparse.ArgumentParser, workers: bool = True) -> None:
    """The arguments that say what is read and how."""
    add = parser.add_argument
    shards = "tar file, folder, glob, brace list, .txt list, URL or pipe:, as data.train"
    add("shards", nargs="*", metavar="SHARDS", help=shards)
    add("--run", metavar="FILE", help="read as this run does (its config.yaml); without SHARDS, its data")
    model = "open_clip model: its tokenizer and image transform"
    add("--model", metavar="NAME", dest="model.name", default=argparse.SUPPRESS, help=model)
    if workers:
        add("--workers", type=positive, default=cores(), metavar="N", help="processes (default: all cores)")
    for name, option in OPTIONS.items():
        if name.startswith(("data.", "model.")) and name not in _GIVEN_ELSEWHERE:
            add_option(parser, name, option, help=argparse.SUPPRESS)


EPILOG = "Fields of a run's data section are flags here too: --data.caption_key json:text --data.max_aspect 4"


def positive(word: str) -> int:
    """An argument that is an integer of at least 1."""
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {word}")
    return value


@dataclass
class Reading:
    """Which shards, and the run by whose fields they are read."""

    run: RunConfig
    train: list[Source]
    """The shards named on the command line, else those of the run."""
    val: list[Source]
    """The held-out shards of the run; none if shards were named."""
    has_model: bool
    """A model was named, on the command line or by a run file."""


def reading(arguments: argparse.Namespace) -> Reading:
    """The shards and the run that the arguments name.

    Raises:
        ConfigError: a field is wrong, or neither shards nor a run are given.
        DataError: an entry names nothing that exists.
    """
    given = given_options(arguments)
    if not arguments.shards and arguments.run is None:
        raise ConfigError("name the shards to read, or a run with --run FILE")
    has_model = arguments.run is not None or "model.name" in given
    if arguments.shards:
        given |= {"data.train": arguments.shards, "data.weights": None, "data.val": None}
    if arguments.run is None:
        given["steps"] = 1
    run = read_run(_run_file(arguments.run), given, {"config": "--run", "model.name": "--model"})
    field = "SHARDS" if arguments.shards else "data.train"
    train = expand(run.data.train, field)
    val = expand(run.data.val, "data.val") if run.data.val is not None else []
    return Reading(run, train, val, has_model)


def _run_file(run: str | None) -> Path | None:
    """A run's folder stands for the config.yaml in it."""
    if run is None:
        return None
    return Path(run) / "config.yaml" if Path(run).is_dir() else Path(run)
