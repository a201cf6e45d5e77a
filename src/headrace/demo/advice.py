"""From a finding's changes to the options of the demo's training script. Pure."""

from __future__ import annotations

from headrace.records.run import Change, Loader, Run

#: The script's option that carries out a change of this name.
_VALUE_OPTIONS = {"num_workers": "--workers", "prefetch_factor": "--prefetch"}
_SWITCH_OPTIONS = {"persistent_workers": "--persistent", "pin_memory": "--pin"}


def options_for(change: Change) -> list[str] | None:
    """Returns the script's options for one change, or None when the script has no option for it."""
    if change.what in _VALUE_OPTIONS and isinstance(change.to, int) and not isinstance(change.to, bool):
        return [_VALUE_OPTIONS[change.what], str(change.to)]
    if change.what in _SWITCH_OPTIONS and change.to is True:
        return [_SWITCH_OPTIONS[change.what]]
    return None


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
