"""The simulated device: a fixed step that uses no CPU and is always labelled."""

import sys
import time
import types

import pytest

from headrace.testing import FakeClock, SimulatedDevice

MS = 1_000_000


def test_a_step_ends_at_its_deadline_whatever_its_body_cost():
    """A step lasts exactly step_ms, because the sleep goes to an absolute deadline."""
    clock = FakeClock()
    device = SimulatedDevice(40, clock=clock)
    with device.step():
        clock.advance(15 * MS)
    assert clock.monotonic_ns() == 40 * MS
    assert clock.sleeps_ns == [25 * MS]
    assert (device.num_steps, device.num_overruns) == (1, 0)


def test_a_longer_body_is_an_overrun_and_is_not_slept_on_top():
    """A body longer than the step is counted and never shortened or prolonged."""
    clock = FakeClock()
    device = SimulatedDevice(40, clock=clock)
    with device.step():
        clock.advance(55 * MS)
    assert clock.monotonic_ns() == 55 * MS
    assert (device.num_steps, device.num_overruns) == (1, 1)


def test_an_error_in_the_body_passes_through_at_once():
    """The user's exception is neither swallowed nor delayed."""
    clock = FakeClock()
    device = SimulatedDevice(40, clock=clock)
    with pytest.raises(KeyError), device.step():
        raise KeyError("user's own")
    assert clock.sleeps_ns == []
    assert device.num_steps == 0


def test_a_step_entered_twice_is_misuse():
    """One step object is one step: reuse raises instead of giving a wrong time."""
    step = SimulatedDevice(40, clock=FakeClock()).step()
    with step:
        pass
    with pytest.raises(RuntimeError, match="entered twice"), step:
        pass


@pytest.mark.parametrize("step_ms", [0, -1, float("nan")])
def test_a_step_without_length_is_refused(step_ms):
    """The bad value stands in the message."""
    with pytest.raises(ValueError, match="step_ms must be above 0, got"):
        SimulatedDevice(step_ms)


def test_it_announces_itself_to_the_agent(monkeypatch):
    """Under headrace the report says simulated, because the device says so itself."""
    noted = []
    agent = types.ModuleType("_headrace_agent")
    agent.note_simulated = lambda: noted.append(True)
    monkeypatch.setitem(sys.modules, "_headrace_agent", agent)
    SimulatedDevice(40)
    assert noted == [True]


def test_an_agent_that_knows_nothing_of_it_does_no_harm(monkeypatch):
    """A program must run under any agent, also an older one."""
    monkeypatch.setitem(sys.modules, "_headrace_agent", types.ModuleType("_headrace_agent"))
    SimulatedDevice(40)


def test_the_real_clock_sleeps_without_using_cpu():
    """Ten real steps of 20 ms last at least 200 ms and cost a small part of it in CPU: nothing spins."""
    device = SimulatedDevice(20)
    start_ns, start_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    for _ in range(10):
        with device.step():
            pass
    assert time.monotonic_ns() - start_ns >= 200 * MS
    assert time.thread_time_ns() - start_cpu_ns < 20 * MS


def test_the_fake_clock_never_goes_back():
    """The fake detects misuse that a real clock could not show."""
    with pytest.raises(ValueError, match="never goes back"):
        FakeClock().advance(-1)
