"""``disco-ckpt``: look at a run's checkpoints, verify them, and delete old ones. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disco_ds.checkpoint import folder as folders
from disco_ds.cli.parser import Parser, command, completing
from disco_ds.errors import CheckpointError, ConfigError

GIB = 2**30


@command("disco-ckpt")
def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; exit status 0: all well, 1: a checkpoint does not verify, 2: the input is wrong."""
    arguments = completing(_parser()).parse_args(argv)
    return arguments.run_command(arguments)


def _parser() -> Parser:
    parser = Parser(
        prog="disco-ckpt",
        description="The checkpoints of a run: list, verify, prune.",
        epilog="examples:\ndisco-ckpt list runs/clip\ndisco-ckpt prune runs/clip --keep 2 --dry-run",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _command(
        commands,
        _list,
        "list",
        help="a line for each checkpoint, newest first",
        description="A line for each checkpoint, newest first: step, samples, ranks, ZeRO stage, size, time. Files\n"
        "are not read; what is missing or has another size shows.",
        epilog="disco-ckpt list runs/clip --json",
    )
    _command(
        commands,
        _verify,
        "verify",
        help="read every file and compare its SHA-256",
        description="Read every file of the checkpoints and compare size and SHA-256 with the manifest, as a resuming\n"
        "run does. Exit status 1 if one of them is damaged.",
        epilog="disco-ckpt verify runs/clip && echo all good",
    )
    prune = _command(
        commands,
        _prune,
        "prune",
        help="delete all but the newest ones, and what killed saves have left",
        description="Delete checkpoints but the newest --keep, and every N-th step with --keep-every; damaged ones,\n"
        "and what killed saves have left, go too. Not while the run is saving. One that verifies always stays.",
        epilog="disco-ckpt prune runs/clip --keep 1 --keep-every 10000 --dry-run",
    )
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="newest checkpoints to keep, at least 1")
    prune.add_argument("--keep-every", type=int, metavar="N", help="also keep those whose step is a multiple of N")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    return parser


def _command(commands: Any, run: Any, name: str, **texts: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, **texts)
    parser.add_argument(
        "path", type=Path, metavar="RUN", help="a run's folder, its checkpoints folder, or a checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    parser.set_defaults(run_command=run)
    return parser


def _row(path: Path) -> dict[str, Any]:
    """What the manifest says, and the faults that show without reading the files."""
    try:
        manifest = folders.read_manifest(path)
    except CheckpointError as error:
        return {"path": str(path), "step": folders.step_of(path), "faults": [str(error)]}
    sizes = {name: saved["bytes"] for name, saved in manifest["files"].items()}
    there = {name: (path / name).stat().st_size if (path / name).is_file() else None for name in sizes}
    return {
        "path": str(path),
        "step": manifest["state"]["step"],
        "samples_seen": manifest["state"]["samples_seen"],
        "world_size": manifest["world_size"],
        "zero_stage": manifest["zero_stage"],
        "bytes": sum(sizes.values()),
        "saved_at": manifest["saved_at"],
        "model": manifest["model"]["name"],
        "optimizer": manifest["optimizer"],
        "faults": [
            f"{n}: {there[n] or 'no'} bytes, {size} were saved" for n, size in sizes.items() if there[n] != size
        ],
    }


def _list(arguments: argparse.Namespace) -> int:
    rows = [_row(path) for path in folders.find_some(arguments.path)]
    if arguments.json:
        print(json.dumps({"version": 1, "checkpoints": rows}, indent=1))
        return 0
    print(f"{'checkpoint':<16}{'samples':>15}{'ranks':>7}{'ZeRO':>6}{'GiB':>9}  saved")
    for row in rows:
        name = Path(row["path"]).name
        if "samples_seen" not in row:
            print(f"{name:<16}  {row['faults'][0]}")
            continue
        print(
            f"{name:<16}{row['samples_seen']:>15,}{row['world_size']:>7}{row['zero_stage']:>6}"
            f"{row['bytes'] / GIB:>9.2f}  {row['saved_at']}" + ("".join(f"\n  {fault}" for fault in row["faults"]))
        )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    found = folders.find_some(arguments.path)
    with ThreadPoolExecutor(4) as pool:  # hashing and reading leave the interpreter free
        faults = dict(zip(found, pool.map(folders.faults, found), strict=True))
    if arguments.json:
        print(json.dumps({"version": 1, "faults": {str(path): wrong for path, wrong in faults.items()}}, indent=1))
    else:
        for path, wrong in faults.items():
            print(
                f"{path.name}: " + ("verified" if not wrong else "DAMAGED" + "".join(f"\n  {line}" for line in wrong))
            )
    return 1 if any(faults.values()) else 0


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.keep < 1:
        raise ConfigError(f"--keep {arguments.keep}: at least 1 stays")
    if arguments.keep_every is not None and arguments.keep_every < 1:
        raise ConfigError(f"--keep-every {arguments.keep_every}: expected a number of steps, at least 1")
    found = folders.find_some(arguments.path)
    if found == [arguments.path]:
        raise ConfigError(f"{arguments.path} is one checkpoint: give the run's folder, or delete it yourself")
    whole = [path for path in found if not folders.faults(path)]
    if not whole:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints verifies: nothing is deleted; see disco-ckpt verify"
        )
    old = folders.expired(whole, keep=arguments.keep, keep_every_steps=arguments.keep_every)
    damaged = [path for path in found if path not in whole]
    left = folders.find_unfinished(found[0].parent)
    for path in [*old, *damaged, *left]:
        why = "damaged" if path in damaged else "never finished" if path in left else "old"
        if not arguments.json:
            print(f"{'would delete' if arguments.dry_run else 'deleting'} {path} ({why})")
        if not arguments.dry_run:
            folders.remove(path)
    kept = [path for path in whole if path not in old]
    if arguments.json:
        deleted = [str(path) for path in [*old, *damaged, *left]]
        print(json.dumps({"version": 1, "deleted": deleted, "kept": [str(path) for path in kept]}, indent=1))
    else:
        print(f"{len(kept)} kept: {', '.join(path.name for path in kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
