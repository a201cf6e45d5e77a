"""The DataLoader model: known answers, first-principles bounds, and what must be monotone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.pipeline import Config, Measured, floors_ns, predict, smallest_good, speedup
from headrace.core.stats import mean

MS = 1_000_000.0


def job(
    *, cpu: float = 0.0, blocked: float = 0.0, body: float = 1.0, num: int = 40, cores: float = 64, **more: Any
) -> Measured:
    """A job of equal batches; times in ms, no latency unless asked for."""
    more = {"body_on_cpu_frac": 0.0, "latency_ns": 0.0, **more}
    return Measured(fetch=[(cpu * MS, blocked * MS)] * num, body_ns=[body * MS] * num, cores=cores, **more)


def step_ms(measured: Measured, num_workers: int, **more: Any) -> float:
    """Predicted mean step in ms."""
    return mean_step_ns(measured, Config(num_workers=num_workers, **more), 300) / MS


def mean_step_ns(measured: Measured, config: Config, num_steps: int) -> float:
    """Predicted mean step in ns, without the cost of an interval."""
    return predict(measured, config, num_steps=num_steps, num_blocks=0).step_ns_mean


times_ns = st.floats(0, 50 * MS)
jobs = st.builds(
    Measured,
    fetch=st.lists(st.tuples(times_ns, times_ns), min_size=1, max_size=30),
    body_ns=st.lists(st.floats(0.1 * MS, 50 * MS), min_size=1, max_size=30),
    cores=st.floats(0.5, 16),
    collate_ns=st.floats(0, 5 * MS),
    serialise_ns=st.floats(0, 5 * MS),
    serve_ns=st.floats(0, 2 * MS),
    deserialise_ns=st.floats(0, 5 * MS),
    pin_ns=st.floats(0, 5 * MS),
    body_on_cpu_frac=st.floats(0, 1),
    body_threads=st.floats(1, 4),
    fetch_threads=st.floats(1, 4),
    shared_cpu_cores=st.floats(0, 2),
    steps_per_epoch=st.none() | st.integers(1, 200),
    worker_start_ns=st.floats(0, 50 * MS),
    worker_boot_ns=st.floats(0, 50 * MS),
)
configs = st.builds(
    Config,
    num_workers=st.integers(0, 8),
    prefetch_factor=st.integers(1, 4),
    persistent_workers=st.booleans(),
    pin_memory=st.booleans(),
    in_order=st.booleans(),
)
quick = settings(deadline=None, max_examples=40)


@quick
@given(jobs, configs)
def test_no_prediction_beats_first_principles(measured: Measured, config: Config) -> None:
    """The step is never below what any single resource needs; its interval holds the mean; the wait is part of it."""
    found = predict(measured, config, num_steps=60)
    assert found.step_ns_mean >= max(floors_ns(measured, config).values()) * (1 - 1e-9)
    assert 0 <= found.step_ns_lo <= found.step_ns_mean <= found.step_ns_hi
    assert -1e-3 <= found.wait_ns_mean <= found.step_ns_mean * (1 + 1e-9)


@quick
@given(jobs, configs)
def test_same_input_gives_the_same_prediction(measured: Measured, config: Config) -> None:
    """Nothing is drawn from an unseeded source."""
    assert predict(measured, config, num_steps=40) == predict(measured, config, num_steps=40)


@quick
@given(jobs, st.booleans())
def test_without_workers_the_step_is_exactly_the_sum(measured: Measured, pin: bool) -> None:
    """num_workers=0 with enough cores: body + fetch + collate, to the nanosecond."""
    alone = replace(measured, cores=8.0, shared_cpu_cores=0.0)
    found = predict(alone, Config(num_workers=0, pin_memory=pin))
    fetch = mean([cpu + blocked for cpu, (_, blocked) in zip(alone.fetch_cpu_ns(), alone.fetch, strict=True)])
    wait = fetch + (alone.pin_ns if pin else 0)
    assert found.step_ns_mean == pytest.approx(wait + mean(alone.body_ns), abs=1)
    assert found.wait_ns_mean == pytest.approx(wait, abs=1)
    assert found.bound in ("serial", "cores")


@quick
@given(jobs, configs, st.floats(1.1, 4))
def test_more_cores_are_never_slower(measured: Measured, config: Config, factor: float) -> None:
    """More cores do not lengthen the step (3 %: another order of events may cost a little)."""
    few = mean_step_ns(measured, config, 100)
    many = mean_step_ns(replace(measured, cores=measured.cores * factor), config, 100)
    assert many <= few * 1.03


@quick
@given(jobs, configs, st.floats(1.0, 3.0))
def test_longer_bodies_never_shorten_the_step(measured: Measured, config: Config, factor: float) -> None:
    """Slower bodies cannot make steps come faster."""
    slower = replace(measured, body_ns=[value * factor for value in measured.body_ns])
    assert mean_step_ns(slower, config, 100) >= mean_step_ns(measured, config, 100) * 0.97


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8, 16])
def test_blocked_fetches_scale_with_workers_until_the_body_binds(num_workers: int) -> None:
    """12 ms of waiting per batch over n workers against a body of 3 ms: max(3, 12 / n), whatever the cores."""
    assert step_ms(job(blocked=12, body=3, cores=1), num_workers) == pytest.approx(max(3, 12 / num_workers), rel=0.02)


@pytest.mark.parametrize(("num_workers", "expected"), [(1, 10), (2, 8), (4, 8), (8, 8)])
def test_work_on_cores_is_limited_by_the_cores(num_workers: int, expected: float) -> None:
    """10 ms of fetch and 6 ms of body on 2 cores: no number of workers goes below (10 + 6) / 2."""
    measured = job(cpu=10, body=6, cores=2, body_on_cpu_frac=1.0)
    assert step_ms(measured, num_workers, prefetch_factor=4) == pytest.approx(expected, rel=0.03)
    if num_workers > 1:
        assert predict(measured, Config(num_workers=num_workers, prefetch_factor=4)).bound == "cores"


def test_a_new_index_leaves_only_when_a_batch_is_returned() -> None:
    """With one task per worker the worker idles while the trainer deserialises (10 + 2); with two it does not."""
    measured = job(blocked=10, body=1, deserialise_ns=2 * MS)
    assert step_ms(measured, 1, prefetch_factor=1) == pytest.approx(12, rel=0.01)
    assert step_ms(measured, 1, prefetch_factor=2) == pytest.approx(10, rel=0.01)


class _Queue:
    """An index queue of a worker in virtual time: what is put is fetched at once, one after the other."""

    def __init__(self, clock: _Virtual, worker: int) -> None:
        self.clock, self.worker, self.free_ns = clock, worker, 0.0

    def put(self, task: tuple[int, int]) -> None:
        idx, fetch_idx = task
        began_ns = max(self.free_ns, self.clock.now_ns)
        self.free_ns = began_ns + self.clock.blocked_ns[fetch_idx % len(self.clock.blocked_ns)]
        self.clock.done.append((self.free_ns, idx))


class _Virtual:
    """torch's own iterator, its code untouched, over workers that live in virtual time."""

    def __init__(self, blocked_ns: list[float], config: Config) -> None:
        from torch.utils.data import dataloader

        self.blocked_ns, self.now_ns, self.done = blocked_ns, 0.0, list[tuple[float, int]]()
        it: Any = object.__new__(
            type("Bare", (dataloader._MultiProcessingDataLoaderIter,), {"__del__": lambda _: None})
        )
        num, indices = config.num_workers, itertools.count()
        it._num_workers, it._prefetch_factor, it._in_order = num, config.prefetch_factor, config.in_order
        it._persistent_workers = it._shutdown = it._pin_memory = False
        it._dataset_kind = dataloader._DatasetKind.Map
        it._send_idx = it._rcvd_idx = it._tasks_outstanding = 0
        it._task_info, it._workers_status, it._workers_num_tasks = {}, [True] * num, [0] * num
        it._worker_queue_idx_cycle = itertools.cycle(range(num))
        it._index_queues = [_Queue(self, worker) for worker in range(num)]
        it._next_index, it._get_data = indices.__next__, self.get
        for _ in range(num * config.prefetch_factor):
            it._try_put_index()
        self.iterator = it

    def get(self) -> tuple[int, None]:
        """Wait for the earliest batch that is not received yet."""
        first = min(self.done)
        self.done.remove(first)
        self.now_ns = max(self.now_ns, first[0])
        return first[1], None

    def run(self, body_ns: float, num_steps: int) -> float:
        """Play that many steps; returns the time."""
        for _ in range(num_steps):
            self.iterator._next_data()
            self.now_ns += body_ns
        return self.now_ns


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (1, 2), (2, 2), (3, 1), (4, 2), (4, 8), (7, 3)])
def test_the_order_of_events_is_that_of_torch(num_workers: int, prefetch: int, in_order: bool) -> None:
    """torch's own scheduling code, run in virtual time over stragglers, takes exactly the predicted time."""
    pytest.importorskip("torch")
    rng = random.Random(num_workers * 10 + prefetch)
    blocked_ns = [(150 if rng.random() < 0.03 else rng.uniform(4, 12)) * MS for _ in range(400)]
    config = Config(num_workers=num_workers, prefetch_factor=prefetch, in_order=in_order)
    measured = replace(job(body=2.5, num=400), fetch=[(0.0, value) for value in blocked_ns])
    torchs = _Virtual(blocked_ns, config)
    settled_ns = torchs.run(2.5 * MS, 2 * num_workers * prefetch)  # the model leaves out two fillings as well
    expected = (torchs.run(2.5 * MS, 2000) - settled_ns) / 2000
    assert mean_step_ns(measured, config, 2000) == pytest.approx(expected, rel=1e-6)


