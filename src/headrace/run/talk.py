"""headrace's words on stderr: said or lost, never an error. A closed stderr must not change how a program ends."""

from __future__ import annotations

import os
import select
import sys
import time

_STDERR = 2
#: A terminal that was stopped (Ctrl-S) or a full pipe that nobody reads must not keep a finished program from ending.
_PATIENCE_S = 2.0
_readers = {"gone": False}


def say(text: str) -> None:
    """Writes one line of headrace's own to stderr: ``headrace: <text>``."""
    write(f"headrace: {text}\n")


def write(text: str) -> None:
    """Writes to stderr as it is; never raises. Waits 2 s for a reader that does not read, and then never again."""
    if sys.stderr is None or _readers["gone"]:  # None: closed by the caller
        return
    data = text.encode(getattr(sys.stderr, "encoding", None) or "utf-8", "replace")
    deadline_s = time.monotonic() + _PATIENCE_S
    try:
        while data and time.monotonic() < deadline_s:
            # Waiting before each write also covers a stderr that another program made non-blocking.
            if select.select([], [_STDERR], [], _PATIENCE_S)[1]:
                data = data[os.write(_STDERR, data[:4096]) :]
    except (OSError, ValueError):
        pass
    _readers["gone"] = bool(data)


def is_terminal() -> bool:
    """Whether a line on stderr can be written over."""
    return sys.stderr is not None and os.isatty(_STDERR) and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal on stderr, 80 where it has none."""
    try:
        return os.get_terminal_size(_STDERR).columns or 80
    except OSError:
        return 80


def flush() -> None:
    """Pushes out what Python still holds for stdout and stderr; what cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass


def occupy_standard_descriptors() -> None:
    """Opens /dev/null in place of a closed 0, 1 or 2, so that no file of ours gets that number.

    The stand-ins are not inherited: the program finds them closed, as it would without headrace.
    """
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)
