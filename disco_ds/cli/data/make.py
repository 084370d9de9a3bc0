"""``disco-data make``: shards from a folder of images or a table."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from disco_ds.cli.data.options import positive
from disco_ds.cli.parser import Parser
from disco_ds.data.tools.listing import TABLES, Options, list_entries
from disco_ds.data.tools.make import MISSING, Made, make_shard, open_folder, record_finished, tasks, write_missing
from disco_ds.data.tools.pool import cores, in_processes
from disco_ds.data.tools.write import writing
from disco_ds.errors import DataError
from disco_ds.files import replace_text

SHOWN = 10
"""Missing samples that are named on the terminal."""


def add(commands: Any) -> None:
    """Add the command to ``disco-data``."""
    parser: Parser = commands.add_parser(
        "make",
        help="make shards from a folder of images or a table",
        description="Write webdataset shards train-00000.tar, … with the bytes of SOURCE's images as they are.\n"
        "SOURCE is a folder of images (a .txt beside each, or a folder for each class), or a .csv,\n"
        ".tsv or .parquet file with a column of paths (or encoded images) and one of captions.\n"
        "A killed make goes on where it stopped when it is called again.",
        epilog="examples:\ndisco-data make photos/ shards/ --val-fraction 0.01\n"
        "disco-data make imagenet/train shards/ --captions folder --template 'a photo of a {}.'\n"
        "disco-data make pairs.csv shards/ --image-column file --caption-column alt --image-root images/\n\n"
        f"exit status: 0 all written, 1 something is missing (OUT/{MISSING} lists it), 2 the input is wrong",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help=f"folder of images, or a file ending in {' '.join(TABLES)}")
    add("out", metavar="OUT", type=Path, help="folder for the shards: empty, or one that make began")
    captions = "folder: .txt beside each image (default), or its folder is its class"
    add("--captions", choices=["beside", "folder"], default="beside", help=captions)
    template = "caption of a class, with {} for its name (default: %(default)s)"
    add("--template", default=Options.template, metavar="TEXT", help=template)
    add("--image-column", metavar="NAME", help="table: paths or encoded images (default: image, path, filename, …)")
    add("--caption-column", metavar="NAME", help="table: captions (default: caption, text, title, …)")
    add("--image-root", metavar="DIR", help="table: folder that its paths start from (default: the table's)")
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--samples-per-shard", **number, default=Options.samples_per_shard, help="(default: %(default)s)")
    held_out = "share held out in val-….tar, by a hash of the image's name"
    add("--val-fraction", type=_fraction, default=0.0, metavar="F", help=held_out)
    add("--workers", **number, default=cores(), help="processes (default: all cores)")
    parser.set_defaults(run_command=run)


def _fraction(word: str) -> float:
    value = float(word)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 0 and less than 1, found {word}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Make the shards; exit status 1 if something was missing."""
    names = Options.__dataclass_fields__
    options = Options(**{name: getattr(arguments, name) for name in names})
    source, out = arguments.source.expanduser(), arguments.out.expanduser()
    if out.resolve().is_relative_to(source.resolve()):
        raise DataError(f"OUT {out} lies in SOURCE {source}, whose files it would change; give a folder outside of it")
    found = list_entries(source, options)
    finished = open_folder(out, found, options, source)
    total = -(-found.total // options.samples_per_shard) if found.total is not None else None
    jobs = tasks(found, options, out, set(finished))
    made_now = in_processes(make_shard, jobs, min(arguments.workers, total or arguments.workers))
    for made in tqdm(made_now, "writing", total, leave=False, unit="shard", disable=None, initial=len(finished)):
        record_finished(out, made)
        finished[made.shard] = made
    if found.classes:
        with writing(out / "classes.txt"):
            replace_text(out / "classes.txt", "".join(f"{name}\n" for name in found.classes))
    missing = write_missing(out, finished)
    _print_summary(out, finished, missing, found.classes)
    return 1 if missing else 0


def _print_summary(out: Path, finished: dict[str, Made], missing: list[tuple[str, str]], classes: list[str]) -> None:
    for split in ("train", "val"):
        made = [item for name, item in sorted(finished.items()) if name.startswith(split)]
        if made:
            samples, size = sum(item.samples for item in made), sum(item.bytes for item in made) / 1e9
            range_ = f"{{00000..{len(made) - 1:05d}}}" if len(made) > 1 else "00000"
            print(f"{split:8} {out}/{split}-{range_}.tar: {samples:,} samples, {size:,.2f} GB")
    if classes:
        print(f"classes  {out}/classes.txt: {len(classes):,}, for evaluation.classes")
    others = {end for item in finished.values() for end in item.extensions} - {"jpg", "jpeg", "png", "webp"}
    if others:
        print(f'keys     train with --data.image_key "jpg;jpeg;png;webp;{";".join(sorted(others))}"')
    if missing:
        kinds = Counter(re.sub(r"[:(].*", "", reason).strip() for _, reason in missing)
        counts = ", ".join(f"{kind} ({count:,})" for kind, count in kinds.most_common())
        print(f"missing  {len(missing):,}, all in {out / MISSING}: {counts}", file=sys.stderr)
        for name, reason in missing[:SHOWN]:
            print(f"  {name}: {reason}", file=sys.stderr)
