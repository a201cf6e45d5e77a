"""Signals: the terminal's reach the program directly, others are passed on, and job control works."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launching import environment, finished, headrace, run_dirs, running

#: Says each signal it gets; ends with 5 at SIGTERM.
LISTENER = """
import os, signal, sys
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, heard)
print("ready", flush=True)
while True:
    signal.pause()
"""
#: Says "ready", then echoes lines until the end of its input.
ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
print("done", flush=True)
"""


@pytest.fixture
def environ(tmp_path):
    return environment(tmp_path)


class Terminal:
    """A command as leader of a session on a new terminal."""

    def __init__(self, command, environ):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environ)
        self._unread = b""

    def type(self, keys):
        os.write(self._fd, keys)

    def read_until(self, text):
        """Waits for ``text``; returns what came up to its end. What came after it is kept for the next call."""
        while text.encode() not in self._unread:
            self._unread += os.read(self._fd, 4096)
        seen, found, self._unread = self._unread.partition(text.encode())
        return (seen + found).decode()

    def read_to_end(self):
        """What the terminal says until its last user has closed it."""
        try:
            while data := os.read(self._fd, 4096):
                self._unread += data
        except OSError:  # Linux says EIO then
            pass
        return self._unread.decode()

    def wait(self):
        """Closes the terminal; returns the wait status of the command."""
        status = os.waitpid(self.pid, 0)[1]
        os.close(self._fd)
        return status


@pytest.mark.slow
def test_signals_are_passed_on(environ):
    """SIGHUP, SIGUSR1, SIGUSR2 and SIGTERM sent to headrace reach the program once; its answer is the exit code."""
    with running(headrace("run", "--quiet", sys.executable, "-c", LISTENER), environ) as process:
        assert process.stdout.readline() == "ready\n"
        for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTERM"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"heard {name}\n"
        assert process.wait(timeout=30) == 5
        assert process.stdout.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("key", "number"), [(b"\x03", signal.SIGINT), (b"\x1c", signal.SIGQUIT)])
def test_keys_of_the_terminal(environ, key, number):
    """Ctrl-C and Ctrl-backslash reach the program from the terminal; headrace stays, reports, and dies alike."""
    terminal = Terminal(headrace("run", sys.executable, "-c", ECHO), environ)
    terminal.read_until("ready")
    terminal.type(key)
    said = terminal.read_to_end()
    assert f"REPORT ended=signal exit_code=None signal={int(number)}" in said
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
    assert os.WTERMSIG(terminal.wait()) == number


@pytest.mark.slow
def test_program_that_survives_ctrl_c(environ):
    """A program that handles Ctrl-C goes on, with headrace beside it, and ends with its own code."""
    handler = "import signal, sys\nsignal.signal(2, lambda *a: (print('caught', flush=True), sys.exit(9)))\n"
    terminal = Terminal(headrace("run", sys.executable, "-c", handler + ECHO), environ)
    terminal.read_until("ready")
    terminal.type(b"\x03")
    said = terminal.read_to_end()
    assert "caught" in said
    assert "REPORT ended=exit exit_code=9" in said
    assert os.WEXITSTATUS(terminal.wait()) == 9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for job control")
def test_job_control(tmp_path, environ):
    """Ctrl-Z gives the shell back, fg goes on where the program was."""
    (tmp_path / "echo.py").write_text(ECHO)
    environ |= {"PS1": "prompt ", "HISTFILE": "/dev/null", "TERM": "dumb"}
    shell = Terminal(["bash", "--norc", "--noprofile", "--noediting", "-i"], environ)
    shell.read_until("prompt ")
    shell.type((" ".join(headrace("run", tmp_path / "echo.py")) + "\n").encode())
    shell.read_until("ready\r\n")
    shell.type(b"one\n")
    shell.read_until("got one\r\n")
    shell.type(b"\x1a")
    shell.read_until("Stopped")
    shell.read_until("prompt ")
    shell.type(b"fg\n")
    shell.read_until("echo.py\r\n")
    shell.type(b"two\n")
    shell.read_until("got two\r\n")
    shell.type(b"\x04")
    assert "REPORT ended=exit exit_code=0" in shell.read_until("prompt ")
    shell.type(b"exit\n")
    shell.read_to_end()
    assert shell.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["", "HUP", "INT QUIT", "CHLD", "TERM USR1 TTOU", "PIPE"])
def test_dispositions_are_inherited(environ, ignored):
    """What the caller ignores (nohup; background jobs of scripts) the program ignores, and nothing else.

    SIGPIPE is the exception: Python cannot know what it was, and the program gets the default.
    """
    trap = f"trap '' {ignored}; " if ignored else ""
    look = ["grep", "^Sig[BI]", "/proc/self/status"]
    alone, watched = (
        finished(["sh", "-c", trap + 'exec "$@"', "sh", *command], environ)
        for command in (look, headrace("run", "--quiet", *look))
    )
    assert (watched.returncode, watched.stderr) == (0, "")
    if ignored == "PIPE":
        assert watched.stdout == finished(look, environ).stdout
    else:
        assert watched.stdout == alone.stdout


@pytest.mark.slow
def test_nohup(environ):
    """Under nohup a hang-up ends neither headrace nor the program."""
    with running(["nohup", *headrace("run", "--quiet", sys.executable, "-c", ECHO)], environ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate("on\n", timeout=30)
    assert out == "got on\ndone\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_headrace_killed(environ):
    """SIGKILL of headrace: the program goes on with its streams, and what was seen stays in the run directory."""
    with running(headrace("run", sys.executable, "-c", ECHO), environ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.wait(timeout=30)
        process.stdin.write("still here\n")
        process.stdin.close()
        assert process.stdout.read() == "got still here\ndone\n"
    (left,) = run_dirs(environ)
    assert (left / "control").exists()
    assert not (left / "end.json").exists()


def in_pid_namespace(*words):
    """The command as process 1 of a namespace of its own; skips where that is not permitted."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("no permission for a PID namespace here")
    return [*command, *words]


@pytest.mark.slow
def test_first_process_of_a_container(environ):
    """As PID 1 no signal can end headrace: it says 128 + n, as shells do."""
    done = finished(in_pid_namespace(*headrace("run", "sh", "-c", "kill -SEGV $$")), environ)
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr == f"REPORT ended=signal exit_code=None signal={int(signal.SIGSEGV)}\n"


@pytest.mark.slow
def test_first_process_of_a_container_reaps(environ):
    """As PID 1 headrace inherits the program's orphans; they do not stay as zombies."""
    program = """
import os
if (child := os.fork()) == 0:
    if (orphan := os.fork()) == 0:
        os._exit(0)
    print(orphan, flush=True)
    os._exit(0)
os.waitpid(child, 0)
orphan = int(input())
while os.path.exists(f"/proc/{orphan}"):
    os.sched_yield()
"""
    with running(in_pid_namespace(*headrace("run", "--quiet", sys.executable, "-c", program)), environ) as process:
        process.stdin.write(process.stdout.readline())
        process.stdin.close()
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_sigterm_as_first_process_is_passed_on(environ):
    """`docker stop` sends SIGTERM to PID 1: it reaches the program."""
    command = in_pid_namespace(*headrace("run", "--quiet", sys.executable, "-c", LISTENER))
    with running(command, environ) as process:
        assert process.stdout.readline() == "ready\n"
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)
        assert process.stdout.readline() == "heard SIGTERM\n"
        assert process.wait(timeout=30) == 5
