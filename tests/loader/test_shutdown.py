"""Nobody stays behind: after the trainer's death, Ctrl-C, a break, an exit with a live iterator."""

import copy
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from headrace import Loader
from tests.loader.datasets import Numbers, Slow

#: Of this machine's cores, which are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROOT = Path(__file__).parents[2]
HEAD = """
import os, sys, threading, time
from headrace import Loader
from tests.loader.datasets import Numbers, Slow
if __name__ == "__main__":
"""


def start(body, **options):
    """A program of its own process group; its first line has been printed when this returns."""
    code = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    path = Path(options.pop("folder")) / "program.py"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, str(path)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_gone(pids, limit_s):
    """Whether all processes are gone in time; sleeps on their pidfds."""
    deadline = time.monotonic() + limit_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        is_gone = bool(poller.poll(max(deadline - time.monotonic(), 0) * 1000))
        os.close(fd)
        if not is_gone:
            return False
    return True


def members(session):
    """Processes of a session that are no zombies."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                rest = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if rest[3] == str(session) and rest[0] not in "ZX":
                found.append(int(name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nobody_outlives_a_trainer_that_is_killed(method, tmp_path):
    """Several loaders, whose processes have inherited each other's descriptors, and whose first thread has ended."""
    body = f"""
        iterators = []
        def make():
            loader = Loader(Slow(100_000, {{}}), batch_size=2, num_workers=2, multiprocessing_context={method!r})
            iterators.append(iter(loader))
        for _ in range(2):
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
        for iterator in iterators:
            next(iterator)
        print("ready", flush=True)
        for iterator in iterators:
            for _ in iterator:
                pass
    """
    program = start(body, folder=tmp_path)
    try:
        assert program.stdout.readline() == "ready\n", program.communicate()[1]
        others = [pid for pid in members(program.pid) if pid != program.pid]
        assert len(others) >= 4
        program.kill()
        program.wait()
        assert wait_gone(others, 1.0)
    finally:
        program.kill()
        program.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "trainer"])
def test_an_interrupt_ends_quietly_and_soon(whom, tmp_path):
    """In less than two seconds, with one traceback, of the trainer."""
    body = """
        loader = Loader(Slow(100_000, dict.fromkeys(range(40, 100), 30)), batch_size=4, num_workers=2)
        for number, _ in enumerate(loader):
            if number == 3:
                print("ready", flush=True)
    """
    program = start(body, folder=tmp_path)
    try:
        assert program.stdout.readline() == "ready\n"
        began = time.monotonic()
        (os.killpg if whom == "group" else os.kill)(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=10)
        assert time.monotonic() - began < 2
        assert program.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert "KeyboardInterrupt" in errors
        assert not members(program.pid)
    finally:
        program.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("it = iter(Loader(Numbers(1000), batch_size=4, num_workers=2)); next(it)", 0),
        ("l = Loader(Numbers(1000), num_workers=2, persistent_workers=True)\nfor b in l: break", 0),
        ("for b in Loader(Numbers(1000), num_workers=2, persistent_workers=True): sys.exit(3)", 3),
        ("class T: pass\nt = T(); t.me = t; t.it = iter(Loader(Numbers(99), num_workers=2)); next(t.it); del t", 0),
        ("it = iter(Loader(Numbers(1000), num_workers=2, workers_as='thread')); next(it)", 0),
        ("it = iter(Loader(Numbers(9, 99_999), num_workers=1))\nsys.kept = [next(it)]; sys.kept.append(sys.kept)", 0),
    ],
)
def test_exits_with_live_iterators_are_silent(body, code, tmp_path):
    """The program's own exit code, nothing on stderr, nobody left."""
    program = start(body, folder=tmp_path)
    _, errors = program.communicate(timeout=20)
    assert (program.returncode, errors) == (code, "")
    assert not members(program.pid)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_leaves_nothing(persistent):
    """The fixture of all tests looks for processes, descriptors and maps."""
    loader = Loader(Numbers(400, width=20_000), batch_size=4, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for batch in loader:
            assert batch[1].tolist() == [0, 1, 2, 3]
            break


@pytest.mark.slow
def test_a_worker_in_a_long_sample_is_not_waited_for():
    """It has a second, then it is ended."""
    loader = Loader(Slow(100, {1: 60}), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    workers = iterator._workers
    began = time.monotonic()
    del iterator
    assert time.monotonic() - began < 2
    assert [worker.is_alive() for worker in workers] == [False, False]


def test_idle_workers_end_by_themselves():
    """With exit status 0."""
    iterator = iter(Loader(Numbers(100), num_workers=2))
    next(iterator)
    workers = iterator._workers
    del iterator
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_start_their_own_workers(make):
    """A copy of a loader in use has its settings and nothing of its pool."""
    loader = Loader(Numbers(8), batch_size=2, num_workers=1, persistent_workers=True, seeds="torch")
    iterator = iter(loader)
    next(iterator)
    copied = make(loader)
    assert copied.seeds == "torch"
    assert [y.tolist() for _, y in copied] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert copied._iterator is not loader._iterator
    assert [y.tolist() for _, y in iterator] == [[2, 3], [4, 5], [6, 7]]


def test_made_in_one_thread_used_in_another_dropped_in_a_third():
    """No thread is special."""
    loader = Loader(Numbers(16), batch_size=4, num_workers=1, persistent_workers=True)
    found = []

    def run(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    run(lambda: found.append(iter(loader)))
    run(lambda: found.append(next(found[0])[1].tolist()))
    assert [y.tolist() for _, y in found[0]] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    run(found.clear)
