"""The schedule: every batch delivered once and in order, whatever dies, is stolen or resized meanwhile."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core import schedule as schedule_module
from headrace.core.schedule import KILLS_OF_ONE_BATCH, Schedule, TaskKind


class ScheduleMachine(RuleBasedStateMachine):
    """An engine that obeys, workers that answer, die and are replaced, against the rows that were really made."""

    @initialize(
        num_workers=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        total=st.integers(0, 25),
        first=st.integers(0, 6),
    )
    def start(self, num_workers, prefetch, in_order, total, first):
        self.schedule = Schedule(num_workers, prefetch, in_order=in_order, first_batch=first)
        self.total, self.first = first + total, first
        self.sent = {worker: [] for worker in range(num_workers)}  # what each living worker has in its queue
        self.ids, self.rows = set(), {}
        self.made = {}  # batch -> rows whose making counts
        self.delivered, self.arrivals = [], []
        self.left = set()
        self.owner_at_issue = {}
        self.pump()

    # -- the engine's moves

    def pump(self):
        schedule = self.schedule
        while schedule.num_wanted:
            if schedule.next_batch == self.total:
                schedule.finish()
                break
            batch = schedule.next_batch
            self.rows[batch] = 1 + batch % 5
            self.send(schedule.add(self.rows[batch]))
        for worker in schedule.take_left():
            left = {task.id for task in self.sent.pop(worker)}
            assert not left & self._waited_ids(), "who leaves has answered all that somebody waits for"

    def send(self, task):
        assert task.id not in self.ids, "numbers are never used again"
        self.ids.add(task.id)
        assert task.worker in self.sent, "tasks go to living workers"
        if task.kind is TaskKind.BATCH and task.batch not in self.owner_at_issue:
            assert task.worker < self.schedule.num_workers
            if self.schedule.in_order:
                assert task.worker == task.batch % self.schedule.num_workers
            self.owner_at_issue[task.batch] = task.worker
        self.sent[task.worker].append(task)

    @precondition(lambda self: any(self.sent.values()))
    @rule(data=st.data())
    def answer(self, data):
        worker = data.draw(st.sampled_from(sorted(w for w, queue in self.sent.items() if queue)))
        task = self.sent[worker][0]
        known = task.id in self._waited_ids()
        if known and task.kind is TaskKind.BATCH and self.schedule.parts_missing(task.batch):
            return  # the owner waits for the parts
        self.sent[worker].pop(0)
        arrived = self.schedule.arrive(task.id)
        assert (arrived is not None and arrived.id == task.id) == known, (
            "an answer counts exactly if somebody waits for it"
        )
        if arrived is not None:
            self.made.setdefault(task.batch, set()).update(range(task.begin_row, task.end_row))
            if task.kind is TaskKind.BATCH:
                self.arrivals.append(task.batch)
        self.pump()

    @rule()
    def next(self):
        batch = self.schedule.take()
        if batch is None:
            return
        assert batch not in self.delivered
        assert self.made[batch] >= set(range(self.rows[batch])), "delivered without all its rows"
        if self.schedule.in_order:
            assert batch == self.first + len(self.delivered)
        else:
            assert batch == self.arrivals[len(self.delivered)]
        self.delivered.append(batch)
        self.pump()

    @rule(data=st.data())
    def die(self, data):
        worker = data.draw(st.sampled_from(sorted(self.sent)))
        lost = [task for task in self.sent[worker] if task.id in self._waited_ids()]
        death = self.schedule.die(worker)
        assert death.verdict is None
        assert sorted(death.lost_ids) == sorted(task.id for task in lost)
        lost = sorted(lost, key=lambda task: death.lost_ids.index(task.id))
        assert death.is_replaced == (worker < self.schedule.num_workers)
        for old, new in zip(lost, death.tasks, strict=True):
            assert (old.kind, old.batch, old.begin_row) == (new.kind, new.batch, new.begin_row)
            assert new.end_row <= old.end_row
            assert not death.is_replaced or new.worker == worker
        self.sent[worker] = []
        for task in death.tasks:
            self.send(task)
        self.pump()

    @rule(num_workers=st.integers(1, 4), prefetch=st.integers(1, 3))
    def resize(self, num_workers, prefetch):
        for worker in self.schedule.resize(num_workers, prefetch):
            assert worker not in self.sent
            self.sent[worker] = []
        self.pump()

    @rule(data=st.data())
    def steal(self, data):
        schedule = self.schedule
        stealable = [b for b in self.rows if b not in self.delivered and schedule.can_steal(b)]
        if not stealable:
            return
        batch = data.draw(st.sampled_from(stealable))
        helpers = [worker for worker in sorted(self.sent) if worker != schedule.owner(batch)]
        if not helpers:
            return
        first_row = data.draw(st.integers(0, self.rows[batch]))
        tasks = schedule.steal(batch, first_row, helpers)
        assert [row for task in tasks for row in range(task.begin_row, task.end_row)] == list(
            range(first_row, self.rows[batch])
        )
        assert len({task.worker for task in tasks}) == len(tasks)
        owner = schedule.owner(batch)
        # The owner stops at the limit; a part is done before the batches behind it.
        self.sent[owner] = [
            task if task.id != schedule.task_of(batch) or not tasks else _limited(task, first_row)
            for task in self.sent[owner]
        ]
        for task in tasks:
            self.ids.add(task.id)
            self.sent[task.worker].insert(0, task)

    @precondition(lambda self: any(self.sent.values()))
    @rule(data=st.data())
    def owner_had_made_all(self, data):
        """The owner was faster than the limit: it answers with the whole batch, parts come in vain."""
        tasks = [t for q in self.sent.values() for t in q if t.kind is TaskKind.BATCH and t.id in self._waited_ids()]
        stolen = [task for task in tasks if self.schedule.parts_missing(task.batch)]
        if not stolen:
            return
        task = data.draw(st.sampled_from(stolen))
        self.sent[task.worker].remove(task)
        assert self.schedule.arrive(task.id) is not None
        self.made.setdefault(task.batch, set()).update(range(self.rows[task.batch]))
        self.arrivals.append(task.batch)

    def _waited_ids(self):
        return {task.id for task in self.schedule.tasks()}

    # -- the promises

    @invariant()
    def the_queue_is_bounded_and_full(self):
        if not hasattr(self, "schedule"):
            return
        schedule = self.schedule
        undelivered = set(range(self.first, schedule.next_batch)) - set(self.delivered)
        assert schedule.num_outstanding == len(undelivered)
        if schedule.in_order and not schedule.is_finished:
            assert schedule.num_outstanding >= schedule.num_workers * schedule.prefetch, "workers are kept busy"

    @invariant()
    def progress_says_what_was_delivered(self):
        if not hasattr(self, "schedule"):
            return
        cursor, ahead = self.schedule.progress
        assert set(self.delivered) == set(range(self.first, cursor)) | set(ahead)
        assert cursor not in self.delivered

    @invariant()
    def everything_waited_for_is_with_a_living_worker(self):
        if not hasattr(self, "schedule"):
            return
        with_workers = {task.id for queue in self.sent.values() for task in queue}
        assert self._waited_ids() <= with_workers

    def teardown(self):
        """Left alone, the pass ends with every batch delivered."""
        if not hasattr(self, "schedule"):
            return
        for _ in range(1000):
            self.pump()
            if self.schedule.is_over:
                break
            parts = [
                t for q in self.sent.values() for t in q if t.kind is TaskKind.PART or t.id not in self._waited_ids()
            ]
            others = [task for queue in self.sent.values() for task in queue]
            for task in (parts or others)[:1]:
                self.sent[task.worker].remove(task)
                if self.schedule.arrive(task.id) is not None:
                    self.made.setdefault(task.batch, set()).update(range(task.begin_row, task.end_row))
                    if task.kind is TaskKind.BATCH:
                        self.arrivals.append(task.batch)
            self.next()
        assert self.schedule.is_over
        assert sorted(self.delivered) == list(range(self.first, self.total))
        assert self.schedule.progress == (self.total, ())
        assert set(self.sent) <= set(range(self.schedule.num_workers)), "who was too many has left"


def _limited(task, end_row):
    return type(task)(task.id, task.kind, task.batch, task.worker, task.begin_row, end_row)


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def _fill(schedule, num_rows=4):
    return [schedule.add(num_rows) for _ in range(schedule.num_wanted)]


def test_batch_k_is_on_worker_k_mod_n_also_after_resuming():
    schedule = Schedule(3, 2, first_batch=7)
    assert [(task.batch, task.worker) for task in _fill(schedule)] == [(k, k % 3) for k in range(7, 13)]


def test_a_worker_that_is_too_many_answers_first_and_is_not_replaced():
    schedule = Schedule(2, 1)
    tasks = _fill(schedule)
    assert schedule.resize(1, 1) == []
    assert schedule.take_left() == []
    death = schedule.die(1, tasks[1].id, 0)
    assert not death.is_replaced
    assert [(task.batch, task.worker) for task in death.tasks] == [(1, 0)]
    assert schedule.take_left() == [1]
    assert schedule.take_left() == []


def test_a_sample_that_kills_two_workers_is_named():
    schedule = Schedule(1, 2)
    task = _fill(schedule)[0]
    death = schedule.die(0, task.id, 3)
    assert death.verdict is None
    death = schedule.die(0, death.tasks[0].id, 1)
    assert death.verdict is None, "another sample"
    death = schedule.die(0, death.tasks[0].id, 3)
    assert (death.verdict.batch, death.verdict.row, death.verdict.num_kills) == (0, 3, 2)


def test_where_the_sample_is_not_known_the_batch_is_named():
    schedule = Schedule(1, 1)
    task = _fill(schedule)[0]
    death = schedule.die(0, task.id, None)
    assert death.verdict is None
    death = schedule.die(0, death.tasks[0].id, None)
    assert (death.verdict.batch, death.verdict.row) == (0, None)


def test_a_batch_that_kills_at_whatever_row_ends_too():
    schedule = Schedule(1, 1)
    task, deaths = schedule.add(100), []
    for row in range(KILLS_OF_ONE_BATCH):
        deaths.append(schedule.die(0, task.id, row))
        task = deaths[-1].tasks[0]
    assert [death.verdict for death in deaths[:-1]] == [None] * (KILLS_OF_ONE_BATCH - 1)
    assert deaths[-1].verdict.num_kills == KILLS_OF_ONE_BATCH
    assert deaths[-1].verdict.row is None


def test_an_idle_worker_that_dies_blames_nobody():
    schedule = Schedule(1, 1)
    task = _fill(schedule)[0]
    for _ in range(5):
        death = schedule.die(0)
        assert death.verdict is None
        assert [t.batch for t in death.tasks] == [task.batch]


def test_a_part_that_kills_is_blamed_by_its_row_and_repeated():
    schedule = Schedule(2, 1)
    _fill(schedule)
    (part,) = schedule.steal(0, 2, [1])
    death = schedule.die(1, part.id, 3)
    assert [(task.kind, task.batch) for task in death.tasks] == [(TaskKind.BATCH, 1), (TaskKind.PART, 0)]
    assert schedule.parts_missing(0) == 1
    death = schedule.die(1, death.tasks[1].id, 3)
    assert (death.verdict.batch, death.verdict.row) == (0, 3)


def test_an_owner_that_dies_after_a_steal_repeats_only_its_own_rows():
    schedule = Schedule(2, 1)
    tasks = _fill(schedule)
    (part,) = schedule.steal(0, 2, [1])
    death = schedule.die(0, tasks[0].id, 1)
    assert [(task.begin_row, task.end_row) for task in death.tasks] == [(0, 2)]
    schedule.arrive(part.id)
    assert schedule.parts_missing(0) == 0


def test_streams_that_end_are_skipped_in_turn_as_by_dataloader():
    """Worker 1 has one batch, worker 0 three: the order is that of the turns, and the pass ends by itself."""
    schedule, order = Schedule(2, 2), []
    supply, queue = {0: 3, 1: 1}, _fill(schedule)
    while not schedule.is_over:
        for task in queue:
            if supply[task.worker]:
                supply[task.worker] -= 1
                schedule.arrive(task.id)
            else:
                schedule.exhaust(task.id)
        queue = []
        while (batch := schedule.take()) is not None:
            order.append(batch)
        queue = _fill(schedule)
    # 0 and 2 on worker 0, 1 on worker 1 (3 is void), then worker 0 alone until it ends.
    assert order == [0, 1, 2, 4]
    assert supply == {0: 0, 1: 0}


def test_a_void_batch_that_waits_for_its_turn_holds_no_place_in_the_queue():
    schedule = Schedule(2, 1)
    tasks = _fill(schedule)
    schedule.exhaust(tasks[1].id)
    assert schedule.num_outstanding == 1
    assert [task.worker for task in _fill(schedule)] == [0]


def test_what_waits_behind_a_streams_end_is_dropped_at_once():
    schedule = Schedule(1, 3)
    tasks = _fill(schedule)
    schedule.exhaust(tasks[0].id)
    assert schedule.void_worker(0) == [task.id for task in tasks[1:]]
    assert schedule.is_over


def _run_streams(rng, supply, in_order):
    """Workers whose streams have so many batches answer at random moments; what arrives, as (worker, turn)."""
    schedule, got, what = Schedule(len(supply), rng.randint(1, 3), in_order=in_order), [], {}
    sent, made = {worker: [] for worker in range(len(supply))}, [0] * len(supply)
    while not schedule.is_over:
        for task in _fill(schedule):
            sent[task.worker].append(task)
        waiting = [worker for worker, queue in sent.items() if queue]
        if waiting:
            worker = rng.choice(waiting)
            task = sent[worker].pop(0)
            if made[worker] < supply[worker]:
                what[task.batch] = worker, made[worker]
                made[worker] += 1
                schedule.arrive(task.id)
            else:
                schedule.exhaust(task.id)
        while (rng.random() < 0.5 or not waiting) and (batch := schedule.take()) is not None:
            got.append(what[batch])
    return got


@pytest.mark.parametrize("in_order", [True, False])
def test_streams_give_their_batches_in_turns_whatever_the_timing(in_order):
    """A stream that has ended is left out of the turns, whenever that is learned."""
    for seed in range(300):
        rng = random.Random(seed)
        supply = [rng.randrange(7) for _ in range(rng.randint(1, 4))]
        expected = [(worker, turn) for turn in range(7) for worker in range(len(supply)) if turn < supply[worker]]
        got = _run_streams(rng, supply, in_order)
        assert (got if in_order else sorted(got, key=lambda item: (item[1], item[0]))) == expected, seed


@pytest.mark.parametrize("in_order", [True, False])
def test_resuming_skips_what_was_delivered_ahead(in_order):
    schedule = Schedule(2, 2, in_order=in_order, first_batch=3, skip=(4, 6))
    seen = []
    while schedule.num_wanted and schedule.next_batch < 9:
        task = schedule.add(1)
        if task is not None:
            schedule.arrive(task.id)
        while (batch := schedule.take()) is not None:
            seen.append(batch)
    assert seen == [3, 5, 7, 8]
    assert schedule.progress == (9, ())


def test_out_of_order_a_full_worker_gets_no_more():
    schedule = Schedule(2, 2, in_order=False)
    tasks = _fill(schedule)
    assert [task.worker for task in tasks] == [0, 1, 0, 1]
    for task in tasks[1::2]:
        schedule.arrive(task.id)
        schedule.take()
    assert [task.worker for task in _fill(schedule)] == [1, 1], "worker 0 is slow"


def test_a_late_answer_of_a_repeated_task_is_ignored():
    schedule = Schedule(1, 1)
    task = _fill(schedule)[0]
    schedule.die(0)
    assert schedule.arrive(task.id) is None
    assert schedule.take() is None


def test_numbers_of_tasks_go_on_from_pass_to_pass():
    first = Schedule(1, 2)
    _fill(first)
    second = Schedule(1, 2, first_task=first.next_task)
    assert [task.id for task in _fill(second)] == [2, 3]


def test_kill_counts_have_a_reason_beside_them():
    assert schedule_module.KILLS_OF_ONE_SAMPLE == 2
