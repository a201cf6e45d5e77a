"""From a finding's changes to the options of the demo's training script. Pure."""

from __future__ import annotations

import re

from headrace.records.run import Change, Loader, Run

#: The script's option that carries out an argument of this name.
_VALUE_OPTIONS = {"num_workers": "--workers", "prefetch_factor": "--prefetch", "threads per worker": "--threads"}
_SWITCH_OPTIONS = {"persistent_workers": "--persistent", "pin_memory": "--pin"}
_ARGUMENT = re.compile(r"\b(\w+)=(\d+|True)\b")


def options_for(change: Change) -> list[str] | None:
    """Returns the script's options for one change, or None when the script has no option for it.

    The line to write counts as a whole: the prediction holds for all of its arguments together.
    """
    if _option(change.what, change.to) is None:
        return None
    arguments: dict[str, object] = {name: _value(text) for name, text in _ARGUMENT.findall(change.line or "")}
    options = (_option(name, value) for name, value in {**arguments, change.what: change.to}.items())
    return [word for option in options if option for word in option]


def _option(name: str, value: object) -> list[str] | None:
    """The script's option for one argument, or None when it has none."""
    if name in _VALUE_OPTIONS and isinstance(value, int) and not isinstance(value, bool):
        return [_VALUE_OPTIONS[name], str(value)]
    if name in _SWITCH_OPTIONS and value is True:
        return [_SWITCH_OPTIONS[name]]
    return None


def _value(text: str) -> int | bool:
    """A number or True, as written in the line."""
    return True if text == "True" else int(text)


def first_applicable(run: Run) -> Change | None:
    """Returns the first change of the run's finding that the script can carry out.

    Only one is applied, because each prediction holds for its change alone.
    """
    changes = run.finding.changes if run.finding else []
    return next((change for change in changes if options_for(change) is not None), None)


def subject(run: Run) -> Loader | None:
    """Returns the training loader with the most steps, or None when the run saw no loader."""
    loaders = [loader for process in run.processes for loader in process.loaders if loader.kind == "dataloader"]
    return max(loaders, key=lambda loader: (loader.role == "train", loader.num_steps), default=None)
