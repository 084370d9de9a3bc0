"""``disco-report``: one HTML file, and PNGs, from the folders of one or more runs. Needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from disco_ds.cli.parser import Parser, completing, to_a_pipe
from disco_ds.errors import ConfigError

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"


@to_a_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; exit status 0: written, 2: the input is wrong."""
    try:
        _report(completing(_parser()).parse_args(argv))
    except ConfigError as error:
        print(f"disco-report: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="disco-report",
        description="What happened in a run, as one HTML file that needs nothing else: curves, speed, memory,\n"
        "data faults, retrieval and held-out images, resumes, settings. Several runs are compared: curves over each\n"
        "other, final metrics, and the settings that differ. A run may still be training, or have been killed.",
        epilog="examples:\ndisco-report runs/clip\ndisco-report runs/clip runs/clip-lr --out lr.html --png pictures",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, runs/NAME")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the HTML file (default: {REPORT_FILE} in the run's folder; of several runs {COMPARISON_FILE} here)",
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write every chart as a PNG into this folder")
    return parser


def _report(arguments: argparse.Namespace) -> None:
    from disco_ds.report.run_folder import read_runs

    runs = read_runs(arguments.runs)
    out = arguments.out or (arguments.runs[0] / REPORT_FILE if len(runs) == 1 else Path(COMPARISON_FILE))
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: the report is HTML; give a name that ends in .html")
    try:
        from disco_ds.report.page import pictures, render

        page, charts = render(runs)
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; install it with: pip install 'disco-ds[demo]'") from None
    write_whole(out, page.encode("utf-8"), "--out")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    if arguments.png is not None:
        files = pictures(runs, charts)
        for name, content in files.items():
            write_whole(arguments.png / name, content, "--png")
        print(f"{len(files)} pictures in {arguments.png}")


def write_whole(path: Path, content: bytes, flag: str) -> None:
    """Write a file in one move, its folder made if it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True) if fresh.parent.is_dir() else None
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(main())
