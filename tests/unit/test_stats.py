"""Statistics: exact where they can be, honest intervals where they cannot."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import stats

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


def _ar1(rng: random.Random, num: int, rho: float) -> list[float]:
    """Autocorrelated series with mean 10."""
    out, state = [], 0.0
    for _ in range(num):
        state = rho * state + rng.gauss(0, 1)
        out.append(10 + state)
    return out


@given(values, st.floats(0, 100))
def test_percentile_lies_between_the_extremes_and_ignores_order(data: list[float], percent: float) -> None:
    """A percentile lies within the values and does not depend on their order."""
    found = stats.percentile(data, percent)
    assert min(data) <= found <= max(data)
    assert found == stats.percentile(sorted(data), percent, is_sorted=True) == stats.percentile(data[::-1], percent)


@given(values)
def test_median_agrees_with_the_standard_library(data: list[float]) -> None:
    """The median is the one that everybody computes."""
    assert stats.median(data) == pytest.approx(statistics.median(data), abs=1e-6)


@given(values, st.floats(0, 0.49))
def test_trimming_keeps_the_middle(data: list[float], trim_frac: float) -> None:
    """Trimming drops as many from both ends and never everything."""
    kept = stats.trimmed(data, trim_frac)
    drop = int(len(data) * trim_frac)
    assert kept == sorted(data)[drop : len(data) - drop]
    assert kept
    assert min(kept) - 1e-6 <= stats.trimmed_mean(data, trim_frac) <= max(kept) + 1e-6


@pytest.mark.parametrize("call", [stats.mean, stats.median, lambda data: stats.percentile(data, 5)])
def test_no_values_are_an_error(call: object) -> None:
    """Nothing is made up for an empty list."""
    with pytest.raises(ValueError, match="no values"):
        call([])  # type: ignore[operator]  # a parametrised callable


def test_wrong_arguments_name_the_value() -> None:
    """The bad value stands in the message."""
    with pytest.raises(ValueError, match="101"):
        stats.percentile([1.0], 101)
    with pytest.raises(ValueError, match=r"0\.5"):
        stats.trimmed([1.0], 0.5)
    with pytest.raises(ValueError, match="2 numerators but 1"):
        stats.ratio_ci([1, 2], [1])


@pytest.mark.parametrize(
    ("num_free", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (9, 2.2622), (29, 2.0452)]
)
def test_t_quantile_matches_the_table(num_free: int, expected: float) -> None:
    """Student's 0.975 quantiles are within 0.2 % of the printed table."""
    assert stats.t_quantile(0.975, num_free) == pytest.approx(expected, rel=2e-3)
    assert stats.t_quantile(0.025, num_free) == pytest.approx(-expected, rel=2e-3)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_intervals_cover_the_truth_despite_autocorrelation(rho: float) -> None:
    """Of 95 % intervals over autocorrelated steps at least 85 % hold the truth (independent-values intervals: 50 %)."""
    rng = random.Random(7)
    num_hits_mean = num_hits_ratio = 0
    for _ in range(150):
        series = _ar1(rng, 400, rho)
        low, high = stats.mean_ci(series) or (0, 0)
        num_hits_mean += low <= 10 <= high
        low, high = stats.ratio_ci([value * 0.3 for value in series[:200]], [3 + x * 0 for x in series[:200]]) or (0, 0)
        num_hits_ratio += low <= 1.0 <= high
    assert num_hits_mean >= 0.85 * 150
    assert num_hits_ratio >= 0.80 * 150


def test_few_values_give_no_interval() -> None:
    """An interval that cannot be had is None, not a number."""
    assert stats.mean_ci([1.0, 2.0, 3.0]) is None
    assert stats.ratio_ci([1.0, 1.0], [2.0, 2.0]) is None
    assert stats.ratio_ci([0.0] * 9, [0.0] * 9) is None


steps = st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e9)), min_size=4, max_size=120)


@settings(deadline=None)
@given(steps)
def test_a_share_and_its_interval_stay_between_0_and_1(pairs: list[tuple[float, float]]) -> None:
    """The interval of a stall fraction holds the fraction, and both lie in 0..1."""
    stalls = [frac * step for frac, step in pairs]
    lengths = [step for _, step in pairs]
    interval = stats.ratio_ci(stalls, lengths)
    assert interval is not None
    ratio = sum(stalls) / sum(lengths)
    assert 0 <= interval[0] <= ratio + 1e-9
    assert ratio - 1e-9 <= interval[1] <= 1
    assert interval == stats.ratio_ci(stalls, lengths)


def test_constant_steps_have_no_uncertainty() -> None:
    """Without spread the interval is the value."""
    assert stats.mean_ci([5.0] * 50) == (5.0, 5.0)
    assert stats.ratio_ci([1.0] * 50, [4.0] * 50) == (0.25, 0.25)
