"""The clock of the machine, behind a Protocol so that tests can bring their own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from. Any thread may call it."""

    def monotonic_ns(self) -> int:
        """Nanoseconds on the clock that all processes of a machine share; only differences mean something."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970; jumps when somebody sets the clock, so it is only ever printed."""
        ...


class RealClock:
    """The kernel's clocks."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of ``CLOCK_MONOTONIC``."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """Nanoseconds of ``CLOCK_REALTIME``."""
        return time.time_ns()
