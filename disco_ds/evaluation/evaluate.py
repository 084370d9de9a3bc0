"""Evaluation of a model in training or at rest: retrieval and zero-shot accuracy over all ranks' held-out samples.

:func:`evaluate` gives the same numbers on any number of ranks: every sample is counted once, features are gathered in
the order of the samples' numbers, similarities are free of rounding (:mod:`disco_ds.evaluation.retrieval`), and what is
summed over ranks are integers.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor

from disco_ds.config.schema import EvaluationConfig
from disco_ds.data.heldout import HeldoutBatch
from disco_ds.errors import DataError
from disco_ds.evaluation.collectives import gather_objects, gather_rows, rank_and_size, total
from disco_ds.evaluation.encode import Encoded, Thumbnails, encode_all
from disco_ds.evaluation.result import EvalResult, RankedCaption, RankedImage
from disco_ds.evaluation.retrieval import (
    NonFiniteFeatures,
    count_ahead,
    count_non_finite,
    summarise,
    to_grid,
    top_texts,
)
from disco_ds.evaluation.zeroshot import (
    class_indices,
    class_ranks,
    count_hits,
    load_classes,
    load_templates,
    name_twins,
    zero_shot_metrics,
    zero_shot_weights,
)
from disco_ds.random_state import random_states, set_random_states

SHOWN_IMAGES = 12
"""Held-out images in the report."""
SHOWN_CAPTIONS = 5
"""Captions shown for each."""


def check_evaluation(config: EvaluationConfig) -> None:
    """Find out before training starts whether classes and templates can be used.

    Raises:
        ConfigError: they cannot; the message names the field.
    """
    load_classes(config)
    load_templates(config)


def evaluate(
    engine: Callable[..., Any], batches: Iterable[HeldoutBatch],
    *, tokenizer: Callable[[list[str]], Tensor], config: EvaluationConfig, device: torch.device | str | None = None,
    seed: int = 0, mean: tuple[float, ...] = OPENAI_DATASET_MEAN, std: tuple[float, ...] = OPENAI_DATASET_STD,
    retrieval: bool = True,
) -> EvalResult:  # fmt: skip
    """Measure a model on held-out samples. A collective: every rank calls it, with its own samples or none.

    The model is put into evaluation mode and back as it was; parameters, gradients and random states stay untouched.

    Args:
        engine: a DeepSpeed engine, or a module: ``engine(images, None)`` has ``.image_features`` (b, D), and
            ``engine(None, tokens)`` has ``.text_features`` (b, D). Each rank calls it equally often.
        batches: this rank's held-out batches; over the ranks every sample once.
        tokenizer: n strings → (n, context) int64; for class prompts and for samples with several captions.
        config: classes, templates, and the batch for texts.
        device: where the engine takes its inputs; by default the engine's own.
        seed: chooses the images shown in the report.
        mean, std: with which the images were normalised, a number a channel; for showing them.
        retrieval: False leaves captions alone: zero-shot accuracy only, for images that have no caption.

    Raises:
        DataError: no rank has a sample.
        NonFiniteFeatures: the model gave NaN or infinity, on any rank; raised on all.
        ConfigError: classes or templates cannot be used.
        ValueError: two samples have the same number.
    """
    started = time.perf_counter()
    classes, templates = load_classes(config), load_templates(config)
    device = _device_of(engine, device)
    with _evaluation_mode(engine, device), torch.no_grad():
        thumbnails = Thumbnails(seed, SHOWN_IMAGES, mean, std)
        encoded = encode_all(
            engine, batches, tokenizer, chunk=config.batch, device=device, thumbnails=thumbnails, texts=retrieval
        )
        if encoded is None:
            raise DataError("evaluation: no rank has a held-out sample; see data.val")
        _refuse_non_finite(encoded)
        notes: list[str] = []
        metrics: dict[str, float] = {"images": int(total(torch.tensor(len(encoded.index))))}
        samples: list[RankedImage] = []
        if retrieval:
            metrics, samples = _retrieval(encoded, device, thumbnails)
        metrics["data_faults"] = _note_faults(encoded, notes)
        per_class: dict[str, tuple[float, int]] = {}
        if classes is not None:
            weights = _class_weights(engine, tokenizer, classes, templates, config.batch, device)
            accuracies, per_class = _zero_shot(encoded, weights, classes, notes)
            metrics.update(accuracies)
    named = {f"val/{name}": value for name, value in metrics.items()}
    return EvalResult(named, per_class, samples, notes, time.perf_counter() - started)


def _refuse_non_finite(encoded: Encoded) -> None:
    bad = torch.tensor([count_non_finite(encoded.image_features), count_non_finite(encoded.text_features)])
    images, texts = total(bad).tolist()
    if images or texts:
        raise NonFiniteFeatures(
            f"evaluation: the features of {images} held-out images and {texts} texts hold NaN or infinity; the model "
            "has diverged or overflows in this precision (loss and grad_norm in metrics.jsonl say since when)"
        )


def _note_faults(encoded: Encoded, notes: list[str]) -> int:
    """How many faults (dropped samples, broken shards) the reader met over all ranks; a note names the reasons."""
    faults = sum(gather_objects(encoded.faults), Counter[str]())
    if faults:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(faults.items())[:5])
        notes.append(f"{faults.total():,} faults in the held-out data: {reasons}")
    return faults.total()


def _retrieval(
    encoded: Encoded, device: torch.device, thumbnails: Thumbnails
) -> tuple[dict[str, float], list[RankedImage]]:
    """Retrieval metrics over all ranks' samples, and the samples to show."""
    rank, world_size = rank_and_size()
    index = torch.tensor(encoded.index, dtype=torch.int64)
    row_of_text = torch.tensor(encoded.row_of_text, dtype=torch.int64)
    # in the order of the samples' numbers everything below is the same however the samples were dealt to the ranks
    numbers, image_order = gather_rows(index).sort()
    if bool((numbers.diff() == 0).any()):
        raise ValueError("held-out samples with the same number: each must come once, on one rank")
    sample_of_text, text_order = gather_rows(index[row_of_text]).sort(stable=True)
    image_grid = gather_rows(to_grid(encoded.image_features))[image_order.to(device)]
    text_grid = gather_rows(to_grid(encoded.text_features))[text_order.to(device)]
    # equal captions are equally similar: in another batch a model may give the same words other last bits
    wordings = gather_rows(torch.tensor(encoded.wordings, dtype=torch.int64))[text_order]
    _, first, same = np.unique(wordings.numpy(), return_index=True, return_inverse=True)
    text_grid = text_grid[torch.from_numpy(first[same]).to(device)]
    owner = torch.searchsorted(numbers, sample_of_text).to(device)
    share = range(*(len(numbers) * part // world_size for part in (rank, rank + 1)))
    ahead_of_share, ahead_of_texts = count_ahead(image_grid, text_grid, owner, rows=share)
    ahead_of_images = gather_rows(ahead_of_share)
    metrics = summarise(ahead_of_images, total(ahead_of_texts), owner)

    pixels = thumbnails.gathered()
    shown = torch.tensor(list(pixels), dtype=torch.int64)
    rows = torch.searchsorted(numbers, shown).to(device)
    best, similarity = top_texts(image_grid[rows], text_grid, SHOWN_CAPTIONS)
    # a text's number among its sample's own: its place less that of the sample's first
    number = torch.arange(len(sample_of_text)) - torch.searchsorted(sample_of_text, sample_of_text)
    top = [[(int(sample_of_text[t]), int(number[t])) for t in row] for row in best.tolist()]
    ranked = (ahead_of_images[rows] + 1).tolist()
    return metrics, _describe(encoded, pixels, ranked, top, similarity.tolist())


def _describe(
    encoded: Encoded, pixels: dict[int, np.ndarray], ranked: list[int], top: list[list[tuple[int, int]]],
    similarity: list[list[float]],
) -> list[RankedImage]:  # fmt: skip
    """Put words to the samples shown: each rank tells the keys and captions that are asked for and that it has."""
    asked = {*pixels, *(sample for row in top for sample, _ in row)}
    known = zip(encoded.index, encoded.keys, encoded.captions, strict=True)
    own = {sample: (key, captions) for sample, key, captions in known if sample in asked}
    described = {sample: words for part in gather_objects(own) for sample, words in part.items()}
    found = []
    for sample, rank, texts, values in zip(pixels, ranked, top, similarity, strict=True):
        key, captions = described[sample]
        shown = zip(texts, values, strict=True)
        ranking = [RankedCaption(described[s][1][number], value, s == sample) for (s, number), value in shown]
        found.append(RankedImage(sample, key, pixels[sample], captions, rank, ranking))
    return found


def _class_weights(
    engine: Callable[..., Any], tokenizer: Callable[[list[str]], Tensor], classes: list[str], templates: list[str],
    batch: int, device: torch.device,
) -> Tensor:  # fmt: skip
    """(C, D) zero-shot weights; each rank encodes the prompts of its share of the classes, all equally many."""
    rank, world_size = rank_and_size()
    per_rank = -(-len(classes) // world_size)
    share = [classes[min(number, len(classes) - 1)] for number in range(rank * per_rank, (rank + 1) * per_rank)]
    weights = zero_shot_weights(
        lambda tokens: engine(None, tokens.to(device)).text_features, tokenizer, share, templates, batch=batch
    )
    return gather_rows(weights)[: len(classes)]


def _zero_shot(
    encoded: Encoded, weights: Tensor, classes: list[str], notes: list[str]
) -> tuple[dict[str, float], dict[str, tuple[float, int]]]:
    """Accuracies over all ranks' labelled samples, and accuracy and number of samples of each class."""
    numbers, unknown = class_indices(encoded.labels, classes)
    twins = name_twins(classes)
    labels = torch.tensor(numbers, dtype=torch.int64, device=weights.device)
    labels, ahead = class_ranks(encoded.image_features, weights, labels, twins=twins)
    hits = total(count_hits(labels, ahead, len(classes)))
    found = gather_objects((len(unknown), sorted(set(unknown))[:5]))
    strangers = sum(count for count, _ in found)
    if strangers:
        names = ", ".join(repr(name) for name in sorted({name for _, names in found for name in names})[:5])
        notes.append(f"{strangers} held-out samples have labels that are not in evaluation.classes, such as {names}")
    metrics = zero_shot_metrics(hits)
    metrics["zero_shot_unknown_labels"] = strangers
    if metrics["zero_shot_samples"] == 0:
        notes.append("evaluation.classes is given, but no held-out sample has a known label (.cls): no accuracy")
    shown = [name if twins[number] == number else f"{name} ({number})" for number, name in enumerate(classes)]
    counted = zip(shown, hits.tolist(), strict=True)
    return metrics, {name: (right / seen, seen) for name, (seen, right, _) in counted if seen}


def _device_of(engine: Any, device: torch.device | str | None) -> torch.device:
    if device is None:
        device = getattr(engine, "device", None)
    if device is None and isinstance(engine, torch.nn.Module):
        device = next((parameter.device for parameter in engine.parameters()), None)
    return torch.device(device or "cpu")


@contextlib.contextmanager
def _evaluation_mode(engine: Any, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside; afterwards each submodule's mode (a locked tower is always in it) and the random states
    are as before: even a DataLoader's start draws from them."""
    modes = [(m, m.training) for m in engine.modules()] if isinstance(engine, torch.nn.Module) else []
    states = random_states(device)
    if modes:
        engine.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        set_random_states(states, device)
