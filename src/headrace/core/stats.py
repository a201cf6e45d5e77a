"""Honest statistics for step times: few assumptions, no numpy, and no randomness at all.

Step times of a training loop are autocorrelated (prefetched batches hide the first slow fetches, page caches warm up),
so the textbook interval of independent values is too narrow. Intervals here are of *non-overlapping batch means*:
B. Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30(3), 1982 (10 to 30
batches are enough and more do not help); A. M. Law, "Simulation Modeling and Analysis", chapter 9.5.3. For a ratio of
sums the residuals ``num - ratio * den`` are batched: the linearised ratio estimator, W. G. Cochran, "Sampling
Techniques", 3rd ed., section 6.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

#: Schmeiser 1982: beyond 30 batches an interval hardly shortens, below 10 it is wide and unsteady.
MAX_BATCHES, MIN_BATCHES = 30, 10
#: Fewer values than this say nothing about their own spread.
MIN_VALUES = 4
#: Batch means that are still this correlated at lag 1 are too short; they are then merged in pairs.
MAX_LAG1 = 0.3

Interval = tuple[float, float]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, exactly rounded.

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("mean of no values")
    return math.fsum(values) / len(values)


def percentile(values: Sequence[float], percent: float, *, is_sorted: bool = False) -> float:
    """The value below which ``percent`` (0..100) of the values lie, linear in between (type 7 of Hyndman and Fan).

    Args:
        values: In any order, at least one.
        percent: 0..100.
        is_sorted: The caller promises ascending order, so that several percentiles cost one sort.

    Raises:
        ValueError: No values, or ``percent`` outside 0..100.
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}, it must be 0..100")
    ordered = values if is_sorted else sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return min(max(low + (high - low) * (position - below), low), high)


def median(values: Sequence[float], *, is_sorted: bool = False) -> float:
    """The 50th percentile."""
    return percentile(values, 50, is_sorted=is_sorted)


def trimmed(values: Sequence[float], trim_frac: float = 0.1) -> list[float]:
    """``values`` in ascending order without the ``trim_frac`` (0..0.5) smallest and largest; never empty.

    Raises:
        ValueError: ``trim_frac`` is outside [0, 0.5).
    """
    if not 0 <= trim_frac < 0.5:
        raise ValueError(f"trim_frac is {trim_frac}, it must be at least 0 and below 0.5")
    ordered, drop = sorted(values), int(len(values) * trim_frac)
    return ordered[drop : len(ordered) - drop]


def trimmed_mean(values: Sequence[float], trim_frac: float = 0.1) -> float:
    """Mean of ``trimmed(values, trim_frac)``: for values with a few wild ones that carry no information."""
    return mean(trimmed(values, trim_frac))


def t_quantile(probability: float, num_free: int) -> float:
    """Quantile of Student's t with ``num_free`` degrees of freedom (>= 1).

    Exact for 1 and 2, else the expansion of Abramowitz and Stegun 26.7.5 (within 0.2 % for 0.975 from 3 on).
    """
    if num_free < 1:
        raise ValueError(f"num_free is {num_free}, it must be at least 1")
    if num_free == 1:
        return math.tan(math.pi * (probability - 0.5))
    if num_free == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / num_free ** (power + 1) for power, term in enumerate(terms))


def batch_means(values: Sequence[float], num_batches: int) -> list[float]:
    """Means of ``num_batches`` consecutive, nearly equal pieces of ``values``."""
    edges = [len(values) * i // num_batches for i in range(num_batches + 1)]
    return [mean(values[start:end]) for start, end in itertools.pairwise(edges)]


def _lag1(values: Sequence[float]) -> float:
    """Correlation of neighbours, -1..1; 0 for constant values."""
    centre = mean(values)
    off = [value - centre for value in values]
    power = math.fsum(x * x for x in off)
    return math.fsum(a * b for a, b in itertools.pairwise(off)) / power if power > 0 else 0.0


def _settled_batches(values: Sequence[float]) -> list[float]:
    """Batch means, in batches so long that neighbours hardly know of each other (or as MIN_BATCHES allows)."""
    num_batches = min(MAX_BATCHES, len(values))
    means = batch_means(values, num_batches)
    while num_batches // 2 >= MIN_BATCHES and _lag1(means) > MAX_LAG1:
        num_batches //= 2
        means = batch_means(values, num_batches)
    return means


def standard_error(values: Sequence[float]) -> tuple[float, int] | None:
    """Standard error of the mean of autocorrelated ``values``, its degrees of freedom; None below MIN_VALUES values."""
    if len(values) < MIN_VALUES:
        return None
    means = _settled_batches(values)
    centre = mean(means)
    variance = math.fsum((x - centre) ** 2 for x in means) / (len(means) - 1)
    return math.sqrt(variance / len(means)), len(means) - 1


def mean_ci(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Confidence interval of the mean of autocorrelated ``values`` in order of time; None below MIN_VALUES values."""
    error = standard_error(values)
    if error is None:
        return None
    half = t_quantile(0.5 + level / 2, error[1]) * error[0]
    centre = mean(values)
    return centre - half, centre + half


def ratio_ci(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Interval | None:
    """Confidence interval of ``sum(numerators) / sum(denominators)`` over autocorrelated steps.

    Args:
        numerators: One per step, in order of time, e.g. stall ns.
        denominators: As many, e.g. step ns.
        level: 0..1.

    Returns:
        (lo, hi), or None with fewer than MIN_VALUES steps or a denominator of zero. Where every numerator lies in
        0..denominator the interval is cut to 0..1, where none is negative to >= 0.

    Raises:
        ValueError: The two differ in length.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators but {len(denominators)} denominators")
    total = math.fsum(denominators)
    if total <= 0:
        return None
    ratio = math.fsum(numerators) / total
    residuals = [num - ratio * den for num, den in zip(numerators, denominators, strict=True)]
    error = standard_error(residuals)
    if error is None:
        return None
    half = t_quantile(0.5 + level / 2, error[1]) * error[0] * len(residuals) / total
    low = 0.0 if min(numerators) >= 0 else -math.inf
    high = 1.0 if all(num <= den for num, den in zip(numerators, denominators, strict=True)) else math.inf
    return max(ratio - half, low), min(ratio + half, high)
