"""What the outside samples say of a span of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.hostfacts import host_facts
from headrace.records.rundir import CgroupSample, HostSample, Machine, ProcSample
from tests.unit.synth import MS, S, Sampling, Service, Trainer, machine, samples


def proc(pid, **counters):
    return ProcSample(pid=pid, ppid=1, comm="python", state="R", num_threads=1, **counters)


def facts_of(rows, host=None, trainer=1, workers=()):
    return host_facts(rows, host, trainer, workers, 0, 100 * S)


def test_without_samples_nothing_is_known():
    """No sample, or one, gives None for every rate; what the machine has is still known."""
    for rows in ([], [HostSample(t_ns=5, procs=[proc(1, on_cpu_ns=5)], cpu_idle_ns=3)]):
        facts = facts_of(rows, machine(16, 4))
        assert facts.num_samples == 0
        assert (facts.machine_cores, facts.allowed_cores) == (16, 4)
        assert facts.idle_cores is None
        assert facts.worker_on_cpu_cores is None
        assert facts.job_cores is None
    assert facts_of([]).free_cores is None


def test_two_samples_at_one_moment_divide_by_nothing():
    """A clock that did not move gives no rates and no error."""
    rows = [HostSample(t_ns=5, procs=[proc(1, on_cpu_ns=n)], cpu_idle_ns=n, cpu_busy_ns=n) for n in (1, 2)]
    facts = facts_of(rows, machine())
    assert facts.idle_cores is None


def test_counters_that_no_sample_carries_are_none():
    """A kernel without schedstat, PSI or cgroups leaves None, never 0."""
    facts = facts_of([HostSample(t_ns=t * S, procs=[proc(1)]) for t in range(3)], Machine())
    assert facts.trainer_on_cpu_frac is None
    assert facts.worker_run_queue_cores is None
    assert facts.psi_memory_frac is None
    assert facts.throttled_frac is None
    assert facts.read_bytes_per_s is None
    assert facts.idle_cores is None
    assert facts.swap_bytes is None


def test_rates_are_means_over_the_span():
    """Growth over time: cores in CPU-seconds per second, bytes and faults per second."""
    rows = [
        HostSample(
            t_ns=t * S, cpu_idle_ns=3 * t * S, cpu_busy_ns=t * S, machine_busy_ns=2 * t * S, psi_io_ns=t * S // 4,
            cgroup=CgroupSample(
                usage_ns=t * S, throttled_ns=t * S // 10, memory_limit_hits=7 * t, memory_bytes=t * 100
            ),
            procs=[
                proc(1, on_cpu_ns=t * S // 2, run_queue_ns=t * S // 5, user_ns=t * S // 2),
                proc(
                    2, on_cpu_ns=t * S // 4, major_faults=3 * t, num_allowed_cpus=2,
                    user_ns=t * S // 8, system_ns=t * S // 8,
                ),
            ],
        )
        for t in range(5)
    ]  # fmt: skip
    facts = facts_of(rows, machine(8, 4, cpu_quota_cores=2.0, memory_limit_bytes=1000), workers=(2,))
    assert facts.idle_cores == pytest.approx(3)
    assert facts.machine_idle_cores == pytest.approx(6)
    assert facts.job_cores == pytest.approx(0.75)
    assert facts.outside_cores == pytest.approx(0.25)
    assert facts.trainer_on_cpu_frac == pytest.approx(0.5)
    assert facts.trainer_run_queue_frac == pytest.approx(0.2)
    assert facts.worker_on_cpu_cores == pytest.approx(0.25)
    assert facts.worker_system_frac == pytest.approx(0.5)
    assert facts.major_faults_per_s == pytest.approx(3)
    assert facts.memory_limit_hits_per_s == pytest.approx(7)
    assert facts.throttled_frac == pytest.approx(0.1)
    assert facts.quota_used_frac == pytest.approx(0.5)
    assert facts.psi_io_frac == pytest.approx(0.25)
    assert facts.memory_used_frac == pytest.approx(0.4)
    assert facts.narrow_cpus == 2
    assert facts.free_cores == pytest.approx(1.75)


def test_a_worker_born_within_the_span_counts_from_its_birth():
    """Workers that come and go add what they did within the span: from birth, or its first sample, to their last."""
    rows = [
        HostSample(t_ns=t * S, procs=[proc(10 + t, on_cpu_ns=5 * S), proc(11 + t, on_cpu_ns=2 * S)]) for t in range(4)
    ]
    facts = facts_of(rows, machine(), workers=range(10, 20))
    assert facts.worker_on_cpu_cores == pytest.approx((3 + 5 + 5 + 2) / 3)


def test_only_the_span_counts():
    """Samples before and after the loader's time are left out."""
    rows = [HostSample(t_ns=t * S, procs=[], cpu_idle_ns=(t * S if t > 10 else 0)) for t in range(20)]
    assert host_facts(rows, machine(), 1, (), 11 * S, 15 * S).idle_cores == pytest.approx(1)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 3), st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_worker_is_on_a_core_queued_or_blocked(num_workers, on_cpu_ms, queue_ms, blocked_ms):
    """The samples of a synthetic run give back the services it was made of."""
    service = Service(on_cpu_ns=on_cpu_ms * MS, run_queue_ns=queue_ms * MS, blocked_ns=blocked_ms * MS)
    trainer = Trainer()
    trainer.train(trainer.loader(num_workers=num_workers, fetch=service, batches=60, worker_start_ns=0), body_ns=0)
    host = machine(64)
    rows = samples([trainer], host, Sampling())
    workers = [process.pid for process in trainer.workers]
    begin = trainer.events[0].t0
    facts = host_facts(rows, host, trainer.pid, workers, begin, trainer.now - service.wall_ns)
    count = max(num_workers, 1)
    assert facts.worker_on_cpu_cores == pytest.approx(count * on_cpu_ms * MS / service.wall_ns, rel=0.25, abs=0.05)
    assert facts.worker_run_queue_cores == pytest.approx(count * queue_ms * MS / service.wall_ns, rel=0.25, abs=0.05)
