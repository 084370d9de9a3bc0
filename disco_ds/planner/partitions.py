"""How DeepSpeed cuts gradients: into buckets as they arrive, and into partitions over ranks. Without torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

from disco_ds.planner.coefficients import Coefficients


class Held(NamedTuple):
    """Elements in a reduction bucket: those that autocast reduces in bf16, and the others."""

    low: int
    other: int


def full_buckets(model: Coefficients, bucket: int, precision: str) -> tuple[list[tuple[int, Held]], Held]:
    """When a reduction bucket is full before backward has ended, with what is in it; and what is left at the end.

    The moment is given in elements whose gradient is complete by then. The gradient that does not fit any more waits
    outside. Under autocast there are two buckets, without it one.
    """
    inside = {True: 0, False: 0}
    done, moments = 0, []
    for size in model.arrivals:
        low = precision == "amp" and size < 0
        if inside[low] + abs(size) > bucket and inside[low]:
            moments.append((done, Held(inside[low], 0) if low else Held(0, inside[low])))
            inside[low] = 0
        inside[low] += abs(size)
        done += abs(size)
    return moments, Held(inside[True], inside[False])


def owned_gradients(model: Coefficients, gpus: int) -> int:
    """Elements of the gradients that the rank with the most of them keeps at stages 1 and 2.

    Partitions are cut from the flat row of parameters; one that a cut goes through is kept whole on both sides.
    """
    edges = [0, *accumulate(model.matrices)]
    share = -(-edges[-1] // gpus)
    most = 0
    for low in range(0, edges[-1], max(share, 1)):
        first, last = bisect_right(edges, low) - 1, bisect_left(edges, min(low + share, edges[-1]))
        most = max(most, edges[last] - edges[first])
    return most + -(-model.vectors // gpus)
