"""Zero-shot classification as CLIP does it (Radford et al. 2021, section 3.1.4): prompts as a classifier's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from open_clip.zero_shot_metadata import (
    IMAGENET_CLASSNAMES,
    OPENAI_IMAGENET_TEMPLATES,
    SIMPLE_IMAGENET_TEMPLATES,
)
from torch import Tensor
from torch.nn import functional as F

from disco_ds.config.schema import EvaluationConfig
from disco_ds.errors import ConfigError
from disco_ds.evaluation.retrieval import to_grid

IMAGENET = "imagenet"
"""evaluation.classes by this name are open_clip's 1,000 (where no file is called so)."""
TEMPLATES: dict[str, Sequence[Callable[[str], str]]] = {
    "openai": OPENAI_IMAGENET_TEMPLATES,
    "simple": SIMPLE_IMAGENET_TEMPLATES,
}
"""evaluation.templates by these names are open_clip's: OpenAI's 80 for ImageNet, and the 7 best of them."""


def load_classes(config: EvaluationConfig) -> list[str] | None:
    """The class names of a run, in order; None where it has none. ImageNet's hold two names twice.

    Raises:
        ConfigError: the file cannot be read, a name is empty or given twice, or there are fewer than two.
    """
    if config.classes is None:
        return None
    if config.classes == Path(IMAGENET) and not Path(IMAGENET).is_file():
        return list(IMAGENET_CLASSNAMES)
    classes = _lines(config.classes, "evaluation.classes")
    twice = sorted({name for name in classes if classes.count(name) > 1})
    if twice:
        raise ConfigError(f"evaluation.classes: {', '.join(map(repr, twice))} given more than once")
    if len(classes) < 2:
        raise ConfigError(f"evaluation.classes: a classification needs two classes or more, found {classes}")
    return classes


def load_templates(config: EvaluationConfig) -> list[str]:
    """The prompt templates of a run, each with {} in it.

    Raises:
        ConfigError: the file cannot be read, there is no template, or one lacks {}.
    """
    if isinstance(config.templates, Path) and not config.templates.is_file() and str(config.templates) in TEMPLATES:
        return [template("{}") for template in TEMPLATES[str(config.templates)]]
    templates = _lines(config.templates, "evaluation.templates")
    for template in templates:
        if "{}" not in template:
            raise ConfigError(f"evaluation.templates: {template!r} has no {{}} where the class name goes")
    if not templates:
        raise ConfigError("evaluation.templates: there is none; one line like 'a photo of a {}.' is enough")
    return templates


