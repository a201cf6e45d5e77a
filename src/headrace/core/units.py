"""How numbers are written for people: the only place where percent, ms and MiB exist. Pure.

Every function takes ``None`` for "not measured" and says so in words; none of them turns it into 0.
"""

from __future__ import annotations

import math

MISSING = "not measured"

_TIMES = ((1_000, "ns", 1), (1_000_000, "us", 1_000), (1_000_000_000, "ms", 1_000_000), (120e9, "s", 1_000_000_000))
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def number(value: float | int | None) -> str:
    """Three significant digits below 1000, whole numbers with separators above: ``0.0123``, ``12.3``, ``1,234``."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    digits = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if "e" in digits else digits


def duration(ns: float | None) -> str:
    """A time with the unit that fits it: ``870 ns``, ``12.3 ms``, ``4.5 s``, ``12 min``.

    Args:
        ns: Nanoseconds, or None.
    """
    if ns is None or not math.isfinite(ns):
        return MISSING
    for limit, unit, divisor in _TIMES:
        # The limit is asked of the rounded value, so that 999.96 us is "1 ms" and never "1000 us".
        if float(f"{abs(ns):.3g}") < limit:
            return f"{number(float(ns) / divisor)} {unit}"
    minutes = ns / 60e9
    return f"{number(float(round(minutes)))} min" if abs(minutes) < 120 else f"{number(minutes / 60)} h"


def ms(ns: float | None) -> str:
    """A time always in milliseconds, for columns that are compared: ``0.87 ms``, ``1,234 ms``."""
    return MISSING if ns is None or not math.isfinite(ns) else f"{number(float(ns) / 1e6)} ms"


def percent(frac: float | None) -> str:
    """A ratio in 0..1 as percent: ``61 %``, ``4.2 %`` below ten, ``< 0.1 %`` for what is there but tiny."""
    value = math.nan if frac is None else frac * 100
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0 %"
    if abs(value) < 0.1:
        return "< 0.1 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"


def percent_range(ci: tuple[float, float] | None) -> str:
    """An interval of ratios: ``58 % to 64 %``."""
    return MISSING if ci is None else f"{percent(ci[0])} to {percent(ci[1])}"


def size(num_bytes: float | None) -> str:
    """Bytes in binary units: ``512 bytes``, ``9.2 MiB``."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return MISSING
    value, unit = float(num_bytes), 0
    while abs(value) >= 1023.5 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{number(value)} {_SIZES[unit]}"


def rate(per_s: float | None, what: str) -> str:
    """A rate with what it counts: ``1,204 samples/s``."""
    return MISSING if per_s is None or not math.isfinite(per_s) else f"{number(float(per_s))} {what}/s"


def speedup(ratio: float | None) -> str:
    """A ratio of step rates: ``2.31x``."""
    return MISSING if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}x"


def speedup_range(ratio: float | None, ci: tuple[float, float] | None) -> str:
    """A predicted speed-up with its interval: ``2.31x (2.05x to 2.60x)``."""
    if ratio is None or ci is None:
        return speedup(ratio)
    return f"{speedup(ratio)} ({speedup(ci[0])} to {speedup(ci[1])})"


def plural(count: int | None, noun: str) -> str:
    """A count with its noun: ``1 step``, ``1,200 steps``."""
    if count is None:
        return f"{noun}s {MISSING}"
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def quantity(value: float | int | str | bool | None, unit: str) -> str:
    """A value of an evidence row in its unit (see ``records.run.Evidence``); an unknown unit follows the number."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    known = {
        "frac": percent,
        "ns": duration,
        "bytes": size,
        "count": number,
        "text": number,
        "bytes/s": lambda v: f"{size(v)}/s",
        "1/s": lambda v: f"{number(v)} per second",
        "ratio": speedup,
    }
    unit = unit.replace("_per_", "/")
    return known[unit](value) if unit in known else f"{number(value)} {unit}"
