"""The agent in every Python it may meet, without torch: a stand-in has the modules, classes and names it hooks."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from headrace.records.rundir import EventKind
from headrace.run.gather import gather
from tests.process.agent_programs import watch

pytestmark = pytest.mark.slow
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAM = watch.HERE / "fake_training.py"


def python(version):
    """An interpreter of this version that runs without a virtual environment, or a skip."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no python{version} here")
    return found


def both(tmp_path, *command, steps=0, **more):
    """The command bare and with the agent."""
    environ = watch.plain_environ(tmp_path, **more)
    run_dir = watch.new_run_dir(tmp_path, steps=steps)
    return watch.run(command, environ), watch.run(command, watch.agent_environ(environ, run_dir), run_dir)


class TestVersions:
    """Python 3.10 to 3.14, and older ones among the program's children."""

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    @pytest.mark.parametrize("version", VERSIONS)
    def test_sees_and_is_not_seen(self, tmp_path, version, method):
        """Output, sys.path, modules and exit code are as alone; 3 epochs of 4 steps are seen, in trainer and worker."""
        alone, watched = both(tmp_path, python(version), PROGRAM, method, "0")
        assert watched[:3] == alone[:3]
        assert (alone.code, alone.err, watched.errors) == (7, "", [])
        assert watched.trainer.start["python"].startswith(version)
        assert len(watched.trainer.of(EventKind.NEXT)) == 3 * 5
        assert len(watched.trainer.of(EventKind.OPTIMIZER)) == 3 * 4
        assert sum(len(trace.of(EventKind.TASK)) for trace in watched.traces if trace.is_worker) == 4

    @pytest.mark.parametrize("flag", ["-Werror", "-bb", "-Xwarn_default_encoding", "-OO", "-P", "-E", "-B"])
    @pytest.mark.parametrize("version", ["3.12"])
    def test_flags(self, tmp_path, version, flag):
        """Flags that make Python strict bring nothing of the agent's to light."""
        alone, watched = both(tmp_path, python(version), flag, PROGRAM, "fork", "0")
        assert watched[:3] == alone[:3]

    @pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
    def test_older_ones_pass_through(self, tmp_path, version):
        """A Python that the agent does not know runs as alone, its own sitecustomize included."""
        (tmp_path / "sitecustomize.py").write_text("print('mine')")
        look = "import sys; print(sys.path); print([m for m in sys.modules if 'headrace' in m])"
        alone, watched = both(tmp_path, python(version), "-c", look, PYTHONPATH=str(tmp_path))
        assert watched[:3] == alone[:3]
        assert "mine" in alone.out

    @pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
    def test_no_warning_about_forks(self, tmp_path, version):
        """The sampling thread is gone before a fork: Python, which warns of threads since 3.12, does not."""
        alone, watched = both(tmp_path, python(version), "-Werror", PROGRAM, "fork", "2")
        assert watched.err == alone.err == ""
        assert watched.trainer.lines("stacks")


class TestStrangeTorch:
    """A torch that is not as known."""

    MISSED = {
        "no_compiler": None,
        "no_backward": "torch.autograd.backward",
        "no_optimizer_hooks": "torch.optim.optimizer.optimizer",
        "no_auto_collation": None,
        "shuffled_arguments": None,
        "fewer_settings": None,
        "no_num_yielded": None,
        "no_fetcher": "torch.utils.data.dataloader.worker_loop",
        "renamed_iterator": "torch.utils.data.dataloader.iterator_next",
    }

    @pytest.mark.parametrize("strange", MISSED)
    def test_goes_on_with_less(self, tmp_path, strange):
        """The program is unharmed, the record says which hook is missing, and it can be read."""
        alone, watched = both(tmp_path, sys.executable, PROGRAM, "fork", "0", FAKE_TORCH=strange)
        assert watched[:3] == alone[:3]
        assert [error.split(": ")[0] for error in watched.errors] == list(filter(None, [self.MISSED[strange]]))
        assert gather(watched.run_dir).ended == "lost"


class TestCustomize:
    """Code of the user's that runs at the start of every Python."""

    def customized(self, tmp_path, name, text):
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / f"{name}.py").write_text(text)
        base = getattr(sys, "_base_executable", sys.executable)  # a virtual environment has no usercustomize
        return both(tmp_path, base, PROGRAM, "fork", "0", PYTHONPATH=str(tmp_path / "own"))

    @pytest.mark.parametrize("name", ["site", "user"])
    def test_runs(self, tmp_path, name):
        """The user's sitecustomize and usercustomize run once, and are what ``import sitecustomize`` finds."""
        text = f"import sys; sys.{name}_was_here = getattr(sys, '{name}_was_here', 0) + 1; print(__name__)"
        alone, watched = self.customized(tmp_path, f"{name}customize", text)
        assert watched[:3] == alone[:3]
        assert alone.lines[0][f"{name}customize"] == 1
        assert watched.trainer.of(EventKind.NEXT)

    @pytest.mark.parametrize("text", ["1 / 0", "import no_such_module"])
    def test_errors(self, tmp_path, text):
        """One that raises says the same words."""
        alone, watched = self.customized(tmp_path, "sitecustomize", text)
        assert watched[:3] == alone[:3]
        assert alone.err

    def test_exit(self, tmp_path):
        """One that ends the program ends it: the same code and last word (the traceback shows the way through ours)."""
        alone, watched = self.customized(tmp_path, "sitecustomize", "raise SystemExit(9)")
        assert (watched.code, watched.out) == (alone.code, alone.out)
        assert watched.err.splitlines()[-1] == alone.err.splitlines()[-1]