def _lines(value: list[str] | Path, field: str) -> list[str]:
    """The stripped entries of a list or the lines of a file; empty lines of a file are passed over."""
    if isinstance(value, Path):
        try:
            return [line.strip() for line in value.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{field}: {value} cannot be read as a text file: {error}") from None
    lines = [line.strip() for line in value]
    if not all(lines):
        raise ConfigError(f"{field}: entry {lines.index('')} is empty")
    return lines


def zero_shot_weights(
    encode_text: Callable[[Tensor], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[str],
    *,
    batch: int = 256,
) -> Tensor:
    """The classifier's weights: for each class the mean over templates of unit-length text features, made unit-length.

    Args:
        encode_text: tokens (n, context) → text features (n, D), on any device. Called ceil(C x P / batch) times, for C
            classes and P templates: as often on every rank that has as many classes.
        tokenizer: n strings → tokens (n, context).
        classes: C names.
        templates: P prompts with {} for the name.

    Returns:
        (C, D) float64 on the device of the features.
    """
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    encoded = [
        F.normalize(encode_text(tokenizer(prompts[start : start + batch])).double(), dim=-1)
        for start in range(0, len(prompts), batch)
    ]
    mean = torch.cat(encoded).unflatten(0, (len(classes), len(templates))).mean(1)
    return F.normalize(mean, dim=-1)


def class_indices(labels: Sequence[str | None], classes: Sequence[str]) -> tuple[list[int], list[str]]:
    """Labels as indices into ``classes``; -1 for a sample without a label and for an unknown one.

    A label is a class name (exactly, or else with case and surrounding space set aside), or else a whole number that
    counts from 0.

    Returns:
        the indices, and the labels that are neither (with repeats).
    """
    exact = {name: number for number, name in reversed(list(enumerate(classes)))}  # of equal names the first
    folded = {name.strip().casefold(): number for name, number in exact.items()}
    indices, unknown = [], []
    for label in labels:
        text = (label or "").strip()
        number = exact.get(text, folded.get(text.casefold(), -1))
        if number < 0 and text.isdecimal() and int(text) < len(classes):
            number = int(text)
        if number < 0 and text:
            unknown.append(text)
        indices.append(number)
    return indices, unknown


def name_twins(classes: Sequence[str]) -> Tensor:
    """(C,) int64: for each class the first of the same name, itself where it has none (ImageNet has two "missile")."""
    first: dict[str, int] = {}
    return torch.tensor([first.setdefault(name, number) for number, name in enumerate(classes)])


def class_ranks(
    image_features: Tensor, weights: Tensor, labels: Tensor, *, twins: Tensor | None = None, block: int = 4096
) -> tuple[Tensor, Tensor]:
    """How many classes are ranked before the right one.

    Ties count against the model, as in retrieval. Classes of one name have one prompt and cannot be told apart; the
    first of them stands before the others, as open_clip's topk has it.

    Args:
        image_features: (n, D).
        weights: (C, D) from :func:`zero_shot_weights`.
        labels: (n,) int64 class numbers, -1 for samples to leave out.
        twins: (C,) from :func:`name_twins`; None: all names differ.
        block: samples at a time; memory is O(block x C).

    Returns:
        The labels of the m samples that have one, and for each of those the number of classes ahead: (m,) int64 each.
    """
    device = image_features.device
    known = labels >= 0
    image_grid, labels = to_grid(image_features[known]), labels[known]
    twins = torch.arange(len(weights), device=device) if twins is None else twins.to(device)
    class_dc = to_grid(weights)[twins].double().T  # equal names get equal weights, to the last bit
    number = torch.arange(len(weights), device=device)
    ahead = labels.new_empty(len(labels))
    for start in range(0, len(labels), block):
        right = labels[start : start + block]
        similarity = image_grid[start : start + block].double() @ class_dc
        right_similarity = similarity.gather(1, right[:, None])
        later_twin = (twins[None] == twins[right][:, None]) & (number[None] >= right[:, None])  # and the right one
        similarity.masked_fill_(later_twin, -torch.inf)
        ahead[start : start + block] = (similarity >= right_similarity).sum(1)
    return labels, ahead


def count_hits(labels: Tensor, ahead: Tensor, classes: int) -> Tensor:
    """Per class the number of its samples, of those ranked first, and of those in the first five: (C, 3) int64.

    From the labels of m samples and the numbers of classes ranked before the right one, see :func:`class_ranks`. Sums
    over ranks are exact, and :func:`zero_shot_metrics` turns them into accuracies.
    """
    hits = torch.zeros(classes, 3, dtype=torch.int64, device=labels.device)
    return hits.index_add_(0, labels, torch.stack([torch.ones_like(ahead), (ahead < 1).long(), (ahead < 5).long()], 1))


def zero_shot_metrics(hits: Tensor) -> dict[str, float]:
    """Top-1, top-5 (where there are more than five classes), mean per class, and the chance level of each.

    ``zero_shot_mean_per_class`` is the mean of the top-1 accuracies of the classes that have samples.
    """
    samples = int(hits[:, 0].sum())
    metrics: dict[str, float] = {"zero_shot_samples": samples}
    if samples == 0:
        return metrics
    seen = hits[hits[:, 0] > 0].double()
    metrics["zero_shot_top1"] = int(hits[:, 1].sum()) / samples
    metrics["zero_shot_top1_chance"] = 1 / len(hits)
    if len(hits) > 5:
        metrics["zero_shot_top5"] = int(hits[:, 2].sum()) / samples
        metrics["zero_shot_top5_chance"] = 5 / len(hits)
    metrics["zero_shot_mean_per_class"] = float((seen[:, 1] / seen[:, 0]).mean())
    metrics["zero_shot_mean_per_class_chance"] = 1 / len(hits)
    return metrics
