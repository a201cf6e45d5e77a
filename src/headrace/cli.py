"""The command line: one function per verb, no logic. stdout is the result, stderr is talk; wrong use ends with 2.

``headrace run`` does not go through typer (see ``options``), only its help does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import HeadraceError, UsageError
from headrace.options import parse_run
from headrace.run import talk

if TYPE_CHECKING:
    import typer

_RUN_EPILOG = (
    "The first word that is no option of headrace begins the program; all later words belong to it. "
    "A .py file and -m MODULE run under the python of your environment; anything else is executed as it is."
)


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the ``headrace`` command. Ends the process."""
    words = sys.argv[1:] if words is None else words
    try:
        code = _dispatch(list(words))
        talk.flush()
    except HeadraceError as error:
        talk.say(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    _leave(code)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["run"]:
        options = parse_run(words[1:])
        if options is not None:
            from headrace.run.launch import run

            run(options)
        words = ["run", "--help"]
    return _through_typer(words or ["--help"])


def _leave(code: int) -> NoReturn:
    # Python's own end turns the code into 120 when stdout was closed early.
    if code != 0:
        os._exit(code)
    sys.exit(0)


def _through_typer(words: list[str]) -> int:
    import typer.main

    command = typer.main.get_command(_make_app())
    try:
        result = command.main(args=words, prog_name="headrace", standalone_mode=False)
    except Exception as error:
        raise _as_usage_error(error) from error
    return result if isinstance(result, int) else 0


def _as_usage_error(error: Exception) -> Exception:
    """Errors of typer's parser have ``format_message``; which package they come from depends on typer's version."""
    message: Callable[[], str] | None = getattr(error, "format_message", None)
    if message is None:
        return error
    return UsageError(" ".join(message().split()).rstrip("."))


def _make_app() -> typer.Typer:
    import typer

    from headrace import commands

    app = typer.Typer(
        name="headrace",
        help="Finds out why an accelerator waits during PyTorch training, and says what to change.",
        rich_markup_mode=None,
        add_completion=False,
        invoke_without_command=True,  # for --version
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(commands.common)
    app.command("run", epilog=_RUN_EPILOG, options_metavar="[OPTIONS] COMMAND...")(commands.run_as_shown_by_help())
    app.command("attach")(commands.attach)
    app.command("report")(commands.report)
    app.command("demo")(commands.demo)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":  # for documentation tools and for typer's own test runner
        return _make_app()
    raise AttributeError(name)
