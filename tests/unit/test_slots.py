"""The slot table: one user per slot, the budget kept, nothing leaked."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.slots import SlotState, SlotTable


class SlotMachine(RuleBasedStateMachine):
    """Workers that obey their grants, a user who keeps and drops batches, against a model of who uses what."""

    @initialize(budget=st.integers(0, 400), num_tasks=st.integers(1, 8))
    def start(self, budget, num_tasks):
        self.table = SlotTable(budget, num_tasks)
        self.running = {}  # task -> (slot or None, grant)
        self.ready, self.lent, self.leased = [], {}, {}
        self.retired, self.beyond = set(), set()
        self.known, self.next_task = {}, 0

    # -- the engine's moves

    @rule(worker=st.integers(0, 3), need=st.sampled_from([0, 0, 0, 30, 90]), awaited=st.booleans())
    def assign(self, worker, need, awaited):
        before = {slot for slot in self.table.living() if self.table.state(slot) is SlotState.FREE}
        grant = self.table.assign(self.next_task, worker, need, is_awaited=awaited)
        if grant is None:
            assert not awaited, "the awaited task always gets something"
            assert not any(self.table.state(s) is SlotState.FREE and self.known[s] >= need for s in before)
            return
        if grant.slot_id is not None:
            assert grant.slot_id in before
            assert self.known[grant.slot_id] >= need
        if awaited:
            assert grant.max_new_bytes is None
        self.running[self.next_task] = grant
        self.next_task += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, 120))
    def fill(self, data, size):
        task = data.draw(st.sampled_from(sorted(self.running)))
        grant = self.running.pop(task)
        new_bytes = None
        if grant.slot_id is None or self.known[grant.slot_id] < size:
            if grant.max_new_bytes is not None and size > grant.max_new_bytes:
                self.table.refuse(task, size)
                self._end(task)
                return
            new_bytes = max(size, grant.min_new_bytes)
            if grant.max_new_bytes is not None:
                new_bytes = min(new_bytes, grant.max_new_bytes)
        filled = self.table.fill(task, size, new_bytes)
        self._end(task)
        if new_bytes is None:
            assert filled.slot_id == grant.slot_id
            assert filled.retired_id is None
        else:
            assert filled.slot_id not in self.known, "a number is never used again"
            assert filled.retired_id == grant.slot_id
            self.known[filled.slot_id] = new_bytes
            if grant.max_new_bytes is None:
                self.beyond.add(filled.slot_id)
        self.ready.append(filled.slot_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abandon(self, data):
        task = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[task]
        self.table.abandon(task)
        self._end(task)

    def _end(self, task):
        self.lent = {slot: owner for slot, owner in self.lent.items() if owner != task}

    @precondition(lambda self: self.ready and self.running)
    @rule(data=st.data())
    def lend(self, data):
        slot = data.draw(st.sampled_from(self.ready))
        task = data.draw(st.sampled_from(sorted(self.running)))
        self.table.lend(slot, task)
        self.ready.remove(slot)
        self.lent[slot] = task

    @precondition(lambda self: self.ready)
    @rule(keeps=st.booleans())
    def deliver(self, keeps):
        slot = self.ready.pop(0)
        keeps = keeps and not self.table.must_copy(slot)
        generation = self.table.generation(slot)
        assert self.table.deliver(slot, int(keeps)) == generation
        if keeps:
            self.leased[slot] = generation
        grant = self.table.assign(self.next_task, 0)
        if grant is None:
            assert not keeps, "a slot is leased only if the next task gets one all the same"
            assert self.table.state(slot) is SlotState.RETIRED, "a slot that was not leased serves the next task"
            return
        self.running[self.next_task] = grant
        self.next_task += 1

    @precondition(lambda self: self.ready)
    @rule()
    def discard(self):
        self.table.discard(self.ready.pop())

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), late=st.booleans())
    def release(self, data, late):
        slot = data.draw(st.sampled_from(sorted(self.leased)))
        generation = self.leased[slot]
        if late:
            assert not self.table.release(slot, generation - 1)
            return
        del self.leased[slot]
        assert self.table.release(slot, generation)
        assert not self.table.release(slot, generation), "a second report changes nothing"

    @rule(num_keep=st.integers(0, 5))
    def trim(self, num_keep):
        self.table.trim(num_keep)
        assert len(self.table.living()) <= num_keep or self.table.count(SlotState.FREE) == 0

    @rule()
    def take_retired(self):
        taken = self.table.take_retired()
        assert not self.retired & set(taken), "each is named once"
        self.retired |= set(taken)

    # -- the promises

    @invariant()
    def one_user_each(self):
        if not hasattr(self, "table"):
            return
        assigned = [grant.slot_id for grant in self.running.values() if grant.slot_id is not None]
        users = assigned + self.ready + list(self.lent) + list(self.leased)
        assert len(users) == len(set(users)), "a slot has one user"
        expected = {
            **dict.fromkeys(assigned, SlotState.ASSIGNED),
            **dict.fromkeys(self.ready, SlotState.READY),
            **dict.fromkeys(self.lent, SlotState.LENT),
            **dict.fromkeys(self.leased, SlotState.LEASED),
        }
        living = self.table.living()
        assert {slot: self.table.state(slot) for slot in living} == {
            slot: expected.get(slot, SlotState.FREE) for slot in living
        }
        assert set(users) <= set(living), "what is used lives"

    @invariant()
    def nothing_leaks_and_the_dead_stay_dead(self):
        if not hasattr(self, "table"):
            return
        living = self.table.living()
        assert not self.retired & set(living)
        assert self.table.num_bytes == sum(self.known[slot] for slot in living)

    @invariant()
    def budget_is_kept(self):
        if not hasattr(self, "table"):
            return
        living = set(self.table.living())
        exempt = sum(self.known[slot] for slot in living & self.beyond)
        assert self.table.num_bytes - exempt <= self.table.budget_bytes
        if self.table.left_bytes < 0:
            assert self.table.count(SlotState.FREE) == 0, "beyond the budget nothing lies idle"

    def teardown(self):
        """When all have ended, nothing is set aside and every slot is free."""
        if not hasattr(self, "table"):
            return
        for task in list(self.running):
            self.table.abandon(task)
        for slot in self.ready:
            self.table.discard(slot)
        for slot, generation in self.leased.items():
            self.table.release(slot, generation)
        assert self.table.left_bytes == self.table.budget_bytes - self.table.num_bytes >= 0
        assert self.table.count(SlotState.FREE) == len(self.table.living())


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _filled(table, task, worker, size):
    grant = table.assign(task, worker)
    return table.fill(task, size, size if grant.slot_id is None else None).slot_id


def test_a_worker_gets_the_slot_that_it_used_last():
    table = SlotTable(1000, 4)
    slots = [_filled(table, task, task, 100) for task in range(3)]
    for slot in slots:
        table.deliver(slot, 0)
    assert table.assign(10, 1).slot_id == slots[1]
    assert table.assign(11, 1).slot_id == slots[2], "otherwise the one that was freed last"


def test_kept_batches_get_more_slots_until_the_budget_then_are_copied():
    table = SlotTable(1000, 2)
    kept = 0
    for task in range(20):
        grant = table.assign(task, 0)
        assert grant is not None
        slot = table.fill(task, 100, 100 if grant.slot_id is None else None).slot_id
        copied = table.must_copy(slot)
        table.deliver(slot, 0 if copied else 1)
        kept += not copied
    assert kept == 9, "one slot stays for the next batch"
    assert table.num_bytes == 1000


def test_the_awaited_task_goes_beyond_the_budget_and_the_table_shrinks_again():
    table = SlotTable(100, 2)
    slot = _filled(table, 0, 0, 90)
    generation = table.deliver(slot, 1)
    assert table.assign(1, 0) is None
    assert table.assign(1, 0, is_awaited=True).max_new_bytes is None
    table.fill(1, 90, 90)
    assert table.num_bytes == 180
    table.release(slot, generation)
    assert table.num_bytes == 90
    assert table.take_retired() == [slot]


def test_slots_too_small_make_room_for_one_that_is_not():
    table = SlotTable(100, 2)
    slots = [_filled(table, 0, 0, 40), _filled(table, 1, 1, 40)]
    for slot in slots:
        table.deliver(slot, 0)
    grant = table.assign(2, 0)
    assert grant.slot_id is not None
    table.refuse(2, 90)
    grant = table.assign(3, 0, need_bytes=90)
    assert grant.slot_id is None
    assert grant.min_new_bytes == 90
    assert grant.max_new_bytes == 90
    assert sorted(table.take_retired()) == slots


def test_an_unknown_size_is_shared_among_the_first_tasks():
    table = SlotTable(800, 4)
    grants = [table.assign(task, task) for task in range(4)]
    assert [grant.max_new_bytes for grant in grants] == [200] * 4
    assert table.assign(4, 0) is None


def test_lent_parts_are_free_when_the_owner_has_collated_or_died():
    table = SlotTable(1000, 4)
    part = _filled(table, 0, 0, 50)
    table.assign(1, 1)
    table.lend(part, 1)
    assert table.state(part) is SlotState.LENT
    table.abandon(1)
    assert table.state(part) is SlotState.FREE


def test_a_larger_batch_takes_the_place_of_its_slot():
    table = SlotTable(1000, 1)
    slot = _filled(table, 0, 0, 50)
    table.deliver(slot, 0)
    grant = table.assign(1, 0)
    assert grant.slot_id == slot
    assert grant.max_new_bytes == 100, "growing may at most double a slot"
    filled = table.fill(1, 80, 80)
    assert filled.retired_id == slot
    assert table.state(slot) is SlotState.RETIRED
    assert table.num_bytes == 80


def test_a_late_report_of_an_old_lease_frees_nothing():
    table = SlotTable(1000, 2)
    slot = _filled(table, 0, 0, 100)
    old = table.deliver(slot, 1)
    assert table.release(slot, old)
    assert _filled(table, 1, 0, 100) == slot
    new = table.deliver(slot, 1)
    assert not table.release(slot, old)
    assert table.state(slot) is SlotState.LEASED
    assert table.release(slot, new)


def test_an_awaited_batch_beyond_the_budget_retires_what_lies_idle():
    table = SlotTable(200, 2)
    table.deliver(_filled(table, 0, 0, 50), 0)
    idle = table.living()[0]
    grant = table.assign(1, 0, need_bytes=180, is_awaited=True)
    assert grant.slot_id is None
    assert table.take_retired() == [idle], "it made room"
    table.assign(2, 1, is_awaited=True)
    table.fill(2, 20, 20)
    table.discard(table.living()[0])
    table.fill(1, 190, 190)
    assert table.num_bytes == 190, "the idle slot went when the large one came"
