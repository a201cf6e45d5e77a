"""``headrace run``: starts the program, waits for it, reports, and ends as it ended.

    headrace (main thread)  open session -> start program -> [import and start sampler] -> wait -> report -> die alike
    the program             a plain child in headrace's process group, with its stdin, stdout, stderr, working directory
    threads of headrace     the sampler and, with --live, the status line; both end before the report

Everything slow is imported after the program has started. Whatever fails in headrace, the program runs and its exit
code is kept.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import NoReturn

from headrace.errors import UsageError
from headrace.options import RunOptions, read_settings
from headrace.run import signals, talk
from headrace.run.command import Program, resolve
from headrace.run.session import Session


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


def start(program: Program, environ: Mapping[str, str], mask: set[int]) -> int:
    """Starts the program as a child and returns its pid.

    Args:
        program: What to execute.
        environ: Its whole environment.
        mask: Its signal mask.

    Raises:
        UsageError: the kernel refuses it.
    """
    argv = list(program.argv)
    try:
        return _spawn(program.path, argv, environ, mask)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without "#!": the shell's rule, as in execvp
            return _spawn("/bin/sh", ["/bin/sh", program.path, *argv[1:]], environ, mask)
        raise UsageError(f"{program.path} cannot be started: {error.strerror}") from error


def _run_program(program: Program, session: Session) -> signals.End:
    ignores_children = signals.children_are_ignored()
    with signals.held() as mask:
        environ = session.open(os.environ)
        try:
            pid = start(_ignoring_children(program) if ignores_children else program, environ, mask)
        except UsageError:
            session.discard()
            raise
        session.started(pid)
        return signals.wait_for_end(pid)


def _ignoring_children(program: Program) -> Program:
    """The same program with SIGCHLD ignored. posix_spawn cannot ignore a signal, a shell can and then becomes it."""
    script = 'trap "" CHLD; exec "$0" "$@"'
    return Program(path="/bin/sh", argv=("sh", "-c", script, program.path, *program.argv[1:]))


def _spawn(path: str, argv: list[str], environ: Mapping[str, str], mask: set[int]) -> int:
    return os.posix_spawn(path, argv, environ, setsigmask=mask, setsigdef=signals.RESET_IN_CHILD)
