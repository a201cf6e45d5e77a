"""One tree of errors. A message is one line: what was wrong, what was there, what to do.

HeadraceError
|-- UsageError         wrong use: nothing was run; the command line ends with 2
|-- RecordError        a saved run or a run directory is damaged, missing or newer than this headrace; ends with 2
|-- ObservationError   headrace itself failed while it watched: the program it watched is not affected
`-- LoaderError        a batch could not be made; also a RuntimeError, as DataLoader raises
    |-- WorkerDiedError     a worker died, and its batch is not made again
    |-- WorkerTimeoutError  a batch did not come within ``timeout``
    `-- MemoryLimitError    there is no room for a batch
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of everything that headrace raises on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class UsageError(HeadraceError, ValueError):
    """A word, an option or a setting that makes no sense; found before anything runs."""

    exit_code = 2


class RecordError(HeadraceError):
    """A saved run cannot be read or written: damaged, missing, or of a newer format."""

    exit_code = 2


class ObservationError(HeadraceError):
    """Watching failed. Never reaches the watched program."""


class LoaderError(HeadraceError, RuntimeError):
    """``headrace.Loader`` could not give a batch."""


class WorkerDiedError(LoaderError):
    """A worker died and its batch is not made again: it killed two workers, or restarting was switched off."""


class WorkerTimeoutError(LoaderError):
    """A batch did not come within ``timeout``; the message shows where its worker is."""


class MemoryLimitError(LoaderError):
    """There is no room for a batch; found before the kernel would kill a process for it."""
