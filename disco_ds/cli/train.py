"""``disco-train``: train a CLIP-like model; launch/train.py is the same, for launchers that want a file."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial

from disco_ds.cli.flags import add_option, given_options
from disco_ds.cli.parser import Parser, completing
from disco_ds.config.options import LAUNCH, OPTIONS, SECTIONS
from disco_ds.config.read import DEMO, checked, find_ds_config, read_run
from disco_ds.config.schema import LaunchConfig, RunConfig
from disco_ds.distributed import fail, prepare_environment, rank
from disco_ds.errors import CheckpointError, ConfigError, DataError, nearest


def main(argv: Sequence[str] | None = None, prog: str = "disco-train") -> int:
    """Read the options, then prepare and train; the user's mistakes end in one line and status 2."""
    try:
        config, launch = parse(sys.argv[1:] if argv is None else argv, prog)
        ds_config = find_ds_config(launch.ds_config)
    except ConfigError as error:
        fail(error)
    if "LOCAL_RANK" not in os.environ:
        _name_other_gpus(prog)
    prepare_environment()
    from disco_ds.run.quiet import quiet_libraries

    quiet_libraries()
    from disco_ds.engine.deepspeed_engine import start_distributed
    from disco_ds.run.prepare import prepare, start_logging
    from disco_ds.run.train import train
    from disco_ds.run.watchdog import Watchdog

    device = start_distributed(config.timeout_minutes)
    start_logging(rank())
    watchdog, run = Watchdog(60 * config.timeout_minutes), None
    try:
        run = prepare(config, ds_config, device, watchdog, plan=launch.plan is not None)
        train(run)
    except Exception as error:
        if run is None and isinstance(error, (ConfigError, DataError, CheckpointError)):
            watchdog.tell(error)
            watchdog.close()
            fail(error)
        # this rank alone may have failed: it says who and where it is, then what
        where = "while it started" if run is None else f"after step {run.state.step}"
        print(f"[rank {rank()}] failed {where}: {error}", file=sys.stderr, flush=True)
        others = watchdog.blame(error)
        if others:
            print(f"[rank {rank()}] {others}", file=sys.stderr, flush=True)
        raise
    return 0


def parse(argv: Sequence[str], prog: str = "disco-train") -> tuple[RunConfig, LaunchConfig]:
    """The run that the command line and the file that it names describe, and what it says of the launch.

    Raises:
        ConfigError: anything wrong with flags or file; the message names each faulty field.
        SystemExit: ``--help`` was asked for.
    """
    parser = _parser(prog)
    arguments, unknown = parser.parse_known_args(list(argv))
    if unknown and not unknown[0].startswith("-"):
        raise ConfigError(f"{unknown[0]!r}: an argument that no flag takes; fields are given as --field value")
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = nearest(flag.lstrip("-"), [*OPTIONS, *LAUNCH])
        raise ConfigError(f"{flag}: there is no such flag.{hint} `{prog} --help` lists all of them.")
    said = {name: value for name, value in vars(arguments).items() if name in LAUNCH}
    launch = checked(LaunchConfig, said, {name: f"--{name}" for name in said}, "command line")
    given = given_options(arguments)
    demo = DEMO if "data.train" not in given else None
    return read_run(launch.config or demo, given, {"config": "--config"}), launch


def _parser(prog: str = "disco-train") -> Parser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--OPTION VALUE ...]",
        description="Train a CLIP-like model with the exact distributed contrastive loss on DeepSpeed.\n"
        "Without options it trains the demo. Defaults are in parentheses.",
        epilog=f"on all GPUs of a machine:\n{_under('deepspeed', prog)} --config run.yaml --ds_config zero3\n"
        f"{_under('torchrun --nproc_per_node 8', prog)} --model.name ViT-B-32 \\\n"
        "    --data.train '/data/{00000..00099}.tar' --global_batch 32768 --samples 50000000",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=6),
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # added by the deepspeed launcher
    launch = parser.add_argument_group("command line")
    for name, option in LAUNCH.items():
        add_option(launch, name, option)
    groups = {
        name: parser.add_argument_group(name, textwrap.fill(section["description"], 76))
        for name, section in SECTIONS.items()
    }
    for name, option in OPTIONS.items():
        add_option(groups[name.rpartition(".")[0] or "run"], name, option)
    return completing(parser)


def _under(launcher: str, prog: str) -> str:
    """The command that starts a rank for each GPU."""
    if prog.endswith(".py"):
        return f"{launcher} {prog}"
    return f"{launcher} {'--module' if launcher == 'deepspeed' else '-m'} disco_ds.cli.train"


def _name_other_gpus(prog: str) -> None:
    """A process that no launcher started uses one GPU: say how the others are used too."""
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        start = _under(f"torchrun --nproc_per_node {count}", prog)
        print(f"{prog}: one GPU of {count} is used. All of them: {start} and the same options", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(prog="python -m disco_ds.cli.train"))
