"""`headrace attach` names a running job's cause from outside, leaves the job alone, and refuses what it can not see."""

import json
import os
import signal
import subprocess
import sys

import jsonschema
import msgspec
import pytest

from headrace.errors import UsageError
from headrace.host.nvml import FakeGpus
from headrace.records.run import Run
from headrace.records.schema import make_schema
from headrace.run.attach import attach

NO_PID = 2**22 + 1

#: A trainer that waits for its workers over pipes, as with DataLoader, but without torch. argv: what they do, how many.
JOB = """
import multiprocessing, os, sys, threading, time

def worker(send, what):
    with open("/proc/self/comm", "w") as comm:
        comm.write("pt_data_worker")
    while True:
        if what == "sleep":
            time.sleep(0.02)
        else:
            end = time.thread_time() + 0.02
            while time.thread_time() < end:
                pass
        send.send_bytes(b"batch")

context = multiprocessing.get_context("fork")
pipes = []
for _ in range(int(sys.argv[2])):
    receive, send = context.Pipe(duplex=False)
    context.Process(target=worker, args=(send, sys.argv[1]), daemon=True).start()
    pipes.append(receive)
print("ready", flush=True)
while True:
    for pipe in pipes:
        while not pipe.poll(5):
            pass
        pipe.recv_bytes()
"""


@pytest.fixture
def start():
    """Starts jobs in sessions of their own, and kills them afterwards."""
    started = []

    def begin(*words):
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, *words], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(job)
        assert job.stdout.readline() == "ready\n"
        return job

    yield begin
    for job in started:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        job.stdout.close()


@pytest.mark.slow
def test_a_job_with_sleeping_workers_is_storage(start):
    """Workers that wait while the trainer waits for them: storage, with what they wait for, as a valid record."""
    job = start("sleep", "2", "--token=abc")
    run = attach(job.pid, 1.5, gpus=FakeGpus())
    loader = run.processes[0].loaders[0]
    assert run.processes[0].pid == job.pid
    assert (loader.kind, loader.num_workers, loader.stall_frac) == ("proc", 2, None)
    assert (run.finding.cause, run.finding.confidence) == ("storage", "medium")
    assert "sleep" in run.finding.summary
    assert run.unavailable["/processes/0/loaders/0/step_ns"]
    assert run.unavailable["/fingerprint/gpus"] == "no NVIDIA driver"
    assert "--token=***" in run.command
    assert job.poll() is None
    text = msgspec.json.encode(run)
    jsonschema.validate(json.loads(text), make_schema())
    assert msgspec.json.decode(text, type=Run) == run


@pytest.mark.slow
def test_a_job_that_ends_ends_the_looking(start):
    """When the job is killed the looking ends at once, and the record says that it is gone."""
    job = start("sleep", "1")
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {job.pid}"])
    run = attach(job.pid, 60, gpus=FakeGpus())
    killer.wait()
    assert run.duration_ns < 30e9
    assert run.ended == "lost"


@pytest.mark.parametrize(
    ("pid", "words"),
    [(NO_PID, "there is no process"), (0, "there is no process"), (-5, "there is no process"), (os.getpid(), "itself")],
)
def test_a_process_that_can_not_be_watched_is_wrong_use(pid, words):
    """A pid that nobody has, and headrace itself, are refused in one line before anything is measured."""
    with pytest.raises(UsageError, match=words):
        attach(pid)


def test_a_kernel_thread_is_refused():
    """A thread of the kernel trains nothing."""
    try:
        with open("/proc/2/comm") as comm:
            known = comm.read().strip() == "kthreadd"
    except OSError:
        known = False
    if not known:
        pytest.skip("no kernel threads are visible here")
    with pytest.raises(UsageError, match="kernel"):
        attach(2)


def test_a_zombie_is_refused():
    """A process that has ended but was not waited for is no job."""
    with subprocess.Popen(["sh", "-c", "exit 0"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(UsageError, match="has ended"):
            attach(ended.pid)


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 1e9, float("nan")])
def test_an_unreasonable_time_is_refused(seconds):
    """The time must be from one second to an hour."""
    with pytest.raises(UsageError, match="seconds"):
        attach(os.getppid(), seconds)
