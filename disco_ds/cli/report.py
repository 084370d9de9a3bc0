"""``disco-report``: one HTML file, and PNGs, from the folders of one or more runs. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from disco_ds.cli.parser import Parser, command, completing
from disco_ds.errors import ConfigError
from disco_ds.files import replace_text
from disco_ds.run_layout import PAGE

COMPARISON = "comparison.html"


@command("disco-report")
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; exit status 0: written, 2: the input is wrong."""
    _report(completing(_parser()).parse_args(argv))
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
    out = f"the HTML file (default: {PAGE} in the run's folder; of several runs {COMPARISON} here)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    png = "also write the charts as PNGs: into one picture if it ends in .png, else each into this folder"
    parser.add_argument("--png", type=Path, metavar="PATH", help=png)
    return parser


def _report(arguments: argparse.Namespace) -> None:
    from disco_ds.report.run_folder import read_runs

    runs, png = read_runs(arguments.runs), arguments.png
    out = arguments.out or (arguments.runs[0] / PAGE if len(runs) == 1 else Path(COMPARISON))
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: the report is HTML; give a name that ends in .html")
    try:
        from disco_ds.report import page, picture

        text, sections = page.render(runs)
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; install it with: pip install 'disco-ds[demo]'") from None
    with _writing("--out", out):
        replace_text(out, text)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    if png is None:
        return
    with _writing("--png", png):
        if png.suffix.lower() == ".png":
            picture.save(png, runs, sections)
            print(png)
        else:
            print(f"{picture.save_each(png, runs, sections)} pictures in {png}")


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(main())
