"""What an evaluation found, and how the console shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from disco_ds.evaluation.retrieval import RECALLS


@dataclass(frozen=True)
class RankedCaption:
    """A caption as the model ranks it for an image; ``right`` if it is one of the image's own."""

    text: str
    similarity: float
    right: bool


@dataclass(frozen=True)
class RankedImage:
    """A held-out image with the captions that the model finds most similar, best first.

    ``pixels`` is (h, w, 3) uint8. ``rank`` is where the best of its own ``captions`` stands among all, from 1.
    """

    index: int
    key: str
    pixels: np.ndarray
    captions: list[str]
    rank: int
    top: list[RankedCaption]


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found; equal on all ranks.

    Attributes:
        metrics: flat names ("val/image_to_text_R@10", "val/zero_shot_top1"), chance levels under ``…_chance``.
        per_class: top-1 accuracy and number of samples of each class that has samples.
        samples: a few held-out images, the same ones for the same seed, for the report.
        notes: what the user should know about the numbers, a sentence each.
        seconds: how long it took on this rank.
    """

    metrics: dict[str, float]
    per_class: dict[str, tuple[float, int]] = field(default_factory=dict)
    samples: list[RankedImage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def format_result(result: EvalResult) -> str:
    """The result for the console, a few lines: recalls and accuracy, each next to its chance level."""
    metrics = {name.removeprefix("val/"): value for name, value in result.metrics.items()}
    pairs = f"{metrics['pairs']:,} pairs of " if "pairs" in metrics else ""
    lines = [f"held-out: {pairs}{metrics['images']:,} images, {result.seconds:.1f} s"]
    directions = {"image_to_text": "image → text", "text_to_image": "text → image"}
    for direction, title in directions.items() if "pairs" in metrics else ():
        recalls = [
            f"R@{k} {metrics[f'{direction}_R@{k}']:.3f} (chance {metrics[f'{direction}_R@{k}_chance']:.3f})"
            for k in RECALLS
        ]
        median, mean = metrics[f"{direction}_median_rank"], metrics[f"{direction}_mean_rank"]
        lines.append(f"  {title}  {'  '.join(recalls)}  rank: median {median:,}, mean {mean:,.1f}")
    if "zero_shot_top1" in metrics:
        names = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}
        accuracies = [
            f"{words} {metrics[f'zero_shot_{name}']:.3f} (chance {metrics[f'zero_shot_{name}_chance']:.3f})"
            for name, words in names.items()
            if f"zero_shot_{name}" in metrics
        ]
        lines.append(f"  zero-shot     {'  '.join(accuracies)}  on {metrics['zero_shot_samples']:,} samples")
    return "\n".join(lines + [f"  note: {note}" for note in result.notes])