class TestWithoutAgent:
    """Ways to start Python that keep the agent out."""

    @pytest.mark.parametrize("words", [("-I",), ("-S",), ("-E",)])
    def test_flags(self, tmp_path, words):
        """-I, -S and -E: the program runs as alone, unreported. (With -S nobody takes us off sys.path again.)"""
        alone, watched = both(tmp_path, sys.executable, *words, PROGRAM, "fork", "0")
        (line,) = watched.lines
        line["path"] = [path for path in line["path"] if path != str(watch.AGENT)]
        assert (watched.code, watched.err, [line]) == (alone.code, alone.err, alone.lines)
        assert watched.traces == []

    def test_empty_environment(self, tmp_path):
        """``env -i``: the same."""
        alone, watched = both(tmp_path, "env", "-i", sys.executable, PROGRAM, "fork", "0")
        assert watched[:3] == alone[:3]
        assert watched.traces == []

    def test_named_in_the_report(self, tmp_path):
        """The report names such a process and says why it is silent."""
        run_dir, done = self.under_headrace(tmp_path, sys.executable, "-I", PROGRAM, "fork", "1.5")
        assert done.code == 7
        notes = [process.note for process in gather(run_dir).processes]
        assert any("never reported" in (note or "") for note in notes)

    def under_headrace(self, tmp_path, *command):
        environ = watch.plain_environ(tmp_path, HEADRACE_KEEP="1", PYTHONPATH=str(watch.SRC))
        done = watch.run([sys.executable, "-m", "headrace", "run", "--quiet", *command], environ)
        (run_dir,) = (tmp_path / "runs").iterdir()
        return run_dir, done


class TestPlaces:
    """The process's surroundings."""

    def test_working_directory_removed(self, tmp_path):
        """A program whose working directory is gone is watched like any other."""
        script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
        alone, watched = both(tmp_path, "sh", "-c", script, "sh", sys.executable, PROGRAM, "fork", "0")
        assert watched[:3] == alone[:3]
        assert len(watched.trainer.of(EventKind.NEXT)) == 15

    def test_no_thread_to_be_had(self, tmp_path):
        """Where no thread can be started (ulimit -u), the program goes on without sampled stacks."""
        broken = "import threading; threading.Thread.start = None; import runpy, sys; sys.argv = sys.argv[1:]; "
        broken += "runpy.run_path(sys.argv[0], run_name='__main__')"
        alone, watched = both(tmp_path, sys.executable, "-c", broken, PROGRAM, "fork", "1.5")
        assert (watched.code, watched.err) == (alone.code, alone.err) == (7, "")
        assert watched.errors
        assert watched.trainer.lines("stacks") == []

    def test_modules_are_the_users(self, tmp_path):
        """Until torch is imported the agent keeps off modules that the program may have of the same name."""
        for name in ("inspect", "sysconfig", "platform", "tokenize", "dis"):
            (tmp_path / f"{name}.py").write_text(f"print('my {name}')")
        program = tmp_path / "own_modules.py"
        program.write_text("import inspect, sysconfig, platform, tokenize, dis")
        alone, watched = both(tmp_path, sys.executable, program)
        assert watched[:3] == alone[:3]

    def test_own_file_names(self, tmp_path):
        """Arguments with quotes, newlines and bytes that are no text are recorded, and the report can be written."""
        import msgspec

        word = b'a"\\\n\xff\xe4'.decode(errors="surrogateescape")
        alone, watched = both(tmp_path, sys.executable, PROGRAM, "fork", "0", word)
        assert watched[:3] == alone[:3]
        assert watched.trainer.start["argv"][-1] == 'a"\\\n??'
        assert msgspec.json.encode(gather(watched.run_dir))


def test_steps(tmp_path):
    """--steps without workers: after N steps nothing is written, and the results are the same."""
    alone, watched = both(tmp_path, sys.executable, PROGRAM, "fork", "0", steps=5)
    assert watched[:3] == alone[:3]
    assert watched.trainer.lines("done")[0]["reason"] == "steps"
    assert len([event for event in watched.trainer.of(EventKind.NEXT) if not event.c & 3]) == 6


def test_own_descriptors_are_left_alone(tmp_path):
    """A program that closes every descriptor and opens files of its own keeps them, also over a fork."""
    program = tmp_path / "daemonize.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path.insert(1, {str(watch.HERE / 'fake')!r})\n"
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "list(DataLoader([1, 2, 3]))\n"
        "os.closerange(3, 64)\n"
        "mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]\n"
        "list(DataLoader([1, 2, 3]))\n"
        "if os.fork() == 0:\n    [os.fstat(fd) for fd in mine]\n    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), [os.fstat(fd) and fd for fd in mine])\n"
    )
    alone, watched = both(tmp_path, sys.executable, program)
    assert watched[:3] == alone[:3]
    assert alone.out.startswith("0 ")
