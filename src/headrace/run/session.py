"""One observed run from headrace's side: its run directory, its sampler, its report.

    Session(options, settings)
      .open(environ)   -> the program's environment; the run directory exists
      .started()          the program runs from now on
      .watch(pid)         run.json, sampler and status line; left out when the program has ended by then
      .finish(end)        all of that stopped, end.json, report, run directory removed

Nothing here raises because of its own failure (``discard`` and an interrupt apart): it says in one line what failed and
where the run directory is, and keeps the directory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.errors import ObservationError
from headrace.options import DATA_VARIABLE, RUN_DIR_VARIABLE, RunOptions, Settings
from headrace.run import talk
from headrace.run.rundirs import make_run_dir, write_control

if TYPE_CHECKING:
    from headrace.records.run import Run
    from headrace.run.live import Live
    from headrace.run.signals import End


class Sampler(Protocol):
    """Watches the program from outside, on a thread of its own."""

    #: Why it ended early, in words; None while all is well.
    failure: str | None

    @property
    def cpu_ns(self) -> int:
        """CPU time it has used so far, ns."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Parts:
    """What a session uses of the other layers. Each is imported when it is needed: together they take 200 ms."""

    def sampler(self, pid: int, run_dir: Path) -> Sampler:
        from headrace.observe.sampler import Sampler

        return Sampler(pid, run_dir)

    def gather(self, run_dir: Path) -> Run:
        from headrace.run.gather import gather

        return gather(run_dir)

    def render(self, run: Run) -> str:
        from headrace.report.terminal import render

        return render(run)

    def writer(self, kind: str) -> Callable[[Run, Path], None]:
        from headrace.report import files

        return {"json": files.write_json, "html": files.write_html, "trace": files.write_trace}[kind]


class Session:
    """See the module. One thread, in the order shown."""

    def __init__(self, options: RunOptions, settings: Settings, parts: Parts | None = None) -> None:
        self.run_dir: Path | None = None
        self._options = options
        self._settings = settings
        self._parts = parts or Parts()
        self._failed = False
        self._has_header = False
        self._sampler: Sampler | None = None
        self._live: Live | None = None
        self._started_mono_ns = 0
        self._started_unix_ns = 0

    def open(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Makes the run directory and returns the program's environment: the caller's, plus what starts the agent.

        Without a run directory the environment is the caller's alone: the program runs unobserved.
        """
        with self._tolerating("the run directory cannot be made; the program runs unobserved"):
            run_dir = make_run_dir(self._settings.run_root)
            self.run_dir = run_dir
            write_control(run_dir, self._options.steps, self._options.warmup)
            return self._with_agent(environ, run_dir)
        return dict(environ)

    def started(self) -> None:
        """Takes the time at which the program started."""
        self._started_mono_ns, self._started_unix_ns = time.monotonic_ns(), time.time_ns()

    def watch(self, pid: int) -> None:
        """Writes ``run.json``, starts the sampler and, with ``--live``, the status line."""
        run_dir = self.run_dir
        if run_dir is None:
            return
        self._write_header(run_dir)
        with self._tolerating("the sampler cannot be started"):
            self._sampler = self._parts.sampler(pid, run_dir)
            self._sampler.start()
        if self._options.live:
            with self._tolerating("the status line cannot be shown"):
                from headrace.run.live import Live

                self._live = Live(run_dir, self._cause_so_far)
                self._live.start()

    def finish(self, end: End) -> None:
        """The program has ended. Stops watching, writes ``end.json``, reports, removes the run directory."""
        if self._live is not None:
            self._live.stop()
        run_dir = self.run_dir
        if run_dir is None:
            return
        if not self._has_header:
            self._write_header(run_dir)
        self._stop_sampler()
        with self._tolerating("end.json cannot be written"):
            self._write_end(run_dir, end)
        with self._tolerating("the run cannot be analysed"):
            self._report(self._parts.gather(run_dir))
        if not (self._failed or self._settings.keep):
            self.discard()
        elif self._settings.keep and not self._options.quiet:
            talk.say(f"kept {run_dir}")

    def interrupted(self) -> None:
        """Ctrl-C came during the report: what was seen stays on disk."""
        if self.run_dir is not None and self.run_dir.exists():
            talk.say(f"report interrupted; make it again with: headrace report {self.run_dir}")

    def discard(self) -> None:
        """Removes the run directory; what cannot be removed stays."""
        if self.run_dir is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _with_agent(self, environ: Mapping[str, str], run_dir: Path) -> dict[str, str]:
        # Not through the import system: importing headrace.observe would be paid for before the program starts.
        agent = Path(__file__).resolve().parent.parent / "observe" / "agent"
        paths = [str(agent), *filter(None, [environ.get("PYTHONPATH")])]
        added = {"PYTHONPATH": os.pathsep.join(paths), RUN_DIR_VARIABLE: str(run_dir)}
        inherited = {name: value for name, value in environ.items() if name != DATA_VARIABLE}
        if self._options.data is not None:
            added[DATA_VARIABLE] = self._options.data
        return inherited | added

    def _write_header(self, run_dir: Path) -> None:
        self._has_header = True
        with self._tolerating("run.json cannot be written"):
            (run_dir / "run.json").write_bytes(self._header())

    def _header(self) -> bytes:
        import msgspec

        from headrace import __version__
        from headrace.records.rundir import RunHeader
        from headrace.run.redact import redact

        header = RunHeader(
            command=redact(self._options.command),
            headrace_version=__version__,
            headrace_pid=os.getpid(),
            started_mono_ns=self._started_mono_ns,
            started_unix_ns=self._started_unix_ns,
            steps=self._options.steps,
            warmup=self._options.warmup,
        )
        return msgspec.json.encode(header)

    def _write_end(self, run_dir: Path, end: End) -> None:
        import msgspec

        from headrace.records.rundir import RunEnd

        record = RunEnd(
            ended="signal" if end.signal is not None else "exit",
            exit_code=end.exit_code,
            signal=end.signal,
            ended_mono_ns=end.mono_ns,
            sampler_cpu_ns=self._sampler.cpu_ns if self._sampler is not None else None,
        )
        (run_dir / "end.json").write_bytes(msgspec.json.encode(record))

    def _stop_sampler(self) -> None:
        sampler = self._sampler
        if sampler is not None:
            with self._tolerating("the sampler failed"):
                sampler.stop()
                if sampler.failure is not None:
                    raise ObservationError(sampler.failure)

    def _report(self, run: Run) -> None:
        if not self._options.quiet:
            with self._tolerating("the report cannot be shown"):
                talk.write(self._parts.render(run).rstrip("\n") + "\n")
        for kind, path in (("json", self._options.json), ("html", self._options.html), ("trace", self._options.trace)):
            if path is None:
                continue
            with self._tolerating(f"{path} cannot be written"):
                self._parts.writer(kind)(run, path)
                if not self._options.quiet:
                    talk.say(f"wrote {path}")

    def _cause_so_far(self) -> str | None:
        if self.run_dir is None:
            return None
        finding = self._parts.gather(self.run_dir).finding
        return finding.cause if finding is not None else None

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        """The border to the user's program: a failure of ours is said in one line and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the program's exit code must be kept
            self._failed = True
            kept = f"; what was seen is in {self.run_dir}" if self.run_dir is not None else ""
            talk.say(f"{what}: {_in_one_line(error)}{kept}")


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    name = type(error).__name__
    if not text:
        return name
    # An OSError and our own errors explain themselves; of others the type is half of the message.
    return text if isinstance(error, OSError) or type(error).__module__.startswith("headrace") else f"{name}: {text}"