def test_latency_counts_only_where_nothing_is_prefetched() -> None:
    """A wake-up of 1 ms each way lengthens the step of one task at a time, and is hidden by a second."""
    measured = job(blocked=10, body=1, latency_ns=1 * MS)
    assert step_ms(measured, 1, prefetch_factor=1) == pytest.approx(12, rel=0.01)
    assert step_ms(measured, 1, prefetch_factor=2) == pytest.approx(10, rel=0.02)


def test_a_beat_of_slow_batches_falls_on_one_worker() -> None:
    """Every 4th batch slow and 4 workers: one worker does all slow ones, so 40 ms come every 4 steps; 3 share them."""
    fetch = [(0.0, 40 * MS if i % 4 == 0 else 1 * MS) for i in range(48)]
    measured = replace(job(body=2, num=48), fetch=fetch)
    assert step_ms(measured, 4) == pytest.approx(10, rel=0.03)
    assert step_ms(measured, 3, prefetch_factor=8) == pytest.approx(43 / 4 / 3, rel=0.1)


def test_head_of_line_blocking_is_named_and_cured() -> None:
    """Rare slow batches hold ready ones back: `order` binds; any order or more prefetch cures it."""
    fetch = [(0.0, 200 * MS if i % 50 == 7 else 4 * MS) for i in range(200)]
    measured = replace(job(body=5, num=200), fetch=fetch)
    held = predict(measured, Config(num_workers=4))
    assert held.bound == "order"
    assert held.step_ns_mean > 1.3 * 5 * MS
    assert step_ms(measured, 4, in_order=False) == pytest.approx(5, rel=0.05)
    assert step_ms(measured, 4, prefetch_factor=16) < held.step_ns_mean / MS * 0.9


