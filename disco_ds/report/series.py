"""The numbers of a curve, made smooth and made few."""

from __future__ import annotations

import numpy as np

SMOOTH_FROM = 20
"""Logged steps from which on a noisy curve is smoothed."""
_STRETCHES = 400  # of a thinned curve: two for each pixel of a phone


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a thirtieth of the curve, so that it does not lag behind; NaN is passed over."""
    reach = max(1, len(values) // 60)
    finite = np.isfinite(values)
    sums = np.cumsum([0.0, *np.where(finite, values, 0.0)])
    counts = np.cumsum([0, *finite])
    middle = np.arange(len(values))
    low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    found = counts[high] - counts[low]
    return np.where(found > 0, (sums[high] - sums[low]) / np.maximum(found, 1), np.nan)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most two points for each of 400 stretches of a long curve, its lowest and its highest, in order."""
    if len(x) <= 2 * _STRETCHES:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(x)), _STRETCHES):
        finite = part[np.isfinite(y[part])]
        keep += sorted({finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]}) if len(finite) else [part[0]]
    return x[keep], y[keep]
