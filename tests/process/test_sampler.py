"""The sampler sees a program from outside, leaves one line per look, costs little and never gets in the way."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from headrace.host.nvml import FakeGpus
from headrace.host.proctree import ProcessTree, descendants
from headrace.observe.sampler import Budget, Collector, Sampler
from headrace.records.rundir import GpuSample, HostSample, Machine

SRC = Path(__file__).parents[2] / "src"
Line = msgspec.json.Decoder(Machine | HostSample)
NO_PID = 2**22 + 1


def read(run_dir):
    return [Line.decode(line) for line in (run_dir / "host.jsonl").read_bytes().splitlines()]


@pytest.fixture
def job():
    """A shell that leads its own session, with one child of its own; everything in it is killed afterwards."""
    process = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    yield process, child
    end(process)


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def pause(seconds):
    """Let others run for a moment between two looks of a bounded wait."""
    select.select([], [], [], seconds)


def test_machine_first_then_samples(tmp_path, job):
    """The first line is the machine, the others are samples of the whole tree, in order; stop adds a last one."""
    process, child = job
    gpus = FakeGpus([[GpuSample(index=0, util_frac=0.5)]])
    sampler = Sampler(process.pid, tmp_path, period_s=0.02, gpus=gpus)
    sampler.start()
    limit = time.monotonic() + 10
    while not (tmp_path / "host.jsonl").exists() or len(read(tmp_path)) < 4:
        assert time.monotonic() < limit
        pause(0.01)
    before = time.monotonic_ns()
    sampler.stop()
    assert sampler.failure is None
    assert sampler.cpu_ns > 0
    machine, *samples = read(tmp_path)
    assert isinstance(machine, Machine)
    assert machine.num_cpus >= 1
    assert all(isinstance(sample, HostSample) for sample in samples)
    assert [p.pid for p in samples[0].procs] == [process.pid, child]
    assert samples[-1].t_ns >= before
    assert [s.t_ns for s in samples] == sorted(s.t_ns for s in samples)
    assert samples[0].gpus[0].util_frac == 0.5
    assert gpus.closed


def test_a_program_that_ended_leaves_samples_without_processes(tmp_path, job):
    """After the end of the program there are samples with no process in them, and no failure."""
    process, _ = job
    end(process)
    sampler = Sampler(process.pid, tmp_path)
    sampler.start()
    sampler.stop()
    assert sampler.failure is None
    assert all(sample.procs == [] for sample in read(tmp_path)[1:])
    assert len(read(tmp_path)) >= 3


def test_stop_is_quick_and_may_be_repeated(tmp_path):
    """Stop ends a sampler with a long period at once, again does nothing, and before start does nothing."""
    Sampler(os.getpid(), tmp_path).stop()
    sampler = Sampler(os.getppid(), tmp_path, period_s=60)
    sampler.start()
    start = time.monotonic()
    sampler.stop()
    sampler.stop()
    assert time.monotonic() - start < 2
    assert "headrace-sampler" not in [thread.name for thread in threading.enumerate()]


def test_a_failure_is_kept_and_not_raised(tmp_path):
    """A run directory that is gone ends the sampler with words, and nothing is raised into its owner."""
    sampler = Sampler(os.getppid(), tmp_path / "gone")
    sampler.start()
    sampler.stop()
    assert sampler.failure.startswith("FileNotFoundError")


def test_a_broken_driver_does_not_end_the_owner(tmp_path):
    """Whatever a GPU library raises is kept in words."""

    class Broken(FakeGpus):
        def describe(self):
            raise OSError("driver fell over")

    sampler = Sampler(os.getppid(), tmp_path, gpus=Broken([[GpuSample(index=0)]]))
    sampler.start()
    sampler.stop()
    assert "driver fell over" in sampler.failure


def test_costly_things_are_done_rarely():
    """What took 10 ns and may take a hundredth of the time waits for 1000 ns; a cheap thing waits for its period."""
    budget = Budget(min_period_ns=100, cost_frac=0.01)
    assert budget.due(5)
    budget.spent(5, cost_ns=10)
    assert not budget.due(1004)
    assert budget.due(1005)
    budget.spent(2000, cost_ns=0)
    assert not budget.due(2099)
    assert budget.due(2100)


def test_looks_become_rarer_where_they_cost_much(tmp_path):
    """The sampler never takes more than a hundredth of a core, and its file never grows without limit."""
    sampler = Sampler(os.getpid(), tmp_path, period_s=0.25)
    assert sampler._wait_s() == 0.25
    sampler._look_ns = 10_000_000
    assert sampler._wait_s() == 1.0
    sampler._look_ns, sampler._written_bytes = 0, 3 * (8 << 20)
    assert sampler._wait_s() == 2.0
    sampler._written_bytes = 1 << 40
    assert sampler._wait_s() == 60.0


def test_memory_is_read_rarely(job):
    """smaps_rollup is read at the first look and at a thorough one, not at each."""
    collector = Collector(job[0].pid, gpus=FakeGpus())
    try:
        seen = [collector.sample().procs[0], collector.sample().procs[0], collector.sample(thorough=True).procs[0]]
    finally:
        collector.close()
    assert [proc.private_dirty_bytes is not None for proc in seen] == [True, False, True]


# ---------------------------------------------------------------------------------------------- the process tree


def test_orphans_are_not_lost():
    """A process whose parent died is still the program's, whether it was seen before or only shares the session."""
    script = "(sh -c 'echo $$; exec sleep 60' &); read line"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        orphan = int(process.stdout.readline())
        try:
            tree = ProcessTree(process.pid)
            assert wait_for(lambda: descendants(process.pid), [process.pid, orphan])
            assert tree.refresh() == [process.pid, orphan]
            process.stdin.close()
            process.wait()
            assert tree.refresh() == [orphan]
            assert tree.refresh(thorough=False) == [orphan]
        finally:
            os.kill(orphan, signal.SIGKILL)
        assert wait_for(tree.refresh, [])


