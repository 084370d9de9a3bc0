"""``disco-data index``: where each sample of a shard begins, so that a reader goes straight to it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from disco_ds.cli.data.options import positive
from disco_ds.cli.parser import Parser
from disco_ds.data.index import find_offsets, index_path, write_index
from disco_ds.data.shards import ShardFault, sample_offsets
from disco_ds.data.sources import expand, is_remote
from disco_ds.data.tools.pool import cores, each, progress
from disco_ds.errors import DataError


def add(commands: Any) -> None:
    """Add the command to ``disco-data``."""
    parser: Parser = commands.add_parser(
        "index",
        help="write where each sample of a local shard begins: resuming and slices then read nothing else",
        description="Write SHARD.index.json beside each local shard: the place of every sample. A resumed\n"
        "stream, and one with fewer shards than lanes, then goes straight to its samples.\n"
        "Without an index all works as before.",
        epilog="examples:\ndisco-data index '/data/{00000..00099}.tar'\n"
        "disco-data index /readonly/data --out indices      # then --data.index indices\n\n"
        "exit status: 0 every shard has its index, 1 some cannot have one, 2 the input is wrong",
    )
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="tar file, folder, glob, brace list or .txt list")
    parser.add_argument("--out", metavar="DIR", help="folder for the indices (default: beside the shards)")
    parser.add_argument("--workers", type=positive, default=cores(), metavar="N", help="processes (default: all cores)")
    parser.set_defaults(run_command=run)


@dataclass(frozen=True)
class Indexed:
    """What became of one shard."""

    shard: str
    samples: int
    fresh: bool = True
    """False: its index was there and fits."""
    error: str | None = None


def run(arguments: argparse.Namespace) -> int:
    """Write the indices; exit status 1 if a shard cannot have one."""
    shards = sorted({shard for source in expand(arguments.shards, "SHARDS") for shard in source.shards})
    _refuse(shards, arguments.out)
    counts: Counter[str] = Counter()
    jobs = partial(index_shard, folder=arguments.out)
    with progress(len(shards), "indexing") as bar:
        for done in each(jobs, shards, min(arguments.workers, len(shards)), bar):
            if done.error is not None:
                counts["failed"] += 1
                bar.write(f"no index: {done.error}", file=sys.stderr)
            else:
                counts["fresh" if done.fresh else "kept"] += 1
                counts["samples"] += done.samples
    where = arguments.out or "beside the shards"
    print(
        f"{counts['fresh'] + counts['kept']:,} indices of {counts['samples']:,} samples, {where}"
        + (f"; {counts['kept']:,} were there" if counts["kept"] else "")
        + (f"; {counts['failed']:,} shards have none" if counts["failed"] else "")
    )
    return 1 if counts["failed"] else 0


def _refuse(shards: list[str], folder: str | None) -> None:
    remote = [shard for shard in shards if is_remote(shard)]
    if remote:
        raise DataError(f"{remote[0]}: only local shards are indexed, since a URL or command is read from its start")
    if folder is None:
        return
    names: dict[str, str] = {}
    for shard in shards:
        name = Path(shard).name
        if name in names:
            raise DataError(f"--out {folder}: {names[name]} and {shard} have one name; index their folders apart")
        names[name] = shard
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {folder} cannot be made: {error.strerror}") from error


def index_shard(shard: str, folder: str | None) -> Indexed:
    """Write the index of one shard, unless it is there and fits.

    Raises:
        DataError: it cannot be written.
    """
    if index_path(shard, folder).exists() and (offsets := find_offsets(shard, folder)) is not None:
        return Indexed(shard, len(offsets), fresh=False)
    try:
        offsets = sample_offsets(shard)
    except ShardFault as fault:
        hint = " (a compressed tar cannot be indexed)" if shard.lower().endswith("gz") else ""
        return Indexed(shard, 0, error=f"{fault.reason}: {fault}{hint}")
    try:
        write_index(shard, offsets, folder)
    except OSError as error:
        raise DataError(f"{index_path(shard, folder)} cannot be written: {error.strerror}; give --out DIR") from error
    return Indexed(shard, len(offsets))
