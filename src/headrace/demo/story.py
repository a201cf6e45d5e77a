"""The demo's course: cut images, train, read the advice, train under it, show both beside the prediction."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.demo.advice import first_applicable, options_for
from headrace.demo.part import Part, PartError, play
from headrace.demo.show import comparison, verdict
from headrace.records.run import Change

#: About 100 ms a step without workers and 40 ms with them on two cores of 2024: 25 s and 10 s.
NUM_STEPS = 250
#: On a slow or busy machine each part stops here, so that the demo stays under three minutes.
MAX_PART_S = 60
NUM_IMAGES = 480
#: A mid-size model's step on a strong GPU; short enough that one process cannot feed it, two can.
DEFAULT_STEP_MS = 40.0
DEFAULT_OUT_DIR = Path("headrace-demo")
_NEEDS = {"torch": "torch", "torchvision": "torchvision", "skimage": "scikit-image", "PIL": "pillow"}


def main(step_ms: float | None = None, out_dir: Path | None = None, keep: bool = False) -> int:
    """Plays the demo and prints it: results on stdout, progress and errors on stderr.

    Args:
        step_ms: Length of the simulated device's step in ms. None: 40 ms, and the GPU is used when there is one.
        out_dir: Where reports go; ``headrace-demo`` in the working directory by default.
        keep: Leave the images there too.

    Returns:
        0 when both parts ran, 1 when one failed, 2 when something is missing or wrong, 130 after Ctrl-C.
    """
    talk = Console(stderr=True, highlight=False)
    complaint = _complaint(step_ms)
    if complaint:
        talk.print(complaint, markup=False, soft_wrap=True)
        return 2
    out_dir = out_dir or DEFAULT_OUT_DIR
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with _image_dir(out_dir, keep) as images:
            _tell(images, _script_options(images, step_ms), out_dir, talk)
    except PartError as failed:
        talk.print(str(failed), markup=False)
        return 1
    except OSError as error:
        talk.print(f"headrace demo: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(images: Path, options: list[str], out_dir: Path, talk: Console) -> None:
    """Plays both parts under a progress display, then prints what they showed."""
    script = Path(shutil.copy(Path(__file__).with_name("train.py"), out_dir / "train.py"))
    with _progress(talk) as progress:
        _cut(images, progress)
        before = _play(progress, "before", script, options, out_dir)
        change = first_applicable(before.run)
        after = None if change is None else _apply(progress, change, script, options, out_dir)
    _show(before, change, after)


def _cut(images: Path, progress: Progress) -> None:
    """Cuts the images."""
    from headrace.demo.images import cut

    for _ in progress.track(cut(images, NUM_IMAGES), total=NUM_IMAGES, description="cutting photographs"):
        pass


def _play(progress: Progress, name: str, script: Path, options: list[str], out_dir: Path) -> Part:
    """Plays one part with a bar of its own."""
    task = progress.add_task(f"training, {name} the advice", total=NUM_STEPS)
    part = play(name, script, options, out_dir, lambda step: progress.update(task, completed=step))
    progress.stop_task(task)
    return part


def _apply(progress: Progress, change: Change, script: Path, options: list[str], out_dir: Path) -> Part:
    """Plays the second part under the advised change."""
    return _play(progress, "after", script, [*options, *(options_for(change) or [])], out_dir)


def _show(before: Part, change: Change | None, after: Part | None) -> None:
    """Prints the comparison; the path of the report comes last."""
    result = Console(highlight=False)
    result.print(comparison(before, after))
    for line in verdict(before, change, after):
        result.print(line, markup=False, soft_wrap=True)
    # Not through rich: a path is never wrapped, so that it can be clicked or copied.
    print(f"report: {before.html.resolve()}", flush=True)


def _complaint(step_ms: float | None) -> str | None:
    """One line on what keeps the demo from running, or None."""
    if step_ms is not None and not step_ms > 0:
        return f"headrace demo: the step must be longer than 0 ms, got {step_ms:g}"
    missing = [package for module, package in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"headrace demo needs {' and '.join(missing)}: pip install 'headrace[demo]'"
    return None


def _script_options(images: Path, step_ms: float | None) -> list[str]:
    """The script's command line before the advice. Whoever names a step time wants the simulated device."""
    options = ["--data", str(images), "--steps", str(NUM_STEPS), "--max-seconds", str(MAX_PART_S)]
    options += ["--step-ms", f"{step_ms or DEFAULT_STEP_MS:g}"]
    return options if step_ms is None else [*options, "--simulate"]


@contextmanager
def _image_dir(out_dir: Path, keep: bool) -> Iterator[Path]:
    """A folder for the images, removed afterwards unless they are to be kept."""
    if keep:
        yield out_dir / "images"
        return
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        yield Path(folder)


def _progress(console: Console) -> Progress:
    """The progress display."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
