"""``headrace run``: starts the program, waits for it, reports, and ends as it ended.

    headrace (main thread)  open session -> start program -> [0.2 s later] start sampler -> wait -> report -> die alike
    the program             a plain child in headrace's process group, with its stdin, stdout, stderr, working directory
    threads of headrace     the sampler and, with --live, the status line; both end before the report

Everything slow is imported after the program has started. Whatever fails in headrace, the program runs and its exit
code is kept.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from typing import NoReturn

from headrace.errors import UsageError
from headrace.options import RunOptions, read_settings
from headrace.run import signals, talk
from headrace.run.command import Program, resolve
from headrace.run.session import Session

#: For so long after its start the program has the machine to itself; only then are sampler and records imported, which
#: takes 0.2 s of a core. On one free core, starting both at once doubled the time to the program's first line
#: (measured: 230 ms instead of 100 ms).
_HEAD_START_S = 0.2


def run(options: RunOptions) -> NoReturn:
    """Runs the program under observation and ends this process as the program ended.

    Blocks until the program has ended and the report is written. Main thread only.

    Raises:
        UsageError: the program cannot be started; nothing was run.
    """
    settings = read_settings(os.environ)
    program = resolve(options.command, os.environ)
    talk.occupy_standard_descriptors()
    session = Session(options, settings)
    end = _run_program(program, session)
    try:
        session.finish(end)
    except KeyboardInterrupt:
        session.interrupted()
    talk.flush()
    signals.die_like(end)


def start(program: Program, environ: Mapping[str, str], before: signals.Inherited) -> int:
    """Starts the program as a child and returns its pid.

    Args:
        program: What to execute.
        environ: Its whole environment.
        before: The signal mask and dispositions that it gets.

    Raises:
        UsageError: the kernel refuses it.
    """
    # Not posix_spawn: glibc's leaves signals 32 and 33 ignored in the child (measured), and it cannot ignore one.
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(program, environ, before, write_end)
    os.close(write_end)
    refused = os.read(read_end, 16)  # ends when exec closes the other end
    os.close(read_end)
    if refused:
        os.waitpid(pid, 0)
        raise UsageError(f"{program.path} cannot be started: {os.strerror(int(refused))}")
    return pid


def _become(program: Program, environ: Mapping[str, str], before: signals.Inherited, failure_fd: int) -> NoReturn:
    """In the child: becomes the program, or writes the errno and ends."""
    try:
        signals.restore(before)
        try:
            os.execve(program.path, program.argv, environ)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script without "#!": the shell's rule, as in execvp.
            os.execve("/bin/sh", ["/bin/sh", program.path, *program.argv[1:]], environ)
    except OSError as error:
        os.write(failure_fd, str(error.errno).encode())
    finally:
        os._exit(127)


def _run_program(program: Program, session: Session) -> signals.End:
    with signals.held() as before:
        environ = session.open(os.environ)
        try:
            pid = start(program, environ, before)
        except UsageError:
            session.discard()
            raise
        session.started()
        end = signals.wait_for_end_until(pid, time.monotonic() + _HEAD_START_S)
        if end is None:
            session.watch(pid)
            end = signals.wait_for_end(pid)
        return end
