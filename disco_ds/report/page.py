"""The page: one HTML text with everything in it, and what a run writes of it at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from disco_ds import __version__
from disco_ds.files import replace_text
from disco_ds.report import picture
from disco_ds.report.run_folder import RunFolder, read_runs
from disco_ds.report.sections import Section, head, sections
from disco_ds.report.style import DARK, chart_settings, inline_svg, variable
from disco_ds.run_layout import PAGE, PICTURE


def render(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    """The report as one HTML text that asks for nothing outside itself, and the sections in it.

    Raises:
        ImportError: matplotlib or jinja2 is missing.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("disco_ds", "report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    with chart_settings():
        parts = sections(runs)
        svgs = {chart.name: inline_svg(chart) for part in parts for chart in part.charts}
    page = environment.get_template("report.html.jinja").render(
        title=" / ".join(run.label for run in runs),
        runs=[head(run) for run in runs],
        sections=parts,
        svgs=svgs,
        colours={variable(light): (light, dark) for light, dark in DARK.items()},
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M %Z").strip(),
    )
    # captions from the web may hold halves of surrogate pairs, which no UTF-8 file can
    return page.encode("utf-8", "replace").decode("utf-8"), parts


def write_report(run_dir: Path) -> dict[str, Path]:
    """Write ``report.html`` and ``report.png`` at the end of a run, from what its folder holds.

    Returns:
        the files made: "picture" and "report". One that cannot be made is a line that says why: the run it tells of is
        finished and stands, whatever becomes of its report.
    """
    made: dict[str, Path] = {}
    try:
        runs = read_runs([run_dir])
        page, parts = render(runs)
        replace_text(run_dir / PAGE, page)
        made["report"] = run_dir / PAGE
        picture.save(run_dir / PICTURE, runs, parts)
        made = {"picture": run_dir / PICTURE, **made}
    except ImportError as error:
        print(f"no report: {error.name} is not installed (pip install 'disco-ds[demo]')", flush=True)
    except Exception as error:
        print(f"no {PICTURE if made else PAGE}: {type(error).__name__}: {error}", flush=True)
    return made
