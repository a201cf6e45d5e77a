"""Numbers are written with a unit, three digits, and never a 0 for what was not measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core import units


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (870, "870 ns"),
        (999_960, "1 ms"),
        (4_120.0, "4.12 us"),
        (12_340_000, "12.3 ms"),
        (999_700_000, "1 s"),
        (67_300_000_000, "67.3 s"),
        (720e9, "12 min"),
        (5 * 3600e9, "5 h"),
    ],
)
def test_a_time_gets_the_unit_that_fits_it(ns: float, text: str) -> None:
    """A time is written with three digits in the unit in which it is easiest to read."""
    assert units.duration(ns) == text


@pytest.mark.parametrize(
    ("frac", "text"),
    [(0.0, "0 %"), (0.0004, "< 0.1 %"), (0.0421, "4.2 %"), (0.0996, "10 %"), (0.612, "61 %"), (1.0, "100 %")],
)
def test_percent(frac: float, text: str) -> None:
    """A ratio is written in percent, and what is there but tiny is not written as 0."""
    assert units.percent(frac) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (512, "512 bytes"), (1023.9, "1 KiB"), (9.2 * 2**20, "9.2 MiB"), (2.0**60, "1,024 PiB")],
)
def test_size(num_bytes: float, text: str) -> None:
    """Bytes are written in binary units."""
    assert units.size(num_bytes) == text


def test_missing_values_are_said_in_words() -> None:
    """Every function says "not measured" for None and for NaN, and never 0."""
    single = [units.number, units.duration, units.ms, units.percent, units.size, units.speedup]
    for write in single:
        assert write(None) == units.MISSING
        assert write(float("nan")) == units.MISSING
    assert units.rate(None, "samples") == units.percent_range(None) == units.MISSING
    assert units.speedup_range(None, None) == units.quantity(None, "frac") == units.MISSING
    assert units.plural(None, "step") == "steps not measured"


def test_rates_gains_and_counts() -> None:
    """Rates say what they count, gains carry their interval, nouns follow their number."""
    assert units.rate(1183.2, "samples") == "1,183 samples/s"
    assert units.ms(12_340_000) == "12.3 ms"
    assert units.speedup_range(2.31, (2.05, 2.52)) == "2.31x (2.05x to 2.52x)"
    assert units.plural(1, "worker") == "1 worker"
    assert units.plural(1200, "step") == "1,200 steps"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.83, "frac", "83 %"),
        (139.2e6, "ns", "139 ms"),
        (9_646_899, "bytes", "9.2 MiB"),
        (148_213_555, "bytes_per_s", "141 MiB/s"),
        (148_213_555, "bytes/s", "141 MiB/s"),
        (3.25, "1/s", "3.25 per second"),
        (11.4, "cores", "11.4 cores"),
        (7, "count", "7"),
        ("nfs4 at /mnt", "text", "nfs4 at /mnt"),
        (True, "text", "yes"),
        (3.0, "samples_per_s", "3 samples/s"),
    ],
)
def test_evidence_values(value: float | str, unit: str, text: str) -> None:
    """A value of an evidence row is written in its own unit; an unknown unit follows the number."""
    assert units.quantity(value, unit) == text


@given(st.floats(min_value=0, max_value=1e18))
def test_times_and_sizes_never_overflow_their_unit(value: float) -> None:
    """No time or size is written as 1000 of a unit that has a larger one, and none in exponents."""
    time, size = units.duration(value), units.size(value)
    assert "e" not in time.split()[0]
    assert "e" not in size.split()[0]
    assert not (time.endswith((" ns", " us", " ms")) and len(time.split()[0].split(".")[0]) > 3)