@quick
@given(
    st.lists(st.sampled_from([2.0, 4.0, 150.0]), min_size=20, max_size=60),
    st.integers(1, 6),
    st.integers(1, 4),
    st.floats(0.5, 20),
)
def test_any_order_is_never_slower_for_blocked_stragglers(
    blocked: list[float], num_workers: int, prefetch: int, body: float
) -> None:
    """Delivering what is ready costs nothing (5 %: another worker may get the next slow batch)."""
    measured = replace(job(body=body), fetch=[(0.0, value * MS) for value in blocked])
    strict = step_ms(measured, num_workers, prefetch_factor=prefetch)
    assert step_ms(measured, num_workers, prefetch_factor=prefetch, in_order=False) <= strict * 1.05


def test_helpers_and_the_fetch_share_one_interpreter() -> None:
    """Transport delays an on-CPU fetch (5 + 2 + 1) and hides behind a blocked one (max(5, 3))."""
    moving = {"serialise_ns": 2 * MS, "serve_ns": 1 * MS}
    assert step_ms(job(cpu=5, body=0.5, **moving), 1) == pytest.approx(8, rel=0.02)
    assert step_ms(job(blocked=5, body=0.5, **moving), 1) == pytest.approx(5, rel=0.02)


def test_the_trainer_pays_for_receiving_unless_a_pin_thread_does() -> None:
    """Deserialising and being served are inside next(); with pin_memory they overlap the body, and pin may bind."""
    measured = job(blocked=1, body=3, deserialise_ns=2 * MS, serve_ns=1 * MS, pin_ns=4 * MS)
    assert step_ms(measured, 4) == pytest.approx(6, rel=0.01)
    assert step_ms(measured, 4, pin_memory=True) == pytest.approx(7, rel=0.02)
    assert predict(measured, Config(num_workers=4, pin_memory=True)).bound == "pin"
    assert predict(replace(measured, deserialise_ns=9 * MS), Config(num_workers=4)).bound == "transport"


def test_others_on_the_machine_take_their_share() -> None:
    """Two busy strangers on two cores leave one of two fair shares each to a CPU-bound loader."""
    measured = job(cpu=10, body=0.1, cores=2)
    alone, crowded = step_ms(measured, 2), step_ms(replace(measured, shared_cpu_cores=2.0), 2)
    assert crowded == pytest.approx(2 * alone, rel=0.05)


def test_epochs_cost_their_start_and_persistent_workers_save_it() -> None:
    """An epoch of 20 steps with 2 workers at 100 ms each to start: 10 ms more per step, and filling the pipeline."""
    measured = job(blocked=4, body=5, steps_per_epoch=20, worker_start_ns=100 * MS)
    fresh = predict(measured, Config(num_workers=2))
    kept = predict(measured, Config(num_workers=2, persistent_workers=True))
    assert fresh.step_ns_mean / MS == pytest.approx(5 + 10 + 4 / 20, rel=0.02)
    assert kept.step_ns_mean / MS == pytest.approx(5 + 4 / 20, rel=0.02)
    assert fresh.bound == "epoch"


