"""The right cause, for runs whose truth is known because they were made so.

Sizes and not constants are promised here: a planted cause that takes well over a tenth of the time must win, whatever
the batch takes and however many workers there are.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core import analyse as core
from headrace.core import pipeline, whatif
from tests.unit.synth import MS, US, S, Sampling, Service, Trainer, machine, observe

#: From a small tabular batch to a video's.
batch_ns = st.integers(5, 500).map(lambda ms: ms * MS)
DATA = {
    "storage", "workers", "preprocess", "oversubscribed", "collate", "transport", "pin", "straggler", "epoch", "memory",
}  # fmt: skip
few = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def short_predictions():
    """Whether a prediction is right is tested elsewhere: a short one will do to tell causes apart."""
    patch = pytest.MonkeyPatch()
    patch.setattr(whatif, "predict", functools.partial(pipeline.predict, num_steps=150))
    patch.setattr(pipeline, "SEARCH_STEPS", 100)
    patch.setattr(pipeline, "NUM_BLOCKS", 2)
    yield
    patch.undo()


def finding_of(trainers, host=None, how=None):
    _, finding = core.analyse(observe(trainers if isinstance(trainers, list) else [trainers], host or machine(64), how))
    assert finding is not None
    return finding


def run(body_ns, epochs=1, body=None, **loader):
    trainer = Trainer()
    loader = {"batches": 60, "worker_start_ns": 100 * US, **loader}
    trainer.train(trainer.loader(**loader), epochs, body_ns, **(body or {}))
    return trainer


@few
@given(batch_ns, st.integers(0, 8), st.integers(1, 64), st.floats(0.0, 0.015))
def test_a_loop_that_hardly_waits_is_compute(body_ns, num_workers, cores, ratio):
    """With workers that keep up, or a fetch below 1.5 % of the step, nothing is to gain from data."""
    fetch = body_ns * max(num_workers, 0.7) * (ratio if num_workers == 0 else 0.5)
    fetch_ns = int(min(fetch, body_ns * 0.8 * max(num_workers, 1)))
    trainer = run(
        body_ns, num_workers=num_workers, fetch=Service(on_cpu_ns=fetch_ns // 2, blocked_ns=fetch_ns // 2), batches=200
    )
    assert finding_of(trainer, machine(cores)).cause == "compute"


@few
@given(
    batch_ns, st.integers(0, 8), st.floats(0.0, 0.018), st.sampled_from(["fetch", "collate", "transport", "start"]),
    st.sampled_from([{}, {"cpu_quota_cores": 2.0}]),
)  # fmt: skip
def test_less_than_two_percent_of_waiting_is_never_a_data_problem(body_ns, num_workers, ratio, place, limits):
    """Whatever part of the data path the wait is in: below 2 % of the time no data cause is named."""
    wait = int(body_ns * ratio)
    stages = {
        "fetch": {"fetch": Service(on_cpu_ns=wait)},
        "collate": {"fetch": Service(), "collate_ns": wait},
        "transport": {"fetch": Service(), "deserialise_ns": wait},
        "start": {"fetch": Service(), "worker_start_ns": int(wait * 50 / max(num_workers, 1))},
    }[place]
    if place == "transport" and not num_workers:
        return
    trainer = run(body_ns, num_workers=num_workers, batches=100, **stages)
    assert finding_of(trainer, machine(8, **limits)).cause not in DATA


@few
@given(batch_ns, st.integers(0, 8), st.integers(1, 64), st.floats(0.1, 0.8))
def test_blocked_fetches_are_storage_whatever_the_workers(fetch_ns, num_workers, cores, body_frac):
    """A fetch that is neither on a core nor ready waits for something: storage, whatever the workers and cores."""
    service = Service(on_cpu_ns=fetch_ns // 20, blocked_ns=fetch_ns - fetch_ns // 20)
    trainer = run(int(fetch_ns * body_frac / max(num_workers, 1)), num_workers=num_workers, fetch=service)
    assert finding_of(trainer, machine(cores)).cause == "storage"


@few
@given(batch_ns, st.integers(0, 8), st.floats(0.1, 0.8))
def test_busy_fetches_beside_idle_cores_need_workers(fetch_ns, num_workers, body_frac):
    """The dataset's code is on a core while others idle: more workers."""
    trainer = run(
        int(fetch_ns * body_frac / max(num_workers, 1)), num_workers=num_workers, fetch=Service(on_cpu_ns=fetch_ns)
    )
    assert finding_of(trainer, machine(max(2 * num_workers, 4))).cause == "workers"


