"""Whatever dies, and whatever happens to the run directory: the program goes on, and what was written is readable."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from headrace.records.rundir import EventKind
from headrace.run.gather import gather
from tests.process.agent_programs import watch
from tests.process.launching import running

pytestmark = pytest.mark.slow


def waiting(tmp_path, workers, run_dir):
    """The endless program with the agent in it."""
    environ = watch.agent_environ(watch.plain_environ(tmp_path), run_dir)
    return running([sys.executable, watch.HERE / "waiting.py", str(workers)], environ)


def pids(process):
    """Trainer and workers, once four batches have come."""
    word, *numbers = process.stdout.readline().split()
    assert word == "ready"
    return [int(number) for number in numbers]


def test_worker_killed(tmp_path):
    """SIGKILL of a worker: torch's own error as ever, and the worker's record is there to its end."""
    run_dir = watch.new_run_dir(tmp_path)
    with waiting(tmp_path, 2, run_dir) as process:
        _, worker, _ = pids(process)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(timeout=60) == 1
        # Torch says one or the other, depending on where the signal finds it.
        words = rf"DataLoader worker \((pid|pid\(s\)) {worker}\) (is killed by signal: Killed|exited unexpectedly)"
        assert re.search(words, process.stderr.read())
    done = watch.Done(1, "", "", run_dir)
    (trace,) = [trace for trace in done.traces if trace.pid == worker]
    assert trace.is_worker
    assert trace.of(EventKind.TASK)
    assert gather(run_dir).ended == "lost"


def test_trainer_killed(tmp_path):
    """SIGKILL of the trainer: all its steps are in the record, and its workers end."""
    run_dir = watch.new_run_dir(tmp_path)
    with waiting(tmp_path, 1, run_dir) as process:
        trainer, worker = pids(process)
        end = os.pidfd_open(worker)
        os.kill(trainer, signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        signal_ended(end)
    record = gather(run_dir)
    (loader,) = record.processes[0].loaders
    assert record.ended == "lost"
    assert loader.num_steps >= 3


def signal_ended(pidfd):
    """Blocks until the process behind a pidfd has ended; closes it."""
    import select

    try:
        assert select.select([pidfd], [], [], 60)[0]
    finally:
        os.close(pidfd)


def test_headrace_killed(tmp_path):
    """SIGKILL of headrace: the program goes on to its end; the record tells of the steps before and after."""
    environ = watch.plain_environ(tmp_path)
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from headrace.cli import main; main()"
    command = [sys.executable, "-c", start, watch.SRC, "run", watch.HERE / "waiting.py", "0"]
    with running(list(map(str, command)), environ) as process:
        (trainer,) = pids(process)
        end = os.pidfd_open(trainer)
        process.kill()
        process.wait(timeout=60)
        process.stdin.close()
        assert process.stdout.read() == "done\n"
        signal_ended(end)
    (run_dir,) = (tmp_path / "runs").iterdir()
    record = gather(run_dir)
    assert (record.ended, record.exit_code) == ("lost", None)
    assert record.processes[0].loaders[0].num_steps >= 3


class TestRunDirectory:
    """What can happen to the run directory."""

    def train(self, tmp_path, run_dir, **options):
        environ = watch.agent_environ(watch.plain_environ(tmp_path), run_dir)
        return watch.run([sys.executable, watch.HERE / "fake_training.py", "fork", "0"], environ, run_dir, **options)

    def test_never_was(self, tmp_path):
        """Without its directory nothing is hooked and nothing said."""
        done = self.train(tmp_path, tmp_path / "gone")
        assert (done.code, done.err, len(done.lines)) == (7, "", 1)
        assert not (tmp_path / "gone").exists()

    def test_vanishes(self, tmp_path):
        """Removed in the middle of a run: the program does not notice."""
        run_dir = watch.new_run_dir(tmp_path)
        with waiting(tmp_path, 1, run_dir) as process:
            pids(process)
            shutil.rmtree(run_dir)
            process.stdin.close()
            assert process.wait(timeout=60) == 6
            assert process.stderr.read() == ""

    @pytest.mark.parametrize("mount", ["-o size=16k", "-o size=600k", "-o ro"])
    def test_full_or_read_only(self, tmp_path, mount):
        """On a full or read-only file system the program is unharmed: no error, no bus error."""
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
            pytest.skip("no permission for a mount namespace here")
        place = tmp_path / "small"
        place.mkdir()
        script = f"mount -t tmpfs {mount} none {place} && exec {sys.executable} fake_training.py fork 0"
        environ = watch.agent_environ(watch.plain_environ(tmp_path), place)
        done = watch.run(["unshare", "-m", "sh", "-c", script], environ)
        assert (done.code, done.err, len(done.lines)) == (7, "", 1)
