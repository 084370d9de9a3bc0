"""``disco-data check``: every sample as training would read it, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from disco_ds.cli.data.options import EPILOG, add_shards, reading
from disco_ds.cli.parser import Parser
from disco_ds.data.tools.check import Report, check_shard, list_jobs
from disco_ds.data.tools.pool import in_processes
from disco_ds.data.tools.preparation import prepare


def add(commands: Any) -> None:
    """Add the command to ``disco-data``."""
    parser: Parser = commands.add_parser(
        "check",
        help="read shards as training would and list every fault; --fix writes clean ones",
        description="Read every sample as training would: the same reader, the same decoding. Gives counts,\n"
        "sizes, captions and every fault with examples; --model adds tokens and tries its transform.",
        epilog="examples:\ndisco-data check '/data/{00000..00099}.tar' --model ViT-B-32\n"
        "disco-data check raw/ --data.min_image_size 64 --fix clean/\n\n"
        f"{EPILOG}\nexit status: 0 no fault, 1 faults or no sample at all, 2 the input is wrong",
    )
    add_shards(parser)
    fix = "write the good samples, unchanged, to shards in this folder"
    parser.add_argument("--fix", metavar="OUT", type=Path, help=fix)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    """Check; exit status 1 if anything was wrong with the data."""
    read = reading(arguments)
    model = prepare(read.run) if read.has_model else None
    jobs = list_jobs(read.train + read.val, read.run.data, model, arguments.workers, arguments.fix)
    report = Report()
    found = in_processes(check_shard, jobs, min(arguments.workers, len(jobs)))
    with tqdm(found, "reading", len(jobs), leave=False, unit="shard", disable=None) as bar:
        for part in bar:
            report.add(part)
            bar.set_postfix_str(f"{report.samples:,} samples, {report.faults.total():,} faults")
    context = model.context if model else None
    if arguments.json:
        print(json.dumps(as_json(report, context), ensure_ascii=False))
    else:
        print("\n".join(table(report, context)))
        if arguments.fix is not None:
            print(f"written  {report.written:,} shards with {report.good:,} samples to {arguments.fix}")
    return 1 if report.faults or not report.good else 0


def _spread(values: Sequence[int]) -> list[int]:
    """Least, median and greatest."""
    numbers = np.asarray(values)
    return [int(numbers.min()), int(np.median(numbers)), int(numbers.max())] if len(numbers) else []


def as_json(report: Report, context: int | None) -> dict[str, Any]:
    """Everything that was found, for scripts. Lengths are [least, median, greatest]; images are in pixels."""
    found: dict[str, Any] = {
        "shards": report.shards,
        "samples": report.samples,
        "good": report.good,
        "image_bytes": report.image_bytes,
        "width": _spread(report.widths),
        "height": _spread(report.heights),
        "shorter_side": _spread(np.minimum(report.widths, report.heights)),  # type: ignore[arg-type]
        "modes": dict(report.modes.most_common()),
        "captions": len(report.characters),
        "characters": _spread(report.characters),
        "faults": dict(report.faults.most_common()),
        "examples": report.examples,
        "written": report.written,
    }
    if context is not None:
        cut = sum(count > context for count in report.tokens)
        found |= {"tokens": _spread(report.tokens), "context": context, "truncated": cut}
    return found


def table(report: Report, context: int | None) -> list[str]:
    """The lines of the answer."""
    found = as_json(report, context)
    bad = report.samples - report.good
    share = f" ({bad / report.samples:.2%})" if bad else ""
    lines = [
        f"shards   {report.shards:,}",
        f"samples  {report.samples:,}: {report.good:,} good, {bad:,} dropped{share}",
    ]
    if not report.good:
        lines.append("         nothing here can be trained on")
    else:
        sides = [f"{name.replace('_', ' ')} {_three(found[name])}" for name in ("width", "height", "shorter_side")]
        modes = [f"{mode} {count:,}" for mode, count in report.modes.most_common(8)]
        lines += [
            f"images   pixels, least / median / greatest: {', '.join(sides)}",
            f"         {', '.join(modes)}; {report.image_bytes / report.good / 1000:,.1f} kB each on average",
            f"captions {found['captions']:,}, characters {_three(found['characters'])}",
        ]
        if context is not None:
            cut = f"{found['truncated']:,} ({found['truncated'] / max(1, found['captions']):.1%})"
            lines.append(f"         tokens {_three(found['tokens'])}, the context is {context}: {cut} are cut")
    lines.append(f"faults   {report.faults.total():,}" if report.faults else "faults   none")
    width = len(f"{max(report.faults.values(), default=0):,}")
    for kind, count in report.faults.most_common():
        lines.append(f"  {count:>{width},}  {kind}")
        lines += [f"  {'':{width}}    {shown}" for shown in report.examples[kind]]
    return lines


def _three(values: Sequence[int]) -> str:
    return " / ".join(f"{value:,}" for value in values)