@few
@given(batch_ns, st.integers(1, 8), st.floats(0.05, 0.6))
def test_busy_fetches_on_all_cores_are_preprocess(fetch_ns, num_workers, body_frac):
    """Every allowed core is at the dataset's code already: the work itself must shrink."""
    # Long enough that the workers' idling at the epoch's end is no matter.
    service, batches = Service(on_cpu_ns=fetch_ns), 40 * num_workers
    trainer = run(int(fetch_ns * body_frac / num_workers), num_workers=num_workers, fetch=service, batches=batches)
    assert finding_of(trainer, machine(num_workers)).cause == "preprocess"


@few
@given(batch_ns, st.integers(2, 8), st.integers(2, 4))
def test_a_quota_that_throttles_is_oversubscribed(fetch_ns, num_workers, factor):
    """Workers throttled by a cgroup's quota on a machine with many cores: lift the quota."""
    quota = num_workers / factor
    service = Service(on_cpu_ns=fetch_ns, run_queue_ns=fetch_ns * (factor - 1))
    trainer = run(fetch_ns // num_workers // 2, num_workers=num_workers, fetch=service)
    host = machine(4 * num_workers, cpu_quota_cores=quota)
    assert finding_of(trainer, host, Sampling(throttled_frac=0.5)).cause == "oversubscribed"


@few
@given(batch_ns, st.integers(2, 8))
def test_a_narrow_affinity_is_oversubscribed(fetch_ns, num_workers):
    """Workers that may use one core of many: lift the affinity."""
    service = Service(on_cpu_ns=fetch_ns, run_queue_ns=fetch_ns * (num_workers - 1))
    trainer = run(fetch_ns // num_workers // 2, num_workers=num_workers, fetch=service)
    host = machine(4 * num_workers, allowed=1)
    assert finding_of(trainer, host, Sampling(narrow_cpus=1)).cause == "oversubscribed"


@few
@given(batch_ns, st.integers(2, 8))
def test_few_slow_batches_among_quick_ones_are_stragglers(slow_ns, num_workers):
    """One batch in thirty takes far longer than the ready ones ahead can bridge; the mean rate would do."""
    slow_ns = max(slow_ns, 100 * MS)
    body = slow_ns // 20
    quick, slow = Service(on_cpu_ns=body // 2), Service(on_cpu_ns=body // 2, blocked_ns=slow_ns)
    trainer = run(body, num_workers=num_workers, batches=150, fetch=lambda j: slow if j % 50 == 25 else quick)
    finding = finding_of(trainer)
    expected = "straggler" if finding.stall_frac > 0.08 else finding.cause
    assert finding.cause == expected


@few
@given(batch_ns, st.integers(0, 8), st.integers(1, 64))
def test_slow_batch_building_is_collate(collate_ns, num_workers, cores):
    """Most of a worker's time in collate_fn: collate, whoever runs it and wherever."""
    body = collate_ns // max(num_workers, 1) // 3
    trainer = run(body, num_workers=num_workers, fetch=Service(on_cpu_ns=collate_ns // 10), collate_ns=collate_ns)
    assert finding_of(trainer, machine(cores)).cause == "collate"


@few
@given(batch_ns, st.integers(1, 8), st.booleans())
def test_batches_that_are_long_on_their_way_are_transport(travel_ns, num_workers, receiving):
    """Quick fetches and a slow way to the trainer: transport, on either side of it."""
    side = "deserialise_ns" if receiving else "serialise_ns"
    step = travel_ns if receiving else travel_ns // num_workers
    trainer = run(
        step // 3, num_workers=num_workers, fetch=Service(on_cpu_ns=step // 20), prefetch_factor=1, **{side: travel_ns}
    )
    assert finding_of(trainer).cause == "transport"


@few
@given(batch_ns, st.integers(1, 8))
def test_a_pause_at_every_epoch_is_epoch(body_ns, num_workers):
    """Workers that take as long to start as the epoch takes to train."""
    trainer = run(
        body_ns,
        4,
        num_workers=num_workers,
        fetch=Service(on_cpu_ns=body_ns // 4),
        batches=20,
        worker_boot_ns=10 * body_ns,
    )
    finding = finding_of(trainer)
    assert finding.cause == "epoch"
    assert finding.changes[0].what == "persistent_workers"


@few
@given(batch_ns, st.integers(0, 8), st.sampled_from(["save", "gap", "validation"]))
def test_pauses_between_steps_are_outside(body_ns, num_workers, kind):
    """Checkpoints, pauses between epochs and validation loops are not the training loader's fault."""
    trainer = Trainer()
    quick = Service(on_cpu_ns=body_ns // 100)
    train = trainer.loader(num_workers=num_workers, fetch=quick, batches=20, worker_start_ns=0)
    held_out = trainer.loader(site="v.py:1", fetch=Service(on_cpu_ns=body_ns), batches=10)
    for _ in range(4):
        for number in train:
            trainer.body(body_ns)
            if kind == "save" and number % 10 == 4:
                trainer.save(8 * body_ns + 5 * MS)
            if kind == "validation" and number == 9:
                trainer.train(held_out, body_ns=body_ns, backward=False)
        if kind == "gap":
            trainer.spend(15 * body_ns, 0)
    assert finding_of(trainer).cause == "outside"


@few
@given(st.integers(20, 500).map(lambda ms: ms * MS), st.integers(2, 4), st.booleans())
def test_a_late_rank_is_rank(body_ns, num_ranks, data):
    """Where one rank is late, the others wait for it in backward, and the run's finding names the rank."""
    late = body_ns
    trainers = [Trainer(pid=1_000 * (rank + 1), rank=rank) for rank in range(num_ranks)]
    for trainer in trainers:
        is_late = trainer.rank == 1
        fetch = Service(on_cpu_ns=late if is_late and data else late // 200)
        wait = 0 if is_late else late
        own = late if is_late and not data else 0
        for _ in trainer.loader(fetch=fetch, batches=60):
            trainer.body(body_ns + wait + own, backward_ns=body_ns // 2 + wait)
    finding = finding_of(trainers)
    assert finding.cause == "rank"
    assert "rank 1" in str(finding.changes[0].line)


@few
@given(batch_ns, st.integers(1, 8))
def test_copied_pages_are_memory(fetch_ns, num_workers):
    """Workers whose CPU goes into page faults while their private memory grows: memory."""
    faults = int(fetch_ns * 0.6 / 600)
    trainer = run(
        fetch_ns // num_workers // 4,
        num_workers=num_workers,
        fetch=Service(on_cpu_ns=fetch_ns),
        minor_faults_per_batch=faults,
    )
    assert finding_of(trainer, machine(16), Sampling(fault_kept_frac=0.9)).cause == "memory"


@few
@given(batch_ns, st.integers(1, 8))
def test_reclaim_under_a_memory_limit_is_memory(fetch_ns, num_workers):
    """Workers blocked because the cgroup's memory is full: memory, not storage."""
    trainer = run(
        fetch_ns // num_workers // 4,
        num_workers=num_workers,
        fetch=Service(on_cpu_ns=fetch_ns // 4, blocked_ns=fetch_ns),
    )
    host = machine(16, memory_limit_bytes=1 << 30)
    how = Sampling(memory_bytes=(1 << 30) - 4096, memory_limit_hits_per_s=50, psi_memory_frac=0.3)
    assert finding_of(trainer, host, how).cause == "memory"


@few
@given(batch_ns, st.integers(2, 4))
def test_thread_pools_in_workers_are_oversubscribed(fetch_ns, num_workers):
    """Each worker runs a pool of threads on cores that the workers fill already."""
    service = Service(on_cpu_ns=fetch_ns // 2, run_queue_ns=fetch_ns // 2, threads=2.0)
    trainer = run(fetch_ns // num_workers // 4, num_workers=num_workers, fetch=service)
    assert finding_of(trainer, machine(num_workers)).cause == "oversubscribed"


@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_that_left_no_record_are_not_guessed_at(num_workers):
    """Without the workers' side the answer is ``unknown``, with two causes and what would separate them."""
    seen = observe([run(2 * MS, num_workers=num_workers, fetch=Service(on_cpu_ns=40 * MS))], machine(8))
    seen.traces = [trace for trace in seen.traces if not trace.is_worker]
    _, finding = core.analyse(seen)
    assert finding.cause == "unknown"
    assert finding.confidence == "low"
    assert len(set(finding.between)) == 2
    assert finding.separate_with


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_very_short_runs_get_a_modest_answer(batches, num_workers, sampled):
    """A run of no or few steps, with or without samples, raises nothing and is never sure."""
    seen = observe([run(5 * MS, num_workers=num_workers, batches=batches, fetch=Service(blocked_ns=40 * MS))])
    if not sampled:
        seen.samples, seen.machine = [], None
    processes, finding = core.analyse(seen)
    assert len(processes) == 1
    if finding is not None:
        assert finding.confidence == "low"


@pytest.mark.parametrize("fetch", [Service(on_cpu_ns=40 * MS), Service(blocked_ns=40 * MS), Service()])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_any_sample_the_events_still_decide(fetch, num_workers):
    """Where ``/proc`` could not be read, fetches that block are still told from those that do not."""
    seen = observe([run(5 * MS, num_workers=num_workers, fetch=fetch)])
    seen.samples, seen.machine = [], None
    _, finding = core.analyse(seen)
    blocked, busy = fetch.blocked_ns > 0, fetch.on_cpu_ns > 0
    allowed = {"storage"} if blocked else {"workers", "preprocess", "unknown"} if busy else {"compute", "transport"}
    assert finding.cause in allowed


@few
@given(st.integers(0, 4), st.integers(1, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))
def test_every_finding_is_within_its_bounds(num_workers, on_cpu_ms, queue_ms, blocked_ms, body_ms):
    """Shares lie in 0..1, no predicted gain exceeds data for free, and every change has a line or says what."""
    service = Service(on_cpu_ns=on_cpu_ms * MS, run_queue_ns=queue_ms * MS, blocked_ns=blocked_ms * MS)
    trainer = run(body_ms * MS, 2, num_workers=num_workers, fetch=service, batches=30)
    processes, finding = core.analyse(observe([trainer], machine(4)))
    loader = processes[0].loaders[0]
    times = loader.time_frac
    assert sum(getattr(times, name) for name in times.__struct_fields__) == pytest.approx(1)
    assert 0 <= finding.share_frac <= 1
    assert finding.runner_up is None or finding.runner_up.cause != finding.cause
    ceiling = 1 / max(1 - loader.stall_frac, 1e-9)
    for change in finding.changes:
        assert change.what
        if change.speedup is not None:
            assert change.speedup <= max(ceiling * 1.02, 1 / (1 - min(finding.share_frac, 0.99))) + 0.01
            assert change.speedup_ci[0] <= change.speedup <= change.speedup_ci[1]


def test_the_loader_that_costs_most_is_the_subject():
    """Of several training loaders the run's finding is that of the one that holds it back."""
    trainer = Trainer()
    quick = trainer.loader(site="quick.py:1", fetch=Service(on_cpu_ns=1 * MS), batches=60)
    slow = trainer.loader(site="slow.py:1", fetch=Service(blocked_ns=30 * MS), batches=60)
    for _ in zip(quick, slow, strict=True):
        trainer.body(10 * MS)
    processes, finding = core.analyse(observe([trainer]))
    assert processes[0].loaders[0].site == "slow.py:1"
    assert finding.cause == "storage"


def test_warmup_steps_are_left_out():
    """``--warmup`` takes the first steps of the program out of every number."""
    trainer = Trainer()
    slow, quick = Service(blocked_ns=1 * S), Service(blocked_ns=1 * MS)
    trainer.train(trainer.loader(fetch=lambda j: slow if j < 5 else quick, batches=50), body_ns=20 * MS)
    seen = observe([trainer], warmup=5)
    processes, _ = core.analyse(seen)
    loader = processes[0].loaders[0]
    assert loader.num_steps == 45
    assert loader.stall_frac < 0.06
