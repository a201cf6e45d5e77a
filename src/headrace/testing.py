"""Public fakes: stand-ins for outside things that detect misuse instead of hiding it."""

from __future__ import annotations

from headrace.host.simulated import SimulatedDevice, SleepingClock

__all__ = ["FakeClock", "SimulatedDevice", "SleepingClock"]


class FakeClock:
    """A ``SleepingClock`` (and ``host.clock.Clock``) that moves only when it is told to: tests without sleeping.

    Attributes:
        sleeps_ns: How long each sleep would have blocked.
    """

    def __init__(self, start_ns: int = 0) -> None:
        """Starts at ``start_ns`` (ns, at least 0)."""
        self._now_ns = start_ns
        self.sleeps_ns: list[int] = []

    def monotonic_ns(self) -> int:
        """Returns the fake time in ns."""
        return self._now_ns

    def unix_ns(self) -> int:
        """Returns the fake time too: it started at 1970."""
        return self._now_ns

    def advance(self, num_ns: int) -> None:
        """Moves time forward by ``num_ns``.

        Raises:
            ValueError: ``num_ns`` is negative; a monotonic clock never goes back.
        """
        if num_ns < 0:
            raise ValueError(f"a monotonic clock never goes back, got {num_ns} ns")
        self._now_ns += num_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Jumps to ``deadline_ns`` at once, or stays where it is when that has passed."""
        left_ns = max(0, deadline_ns - self._now_ns)
        self.sleeps_ns.append(left_ns)
        self._now_ns += left_ns
