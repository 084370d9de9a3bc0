"""What the planner knows of a model, as numbers: the shipped table, and one model's entry. Without torch.

A :class:`Point` says what is alive at one moment of forward or backward. With b pairs in a micro-batch its activations
are ``per_pair * b + fixed`` bytes, exactly; the peak is the largest over points, whatever lies on top of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("coefficients.json")
OPTIMIZER_BYTES = {"adamw": 8, "lion": 4}
"""States of an optimizer for one parameter, in fp32."""


class Point(NamedTuple):
    """A moment of a step that can be the highest. Bytes are of activations, gradients on their way and temporaries."""

    per_pair: int
    fixed: int
    gradients: int
    """Elements of parameters whose gradient is complete by then, at least."""
    gradients_max: int
    """... and at most: neighbouring moments are kept as one."""
    input: int
    """Bytes of a pair's image and tokens, as far as the step or its graph still holds them."""


@dataclass
class Trace:
    """One model at one precision, checkpointing policy and attention."""

    points: list[Point]
    end_per_pair: int
    """Alive when forward has ended (the loss's memory comes on top), per pair, without the batch itself."""
    end_fixed: int
    end_input: int
    """Bytes of a pair's image and tokens that the graph keeps for backward: in fp32 the image, for the first
    convolution; tokens always, for the embedding."""
    feature_bytes: int
    """Bytes of one element of the features as the towers give them."""
    forward_flops: int
    """Of one pair's forward: products, convolutions and attention."""

    def peak(self, batch: int, held: int | None = None) -> int:
        """A(b): the highest of activations for ``batch`` pairs, with the batch itself while it is alive.

        ``held``: bytes of a pair that the caller keeps throughout instead, as the reference figures do.
        """
        return max((p.per_pair + (p.input if held is None else held)) * batch + p.fixed for p in self.points)

    def end(self, batch: int, held: int | None = None) -> int:
        """E(b): alive when forward has ended, for ``batch`` pairs; ``held`` as for the peak."""
        return (self.end_per_pair + (self.end_input if held is None else held)) * batch + self.end_fixed


@dataclass
class Coefficients:
    """A model: sizes of its parameters in elements, its batch, and its traces by :func:`trace_key`."""

    name: str
    parameters: int
    image_parameters: int
    largest: int
    """The largest parameter."""
    matrices: list[int]
    """The parameters with weight decay in the optimizer's order: where ZeRO's partitions cut them matters."""
    vectors: int
    """All others together."""
    arrivals: list[int]
    """Sizes of the parameters in the order in which backward completes their gradients. Negative: of a linear or
    convolution layer, which DeepSpeed reduces in bf16 under its autocast, in a bucket of its own."""
    buffer_bytes: int
    embed_dim: int
    image_size: list[int]
    context_length: int
    traces: dict[str, Trace] = field(default_factory=dict)

    @property
    def input_bytes(self) -> int:
        """One pair on the device as the loader gives it: a float32 image, int64 tokens."""
        return 3 * self.image_size[0] * self.image_size[1] * 4 + self.context_length * 8

    def to_json(self) -> dict[str, Any]:
        """The entry of the table."""
        return {**asdict(self), "traces": {key: list(astuple(trace)) for key, trace in self.traces.items()}}


def trace_key(precision: str, checkpointing: str, attention: str = "flash", device: str = "cuda") -> str:
    """The name of a trace: ``bf16/full``, ``amp/none/math``, ``cpu:fp32/every:2``."""
    key = f"{precision}/{checkpointing}" + ("" if attention == "flash" else f"/{attention}")
    return key if device == "cuda" else f"{device}:{key}"


def from_json(entry: dict[str, Any]) -> Coefficients:
    """The inverse of :meth:`Coefficients.to_json`."""
    traces = {key: Trace([Point(*p) for p in points], *rest) for key, (points, *rest) in entry["traces"].items()}
    return Coefficients(**{**entry, "traces": traces})


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The shipped table, still as JSON: ``models`` by name, and the versions that it was made with."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def shipped(name: str) -> Coefficients | None:
    """The shipped coefficients of a model, None if there are none. ``/`` and ``-`` are the same in a name."""
    entry = table()["models"].get(name.replace("/", "-"))
    return None if entry is None else from_json(entry)


def thin(points: Iterable[Point], total: int, bins: int = 16) -> list[Point]:
    """The points that can be the highest for some batch of at least one pair, whatever a gradient costs.

    Within a sixteenth of the gradients' arrival, points are compared by activations alone, and the range of
    ``gradients`` that they stand for is kept; what another point exceeds in every respect is left out.
    """
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        share = 0 if point.gradients == 0 else 1 + (point.gradients - 1) * bins // max(total, 1)
        groups.setdefault((share, point.input), []).append(point)
    kept: list[Point] = []
    for members in groups.values():
        low, high = min(p.gradients for p in members), max(p.gradients_max for p in members)
        kept += [p._replace(gradients=low, gradients_max=high) for p in _hull(members)]
    return sorted(p for p in kept if not any(_exceeds(q, p) for q in kept))


def _exceeds(q: Point, p: Point) -> bool:
    """Whether q is above p for every batch and every price of a gradient, held or released."""
    if q is p or q == p:
        return False
    return (
        q.per_pair >= p.per_pair
        and q.per_pair + q.fixed >= p.per_pair + p.fixed
        and q.gradients <= p.gradients
        and q.gradients_max >= p.gradients_max
        and q.input >= p.input
    )


def _hull(points: list[Point]) -> list[Point]:
    """Points that are the maximum of ``per_pair * b + fixed`` for some b >= 1, by increasing slope."""

    def takes_over(low: Point, high: Point) -> Fraction:
        """The batch from which the steeper one of two is the higher."""
        return Fraction(low.fixed - high.fixed, high.per_pair - low.per_pair)

    best: dict[int, Point] = {}
    for point in points:
        if point.per_pair not in best or best[point.per_pair].fixed < point.fixed:
            best[point.per_pair] = point
    hull: list[tuple[Fraction, Point]] = []  # each with the batch from which it is the highest
    for _, point in sorted(best.items()):
        while hull and takes_over(hull[-1][1], point) <= hull[-1][0]:
            hull.pop()
        hull.append((takes_over(hull[-1][1], point) if hull else Fraction(1), point))
    return [point for _, point in hull]
