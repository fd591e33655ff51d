"""Ratios, means and intervals of plain numbers: one bootstrap over requests, Student's t over seeds, quartiles.

What is of nothing (no request, nothing to divide by) is NaN: tables show a dash, JSON has null.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Interval = tuple[float, float]
Verdict = Literal["above 0", "below 0", "includes 0", "not measured"]
DRAWS, SEED = 1000, 0  # of every bootstrap


def bootstrap(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """95% interval of sum(parts) / sum(wholes) over resampled requests; both in the order of `ordered`."""
    if not len(parts):
        return (math.nan, math.nan)
    (values,) = resampled([(parts, wholes)])
    return ends(values)


def student_half_width(deviation: float, count: int) -> float:
    """Half of Student's 95% interval of the mean of `count` values with this standard deviation."""
    return student_975(count - 1) * deviation / count**0.5


# 97.5% points of Student's t for 1 to 9 degrees of freedom.
_STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def student_975(degrees: int) -> float:
    """The 97.5% point of Student's t, to 0.001 (from 10 degrees on by its expansion in 1 / degrees)."""
    if degrees <= len(_STUDENT_975):
        return _STUDENT_975[degrees - 1]
    z, n = 1.959964, degrees
    cubic = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + cubic


def quartiles(values: Sequence[float]) -> Interval:
    """The first and the third, of those values that are numbers."""
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        return (values[0], values[0]) if values else (math.nan, math.nan)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def verdict(interval: Interval) -> Verdict:
    """On which side of 0 both ends lie ("above 0", "below 0"); else "includes 0", also where an end is 0."""
    low, high = interval
    if math.isnan(low) or math.isnan(high):
        return "not measured"
    return "above 0" if low > 0 else "below 0" if high < 0 else "includes 0"


def ratio(numerator: Any, denominator: Any) -> Any:
    """Divide numbers, or columns of them; NaN where there is nothing to divide by."""
    if np.ndim(denominator):
        return numerator / denominator.where(denominator > 0)
    return numerator / denominator if denominator > 0 else math.nan


def resampled(ratios: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[np.ndarray]:
    """[DRAWS] of each ratio of sums over the same resampled requests; NaN of requests whose wholes are 0."""
    count = len(ratios[0][0])
    rng, at_once = np.random.default_rng(SEED), max(1, 2**22 // count)  # of many requests a few draws at a time
    values: list[list[np.ndarray]] = [[] for _ in ratios]
    for start in range(0, DRAWS, at_once):
        picks = rng.integers(count, size=(min(at_once, DRAWS - start), count))
        for taken, (parts, wholes) in zip(values, ratios, strict=True):
            whole = np.asarray(wholes)[picks].sum(1)
            divided = np.asarray(parts)[picks].sum(1) / np.where(whole > 0, whole, 1)
            taken.append(np.where(whole > 0, divided, math.nan))
    return [np.concatenate(taken) for taken in values]


def ends(values: np.ndarray) -> Interval:
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return (math.nan, math.nan)
    return float(values[int(0.025 * len(values))]), float(values[int(0.975 * len(values))])