def wait_for(look, wanted, seconds=10):
    limit = time.monotonic() + seconds
    while look() != wanted:
        if time.monotonic() > limit:
            return False
        pause(0.01)
    return True


def test_strangers_and_the_caller_are_left_out(job):
    """Neither the caller nor its other children belong to a program that it started."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        assert wait_for(lambda: descendants(job[0].pid), [job[0].pid, job[1]])
    finally:
        stranger.kill()
        stranger.wait()
    assert os.getpid() not in descendants(os.getppid())
    assert descendants(os.getpid())[0] == os.getpid()
    assert descendants(NO_PID) == []


def test_new_children_are_found(job):
    """A process that the program starts later is found by a thorough look."""
    process, child = job
    tree = ProcessTree(process.pid)
    assert child in tree.refresh()
    os.kill(child, signal.SIGKILL)
    process.wait()
    assert tree.refresh() in ([], [process.pid])


# ------------------------------------------------------------------------------- python -m headrace.observe.sampler


def start_module(run_dir, pid):
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "headrace.observe.sampler", str(run_dir), str(pid)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stdin closed", "process ended"])
def test_the_helper_process_ends_with_its_reason(tmp_path, job, how):
    """The helper samples until its standard input is closed or the process has ended, and ends with 0."""
    with start_module(tmp_path, job[0].pid) as helper:
        assert wait_for(lambda: (tmp_path / "host.jsonl").exists() and len(read(tmp_path)) >= 2, True)
        if how == "stdin closed":
            helper.stdin.close()
        else:
            end(job[0])
        assert helper.wait(10) == 0
    assert read(tmp_path)[1].procs[0].pid == job[0].pid


@pytest.mark.slow
def test_the_helper_refuses_wrong_words():
    """Wrong use is one line and exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.observe.sampler", "x"],
        env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")
