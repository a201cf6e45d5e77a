"""``headrace.observe()``: the same observation, from inside the program or a notebook.

Who runs where: the agent's hooks in this process (and, by fork, in its workers), the sampler in a process of its own
that ends when its stdin closes, so that it takes none of this process's GIL and never outlives it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import msgspec

from .. import __version__
from ..errors import UsageError
from ..records.rundir import RunEnd, RunHeader
from .rundirs import make_run_dir, write_control

if TYPE_CHECKING:
    from ..records.run import Run
    from ..report.notebook import Report

_AGENT = "_headrace_agent"


class Observation:
    """One observed stretch of this program. Use it as a context manager, from the thread that trains.

    After the ``with`` block, ``report()`` renders itself as HTML in a notebook and as text elsewhere.
    """

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._sampler: subprocess.Popen[bytes] | None = None
        self._agent: ModuleType | None = None
        self._run: Run | None = None
        self._why_not: str | None = None

    def __enter__(self) -> Observation:
        """Hooks this process. Loaders iterated from now on are seen; workers already running are not.

        Never raises on its own account: under ``headrace run`` it does nothing, and ``report()`` says so.
        """
        try:
            return self._begin()
        except Exception as error:  # noqa: BLE001 - the border to the user's training, which goes on unobserved
            self._why_not = f"headrace could not observe: {type(error).__name__}: {error}"
            return self

    def _begin(self) -> Observation:
        loaded = sys.modules.get(_AGENT)
        if loaded is not None and loaded.state.writer is not None:
            self._why_not = "this process is observed already (by headrace run, or another headrace.observe())"
            return self
        self._run_dir = make_run_dir(None)
        write_control(self._run_dir, None, 0)
        self._write("run.json", self._header())
        self._start_sampler(self._run_dir)
        self._agent = loaded or _load_agent()
        self._agent.start(str(self._run_dir))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unhooks and reads what was seen. Blocks for the analysis; an error of the block passes through."""
        if self._agent is not None:
            self._agent.stop()
        self._stop_sampler()
        if self._why_not is not None or self._run_dir is None:
            return
        try:
            self._write("end.json", RunEnd(ended="steps", ended_mono_ns=time.monotonic_ns()))
            from .gather import gather

            self._run = gather(self._run_dir)
        except Exception as failure:  # noqa: BLE001 - as above: report() says it
            self._why_not = f"what was seen cannot be read: {type(failure).__name__}: {failure}"
        finally:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def run(self) -> Run:
        """The record ``headrace.run/1``.

        Raises:
            UsageError: the block has not ended, or nothing could be observed; the message says why.
        """
        if self._why_not is not None:
            raise UsageError(self._why_not)
        if self._run is None:
            raise UsageError("nothing to report yet: call it after the 'with headrace.observe()' block has ended")
        return self._run

    def report(self) -> Report:
        """What was seen; shows itself as HTML in Jupyter. Raises UsageError before the block has ended."""
        from ..report.notebook import Report

        return Report(self.run)

    def _header(self) -> RunHeader:
        from .redact import redact

        return RunHeader(
            command=redact(list(sys.argv)),
            headrace_version=__version__,
            headrace_pid=os.getpid(),
            started_mono_ns=time.monotonic_ns(),
            started_unix_ns=time.time_ns(),
        )

    def _write(self, name: str, record: msgspec.Struct) -> None:
        assert self._run_dir is not None
        (self._run_dir / name).write_bytes(msgspec.json.encode(record))

    def _start_sampler(self, run_dir: Path) -> None:
        # -I would lose PYTHONPATH installs; the run directory variable must not reach it, or it would observe itself.
        env = {k: v for k, v in os.environ.items() if k != "HEADRACE_RUN_DIR"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_source_root()), env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "headrace.observe.sampler", str(run_dir), str(os.getpid())]
        try:
            self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
        except OSError:
            self._sampler = None  # the report then says that the sampler did not run

    def _stop_sampler(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is None or sampler.stdin is None:
            return
        sampler.stdin.close()
        try:
            sampler.wait(2.0)
        except subprocess.TimeoutExpired:
            sampler.kill()
            sampler.wait()


def _source_root() -> Path:
    return Path(__file__).resolve().parents[2]


def _load_agent() -> ModuleType:
    """Imports the agent by its file: its directory holds a ``sitecustomize`` that must not come onto ``sys.path``."""
    path = Path(__file__).resolve().parent.parent / "observe" / "agent" / _AGENT / "__init__.py"
    spec = importlib.util.spec_from_file_location(_AGENT, path, submodule_search_locations=[str(path.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_AGENT] = module
    spec.loader.exec_module(module)
    return module
