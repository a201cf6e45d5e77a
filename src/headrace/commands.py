"""The verbs that go through typer. Each hands over to the layer that does the work."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.errors import UsageError
from headrace.options import check_report_path, option_fields

if TYPE_CHECKING:
    from headrace.records.run import Run

_TYPES: dict[str | None, Any] = {None: bool, "FILE": Path, "N": int, "MODULE:FUNCTION": str}


def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """What ``headrace`` does without a verb."""
    if version:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise UsageError("no command given; headrace --help lists them")


def run_as_shown_by_help() -> Callable[..., None]:
    """A function with the options of ``RunOptions`` as its parameters, from which typer makes the help of ``run``."""

    def run(**_: object) -> None:
        """Run a training program and tell what its accelerator waits for."""

    parameters = [_as_parameter(f.name, _TYPES[f.metadata["metavar"]], f.default, f.metadata) for f in option_fields()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect.signature reads
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def attach(
    pid: Annotated[int, typer.Argument(help="Process to look at; its children belong to it.", metavar="PID", min=1)],
    seconds: Annotated[float, typer.Option(help="How long to look, in seconds.", metavar="S", min=1.0)] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the record of what was seen.", metavar="FILE")] = None,
) -> None:
    """Diagnose a job that is already running, without touching it."""
    _check({"--json": json})
    from headrace.report import files
    from headrace.run.attach import attach as look

    seen = look(pid, seconds)
    _show(seen)
    if json is not None:
        _write(seen, json, files.write_json)


def report(
    path: Annotated[Path, typer.Argument(help="A saved run (FILE.json) or a run directory.", metavar="PATH")],
    json: Annotated[Path | None, typer.Option(help="Write the record.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.", metavar="FILE")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write Chrome trace events.", metavar="FILE")] = None,
) -> None:
    """Show a saved run again, as text or as files."""
    _check({"--json": json, "--html": html, "--trace": trace})
    from headrace.report import files

    seen = _load(path)
    writers = ((json, files.write_json), (html, files.write_html), (trace, files.write_trace))
    wanted = [(target, write) for target, write in writers if target is not None]
    for target, write in wanted:
        _write(seen, target, write)
    if not wanted:
        _show(seen)


def demo(
    step_ms: Annotated[
        float | None, typer.Option(help="Step of the simulated device, in ms.", metavar="MS", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the reports go.", metavar="DIR", show_default=False)] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the images there too.")] = False,
) -> None:
    """Train on real photographs that ship with scikit-image, before and after the advice."""
    from headrace.demo.story import main

    raise typer.Exit(main(step_ms, out, keep))


def _as_parameter(name: str, kind: Any, default: Any, metadata: Any) -> inspect.Parameter:
    option = typer.Option(f"--{name}", help=metadata["help"], metavar=metadata["metavar"], show_default=False)
    optional = kind if default is not None else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[optional, option]
    )


def _check(paths: dict[str, Path | None]) -> None:
    for option, path in paths.items():
        if path is not None:
            check_report_path(option, path)


def _write(run: Run, target: Path, write: Callable[[Run, Path], None]) -> None:
    from headrace.run import talk

    write(run, target)
    talk.say(f"wrote {target}")


def _show(run: Run) -> None:
    from headrace.report.terminal import render

    # render asks stderr, where headrace run reports; here the report is the result, on stdout.
    typer.echo(render(run, color=None if sys.stdout.isatty() else False), nl=False)


def _load(path: Path) -> Run:
    if not path.exists():
        raise UsageError(f"no such file or run directory: {path}")
    if not path.is_dir():
        from headrace.report.files import load

        return load(path)
    from headrace.run.gather import gather

    return gather(path)
