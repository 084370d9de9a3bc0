"""``disco-data``: work on data outside of a training run."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from disco_ds.cli.data import check as data_check
from disco_ds.cli.data import make as data_make
from disco_ds.cli.data import show as data_show
from disco_ds.cli.parser import Parser, command, completing


@command("disco-data")
def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status (2: the user has to change something, the message says what)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("disco_ds").setLevel(logging.INFO)
    arguments = completing(_parser()).parse_args(argv)
    return arguments.run_command(arguments)


def _parser() -> Parser:
    parser = Parser(
        prog="disco-data",
        description="Work on training data outside of a run.",
        epilog="examples:\ndisco-data make photos/ shards/ && disco-data check shards/ --model ViT-B-32",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (data_make, data_check, data_show):
        module.add(commands)
    demo = commands.add_parser(
        "demo",
        help="build the embedded default (emoji and their names) and say where it lies",
        description="Build the embedded default if it is not there yet, and print where it lies.",
        epilog="examples:\ndisco-data demo --cache /data/cache",
    )
    cache = "folder to build in (default: $DISCO_DS_CACHE, $XDG_CACHE_HOME/disco_ds, ~/.cache/disco_ds)"
    demo.add_argument("--cache", type=Path, help=cache)
    demo.set_defaults(run_command=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from disco_ds.data.demo import demo_shards

    shards = demo_shards(arguments.cache)
    folder = Path(shards.train[0]).parent
    print(f"{folder}: {len(shards.train)} shards to train on, {len(shards.val)} held out")
    print(f"train    {folder}/train-{{00000..{len(shards.train) - 1:05d}}}.tar")
    print(f"val      {folder}/val-{{00000..{len(shards.val) - 1:05d}}}.tar")
    print(f"classes  {', '.join(shards.classes)}")
    print(f"licence  CC BY-SA 4.0, see {folder}/ATTRIBUTION.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
