"""What the hooks of one process share: the writer, the control cells, and the rule that nothing of ours is raised."""

import functools
import itertools
import os
import sys
import time

from .writer import Control, Writer

mono = time.monotonic_ns
writer = None
control: Control = None  # type: ignore[assignment]  # begin() makes it before the writer; hooks ask for that
run_dir = None
data_spec = None
hooked: dict[str, bool | str] = {}  # name of a hook -> True, or the reason why it is not there
next_id = itertools.count(1).__next__
_fork_registered = False
_announced = False  # whether this process's first line is written
_at_fork_child: list = []  # callables of other modules, run in a forked child after the writer was renewed
_before_fork: list = []
at_end: list = []  # run before the writer is closed: what is written a little late


def begin(directory, data=None):
    global writer, control, run_dir, data_spec, _fork_registered
    t0 = mono()
    run_dir, data_spec = directory, data
    control = Control(directory)
    writer = Writer(directory, t0)
    if not _fork_registered:
        os.register_at_fork(before=_run_before_fork, after_in_child=_after_fork_in_child)
        _fork_registered = True
    try:
        announce(forked=False)
    except OSError:
        writer = None  # the run directory is gone, or not ours: this process is not observed


def announce(forked=True):
    """Writes this process's first line, once. A forked child does so when it turns out to use torch."""
    global _announced
    if not _announced and writer is not None:
        _announced = True
        _write_start(writer, forked)


def end(reason):
    global writer, _announced
    if writer is None:
        return
    for call in at_end:
        quiet("end")(call)()
    meta("done", reason=reason, t_ns=mono())
    _announced = False
    writer.close()
    writer = None
    control.close()


def event(*fields):
    w = writer
    if w is not None:
        w.event(*fields)


def meta(kind, **fields):
    """Appends ``{"k": kind, ...}`` to this process's ``.meta`` file. Not for hot paths."""
    w = writer
    if w is None:
        return
    import json  # late: bare interpreters that never see torch should not pay for it

    try:
        w.line(json.dumps(dict(k=kind, **fields), default=str))
    except OSError as error:
        w.broken = w.broken or str(error)


def failed(where, error):
    """Something of ours broke: record it once, so that the report can say what it lacks."""
    if hooked.get("!" + where):
        return
    hooked["!" + where] = True
    try:
        meta("error", where=where, text="%s: %s" % (type(error).__name__, error))
    except Exception:  # noqa: BLE001 - nothing is left to do
        pass


def quiet(where):
    """Decorator: our own failures are recorded, never raised into the user's program."""

    def wrap(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the border to the user's program
                failed(where, error)
                return None

        return call

    return wrap


def rank():
    value = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    return int(value) if value and value.isdigit() else None


def _write_start(to, forked):
    # No json here: this runs in every interpreter of the tree, most of which never import torch.
    argv = getattr(sys, "orig_argv", None) or []
    rank_now = rank()
    to.line(
        '{"k": "start", "pid": %d, "ppid": %d, "t_ns": %d, "forked": %s, "rank": %s, '
        '"python": "%d.%d.%d", "cwd": %s, "argv": [%s]}'
        % (
            os.getpid(),
            os.getppid(),
            to.start_ns,
            "true" if forked else "false",
            "null" if rank_now is None else rank_now,
            *sys.version_info[:3],
            _quote(cwd()),
            ", ".join(_quote(a[:300]) for a in argv[:40]),
        )
    )


def _quote(text):
    """As JSON. Bytes that are no text (lone surrogates) become question marks: no report could be written with them."""
    text = text.encode("utf-8", "replace").decode()
    return '"%s"' % "".join(c if c.isprintable() and c not in '"\\' else "\\u%04x" % min(ord(c), 0xFFFF) for c in text)


def cwd():
    """The working directory; empty when it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _run_before_fork():
    if writer is None:
        return
    for call in _before_fork:
        quiet("before fork")(call)()


def _after_fork_in_child():
    # The parent's map stays the parent's: the child must never write into it, nor a frame that holds its writer.
    global writer, _announced
    if writer is None:
        return
    writer.close()
    writer, _announced = Writer(run_dir, mono()), False
    if hooked:
        quiet("fork")(announce)()
    for call in _at_fork_child:
        quiet("fork")(call)()
