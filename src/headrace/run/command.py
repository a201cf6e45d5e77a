"""From the words after the options to the program that is started. Reads the file system, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.options import near

#: What execvp searches when PATH is not set.
_DEFAULT_PATH = "/bin:/usr/bin"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is executed: the file at ``path``, with ``argv`` as it sees it (``argv[0]`` is the word that named it)."""

    path: str
    argv: tuple[str, ...]


def resolve(words: Sequence[str], environ: Mapping[str, str]) -> Program:
    """Finds the program that ``headrace run WORDS`` means.

    ``x.py ARGS`` and ``-m module ARGS`` run under the first ``python`` of the caller's PATH, then ``python3``; never
    under headrace's own interpreter, which may live in another environment (pipx). Anything else is executed as it is.

    Args:
        words: The program and its arguments; at least one word.
        environ: The caller's environment.

    Raises:
        UsageError: no such script or command, a directory, not executable, no Python.
    """
    first = words[0]
    if first == "-m":
        return _module(words, environ)
    if first.endswith(".py") and not _is_command_on_path(first, environ):
        _check_script(first)
        return _under_python(words, environ)
    return Program(path=_executable(first, environ), argv=tuple(words))


def search_path(word: str, environ: Mapping[str, str]) -> str | None:
    """The first executable file of that name on PATH, as execvp would find it."""
    for folder in _path_folders(environ):
        candidate = os.path.join(folder or os.curdir, word)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def _module(words: Sequence[str], environ: Mapping[str, str]) -> Program:
    if len(words) < 2 or not words[1] or words[1].startswith("-"):
        raise UsageError("-m needs the name of a module, e.g. headrace run -m package.train")
    return _under_python(words, environ)


def _is_command_on_path(word: str, environ: Mapping[str, str]) -> bool:
    """Some packages install commands that end in .py; a file in the working directory comes first."""
    return "/" not in word and not os.path.exists(word) and search_path(word, environ) is not None


def _under_python(words: Sequence[str], environ: Mapping[str, str]) -> Program:
    for name in ("python", "python3"):
        path = search_path(name, environ)
        if path is not None:
            return Program(path=path, argv=(name, *words))
    raise UsageError("neither python nor python3 is on PATH; activate the program's environment, or name its python")


def _check_script(word: str) -> None:
    if os.path.isdir(word):
        raise UsageError(f"{word} is a directory, not a script")
    if not os.path.exists(word):
        raise UsageError(f"no such script: {word} (in {os.getcwd()}){_near_file(word)}")
    if not os.access(word, os.R_OK):
        raise UsageError(f"{word} cannot be read: permission denied")


def _executable(first: str, environ: Mapping[str, str]) -> str:
    if not first:
        raise UsageError("the program is an empty word; put the command after headrace run, e.g. headrace run train.py")
    if "/" in first:
        return _executable_file(first)
    found = search_path(first, environ)
    if found is not None:
        return found
    if os.path.isfile(first):
        how = f"headrace run ./{first}" if os.access(first, os.X_OK) else f"headrace run sh {first}"
        raise UsageError(f"no such command: {first}; for the file in this directory write {how}")
    raise UsageError(f"no such command: {first} is not on PATH{near(first, _commands(environ))}")


def _executable_file(word: str) -> str:
    if os.path.isdir(word):
        raise UsageError(f"{word} is a directory, not a program")
    if not os.path.exists(word):
        raise UsageError(f"no such command: {word} (in {os.getcwd()}){_near_file(word)}")
    if not os.access(word, os.X_OK):
        raise UsageError(f"{word} is not executable: chmod +x {word}, or name its interpreter: headrace run sh {word}")
    return word


def _near_file(word: str) -> str:
    path = Path(word)
    try:
        names = [str(path.with_name(other.name)) for other in path.parent.iterdir()]
    except OSError:
        return ""
    return near(str(path), names)


def _commands(environ: Mapping[str, str]) -> Iterator[str]:
    for folder in _path_folders(environ):
        try:
            yield from os.listdir(folder or os.curdir)
        except OSError:
            continue


def _path_folders(environ: Mapping[str, str]) -> list[str]:
    return environ.get("PATH", _DEFAULT_PATH).split(os.pathsep)
