"""A simulated device: a step of fixed length that uses no CPU. It is always labelled as simulated.

With it a machine without an accelerator can answer "could this box feed a device with a 20 ms step?". The trainer's
thread sleeps to a deadline, so that the cores stay free for the workers, exactly as they are while a real device
computes. Nothing here spins.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

#: The agent's module inside an observed program. It is looked up, never imported: bare programs do not have it.
AGENT_MODULE = "_headrace_agent"


class SleepingClock(Protocol):
    """A clock that can also be waited on: what the simulated device needs of time."""

    def monotonic_ns(self) -> int:
        """Returns the monotonic clock in ns."""

    def sleep_until(self, deadline_ns: int) -> None:
        """Blocks the calling thread, without using CPU, until ``deadline_ns`` of the monotonic clock."""


class _SystemClock:
    """The machine's monotonic clock."""

    def monotonic_ns(self) -> int:
        """Returns ``time.monotonic_ns()``."""
        return time.monotonic_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        """Sleeps to an absolute deadline, so that late wake-ups do not add up. Returns at once when it has passed."""
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)


class SimulatedDevice:
    """A device whose every step lasts ``step_ms`` and costs no CPU.

    Used in the trainer's thread as ``with device.step(): ...``: the body stands for the kernels' launch, and leaving
    the block waits for the device. A body longer than the step makes the step longer and is counted in
    ``num_overruns``: a real device would have been starved there too.

    Attributes:
        num_steps: Steps finished.
        num_overruns: Steps whose body was longer than ``step_ms``.
    """

    def __init__(self, step_ms: float, *, clock: SleepingClock | None = None) -> None:
        """Announces itself to headrace's agent, when there is one, so that the report says "simulated".

        Args:
            step_ms: Length of one step in ms, above 0.
            clock: Where time comes from; the machine's own by default.

        Raises:
            ValueError: ``step_ms`` is not above 0.
        """
        if not step_ms > 0:
            raise ValueError(f"step_ms must be above 0, got {step_ms!r}")
        self._step_ns = round(step_ms * 1e6)
        self._clock: SleepingClock = clock or _SystemClock()
        self.num_steps = 0
        self.num_overruns = 0
        _announce()

    def step(self) -> _Step:
        """Returns the context manager of one step. Not reentrant: one step runs at a time, as on a stream."""
        return _Step(self, self._clock, self._step_ns)


class _Step:
    """One step, from the launch of its work to the end of its fixed time."""

    def __init__(self, device: SimulatedDevice, clock: SleepingClock, step_ns: int) -> None:
        self._device = device
        self._clock = clock
        self._step_ns = step_ns
        self._deadline_ns: int | None = None

    def __enter__(self) -> None:
        if self._deadline_ns is not None:
            raise RuntimeError("a step of the simulated device was entered twice; call device.step() for each step")
        self._deadline_ns = self._clock.monotonic_ns() + self._step_ns

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._deadline_ns is not None
        if exc_type is not None:
            return
        if self._clock.monotonic_ns() > self._deadline_ns:
            self._device.num_overruns += 1
        self._clock.sleep_until(self._deadline_ns)
        self._device.num_steps += 1


def _announce() -> None:
    """Tells the agent in this process, if any, that steps are simulated."""
    note = getattr(sys.modules.get(AGENT_MODULE), "note_simulated", None)
    if note is not None:
        note()
