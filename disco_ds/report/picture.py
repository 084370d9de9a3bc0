"""report.png and report.html in a run's folder: how training went, and what the model says about held-out images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from disco_ds.evaluation.result import EvalResult, RankedImage
from disco_ds.report.curves import FAINT, INK, draw_loss, draw_retrieval, draw_schedule, draw_zero_shot
from disco_ds.report.grid import Grid
from disco_ds.report.words import fit, installed_families, measurer, printable
from disco_ds.run_layout import EVALS, METRICS
from disco_ds.telemetry.jsonlines import read_lines

REPORT_FILE = "report.png"
PAGE_FILE = "report.html"

_WIDTH, _DPI = 16.0, 100  # 1,600 pixels: readable at full size
_MARGIN = 0.55  # inches, left and right
_HEAD, _CURVES, _LEGENDS, _GRID_HEAD, _FOOT = 1.25, 2.7, 1.35, 0.4, 0.1


def write_report(run_dir: Path | str, eval_result: EvalResult | None = None) -> Path | None:
    """Draw ``report.png`` from the run's metrics.jsonl and eval.jsonl and from the newest evaluation's samples.

    Args:
        run_dir: the run's folder; a file in it that is missing leaves its part of the picture empty.
        eval_result: the evaluation whose held-out images are shown; None shows none.

    Returns:
        the picture's path; None without matplotlib, after a line that says which extra to install.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        print("no report.png: matplotlib is not installed (pip install 'disco-ds[demo]')", flush=True)
        return None
    run_dir = Path(run_dir)
    path = run_dir / REPORT_FILE
    fresh = path.with_name(f".{REPORT_FILE}.new")
    # matplotlib's own settings only: a user's matplotlibrc is made for other pictures
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({"font.family": list(installed_families()), "axes.edgecolor": FAINT})
        draw_report(run_dir, [] if eval_result is None else eval_result.samples).savefig(fresh, format="png")
    os.replace(fresh, path)
    return path


def write_page(run_dir: Path | str) -> Path | None:
    """Write ``report.html``, as ``disco-report RUN`` does, at the end of a run.

    Returns:
        the page's path; None, after a line that says why, where it cannot be made: the run it tells of is finished and
        stands, whatever becomes of its report.
    """
    path = Path(run_dir) / PAGE_FILE
    fresh = path.with_name(f".{PAGE_FILE}.new")
    try:
        from disco_ds.report.page import render
        from disco_ds.report.run_folder import read_runs

        fresh.write_text(render(read_runs([path.parent]))[0], encoding="utf-8")
        os.replace(fresh, path)
    except ImportError:
        return None  # write_report has said which extra to install
    except Exception as error:
        print(f"no {PAGE_FILE}: {type(error).__name__}: {error}", flush=True)
        return None
    return path


def draw_report(run_dir: Path, samples: list[RankedImage]) -> Any:
    """The picture of :func:`write_report` as a matplotlib Figure of the size that its content needs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics, evals = read_lines(run_dir / METRICS), read_lines(run_dir / EVALS)
    config = _config(run_dir)
    figure = Figure(figsize=(_WIDTH, 1), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    grid = Grid(figure, samples, left=_MARGIN, right=_MARGIN)
    curves_end = _HEAD + _CURVES + _LEGENDS
    figure.set_figheight(curves_end + (_GRID_HEAD + grid.height if samples else 0) + _FOOT)
    _draw_head(figure, run_dir, config, metrics, evals)
    _draw_curves(figure, config, metrics, evals)
    if samples:
        _title(
            figure, curves_end + 0.12, "Held-out images and the captions most similar to them, the right one green", 11
        )
        grid.draw(figure, curves_end + _GRID_HEAD)
    return figure


def _config(run_dir: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _draw_head(figure: Any, run_dir: Path, config: dict[str, Any], metrics: list[Any], evals: list[Any]) -> None:
    """The run's name and, below it, how long it was and what it reached, next to chance."""
    name = printable(str(config.get("name", run_dir.resolve().name)))
    room = _WIDTH - 2 * _MARGIN
    _title(figure, 0.42, fit(name, room, 1, measurer(figure, 17, "bold"))[0], 17)
    facts = []
    model = config.get("model", {}).get("name") if isinstance(config.get("model"), dict) else None
    if model:
        facts.append(str(model))
    if metrics:
        facts.append(f"{metrics[-1]['step']:,} steps")
        if metrics[-1].get("samples_seen"):
            facts.append(f"{metrics[-1]['samples_seen']:,} pairs seen")
    if evals:
        last = evals[-1]
        for key, words in (
            ("val/image_to_text_R@10", "image → text R@10"),
            ("val/text_to_image_R@10", "text → image R@10"),
            ("val/zero_shot_top1", "zero-shot top-1"),
        ):
            if last.get(key) is not None:
                facts.append(f"{words} {last[key]:.3f} (chance {last[f'{key}_chance']:.3f})")
    text = fit(printable("  ·  ".join(facts)), room, 1, measurer(figure, 11))
    across, down = figure.get_size_inches()
    figure.text(_MARGIN / across, 1 - 0.72 / down, text[0] if text else "", fontsize=11, color=INK, parse_math=False)


def _title(figure: Any, y: float, text: str, size: float) -> None:
    across, down = figure.get_size_inches()
    figure.text(_MARGIN / across, 1 - y / down, text, fontsize=size, fontweight="bold", color=INK, parse_math=False)


def _draw_curves(figure: Any, config: dict[str, Any], metrics: list[Any], evals: list[Any]) -> None:
    """Four panels in a row; the second is two, one above the other."""
    across, down = figure.get_size_inches()
    gap, panels = 0.62, 4
    width = (across - 2 * _MARGIN - (panels - 1) * gap) / panels

    def panel(number: int, top: float, height: float) -> Any:
        left = _MARGIN + 0.1 + number * (width + gap)
        return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    loss = config.get("loss")
    sigmoid = isinstance(loss, dict) and loss.get("kind") == "sigmoid"
    draw_loss(panel(0, _HEAD, _CURVES), metrics, chance=not sigmoid)
    half = (_CURVES - 0.5) / 2
    draw_schedule(panel(1, _HEAD, half), panel(1, _HEAD + half + 0.5, half), metrics)
    draw_retrieval(panel(2, _HEAD, _CURVES), evals)
    draw_zero_shot(panel(3, _HEAD, _CURVES), evals)
