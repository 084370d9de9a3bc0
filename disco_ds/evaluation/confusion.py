"""The confusion matrix of a zero-shot classification as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from disco_ds.errors import ConfigError

NAMED = 60
"""Up to so many classes each row and column has its name; beyond, only their numbers on the axes."""


def check_drawing() -> None:
    """Find out before an evaluation whether there will be a picture.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--confusion needs matplotlib: pip install 'disco-ds[demo]'") from None


def draw_confusion(counts: np.ndarray, classes: Sequence[str], path: Path, title: str) -> None:
    """Write the picture: a row a class, normalised to shares of its images; its format follows from the ending.

    Args:
        counts: (C, C) images of the row's class by the class ranked first.
        classes: C names.

    Raises:
        ConfigError: the file cannot be written, or its ending names no format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seen = counts.sum(1, keepdims=True)
    shares = np.divide(counts, seen, out=np.full(counts.shape, np.nan), where=seen > 0)
    named = len(classes) <= NAMED
    side = 3.5 + (0.24 * len(classes) if named else 7)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    image.cmap.set_bad("lightgrey")  # classes without images
    figure.colorbar(image, ax=axes, label="share of the class's images", shrink=0.8)
    if named:
        axes.set_xticks(range(len(classes)), [_short(name) for name in classes], rotation=90, fontsize=8)
        axes.set_yticks(range(len(classes)), [_short(name) for name in classes], fontsize=8)
    axes.set_xlabel("ranked first")
    axes.set_ylabel("class")
    right = int(np.trace(counts))
    axes.set_title(f"{title}\n{right:,} of {int(counts.sum()):,} right", fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--confusion {path} could not be written: {error}") from error


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"