def test_booting_workers_share_the_cores() -> None:
    """Four interpreters of 100 ms each on two cores need 200 ms before the first batch."""
    measured = job(blocked=1, body=1, cores=2, steps_per_epoch=100, worker_boot_ns=100 * MS)
    assert predict(measured, Config(num_workers=4)).step_ns_mean / MS == pytest.approx(1 + 2.01, rel=0.02)


def test_a_longer_measurement_narrows_the_interval() -> None:
    """Rare slow batches seen twice in 100 leave more doubt than seen 40 times in 2000."""

    def width(num: int) -> float:
        fetch = [(0.0, 100 * MS if i * 7919 % 50 == 0 else 4 * MS) for i in range(num)]
        found = predict(replace(job(body=1, num=num), fetch=fetch), Config(num_workers=1))
        return (found.step_ns_hi - found.step_ns_lo) / found.step_ns_mean

    assert width(2000) < width(100)
    assert width(2000) < 0.3


def test_a_window_of_a_long_measurement_keeps_the_mean() -> None:
    """More batches than simulated steps: the window that is replayed has the mean of all, within 3 %."""
    fetch = [(0.0, 300 * MS if i % 211 == 0 else 4 * MS) for i in range(6000)]
    found = predict(replace(job(body=1), fetch=fetch), Config(num_workers=1), num_steps=1500)
    assert found.step_ns_mean == pytest.approx(mean([blocked for _, blocked in fetch]), rel=0.03)


def test_the_smallest_good_configuration_is_chosen() -> None:
    """12 ms blocked against a 3 ms body needs 4 workers and no more; memory may allow fewer."""
    measured = job(blocked=12, body=3)
    candidates = [Config(num_workers=n) for n in (8, 6, 5, 4, 3, 2, 1, 0)]
    assert smallest_good(measured, candidates).num_workers == 4
    assert smallest_good(measured, candidates, max_workers=3).num_workers == 3
    assert smallest_good(measured, candidates, tolerance_frac=0.4).num_workers == 3
    assert smallest_good(job(blocked=0, body=3), candidates).num_workers == 0
    with pytest.raises(ValueError, match="at most -1"):
        smallest_good(measured, candidates, max_workers=-1)


@settings(deadline=None, max_examples=12)
@given(jobs)
def test_the_chosen_configuration_is_within_the_tolerance_of_the_best(measured: Measured) -> None:
    """Stopping the search early never costs more than the tolerance."""
    candidates = [Config(num_workers=n) for n in (0, 1, 2, 4, 8)]
    chosen = smallest_good(measured, candidates)
    steps = {config: mean_step_ns(measured, config, 500) for config in candidates}
    assert steps[chosen] <= min(steps.values()) * 1.0101


def test_speedup_is_the_ratio_of_step_times() -> None:
    """From serial 15 ms to a 3 ms body: 5x if the model agrees with the measurement, else both views."""
    measured = job(blocked=12, body=3)
    ratio, (low, high) = speedup(measured, Config(num_workers=0), Config(num_workers=8), 15 * MS)
    assert ratio == pytest.approx(5, rel=0.02)
    assert low < 5 < high
    ratio, (low, high) = speedup(measured, Config(num_workers=0), Config(num_workers=8), 18 * MS)
    assert low < 5 < ratio < 6 < high


def test_work_per_prediction_is_bounded() -> None:
    """A prediction of 1500 steps with its interval costs at most 60 events per step (0.1 s), whatever the workers."""
    fetch = [(5 * MS, (200 if i % 40 == 0 else 5) * MS) for i in range(1000)]
    measured = Measured(
        fetch=fetch,
        body_ns=[4 * MS] * 1000,
        cores=4,
        body_on_cpu_frac=0.5,
        serialise_ns=MS,
        serve_ns=MS,
        deserialise_ns=MS,
        pin_ns=MS,
    )
    for config in (Config(num_workers=2), Config(num_workers=32, prefetch_factor=4, pin_memory=True)):
        assert predict(measured, config).num_events <= 60 * 1500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fetch": []}, "0 fetches"),
        ({"cores": 0.0}, "cores is 0"),
        ({"body_on_cpu_frac": 1.5}, "1.5"),
        ({"collate_ns": [1.0]}, "1 collates"),
    ],
)
def test_impossible_measurements_are_refused(change: dict[str, Any], words: str) -> None:
    """The bad value stands in the message."""
    with pytest.raises(ValueError, match=words):
        replace(job(), **change)


def test_impossible_configurations_are_refused() -> None:
    """A loader cannot have fewer than no workers."""
    with pytest.raises(ValueError, match="num_workers=-1"):
        Config(num_workers=-1)
