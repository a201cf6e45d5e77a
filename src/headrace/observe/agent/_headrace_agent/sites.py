"""Where in the user's code something happened: the innermost line outside installed packages."""

import os
import sys
import sysconfig
from types import FrameType

from . import state
from .hooks import HIDDEN

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY_PARTS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TORCH_PARTS = tuple(part + "torch" + os.sep for part in _LIBRARY_PARTS)
_prefixes = None


def _library_prefixes():
    global _prefixes
    if _prefixes is None:
        paths = sysconfig.get_paths()
        # Scripts: what pip installs as a command holds no line of the user's either.
        names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
        found = {os.path.abspath(paths[n]) + os.sep for n in names if n in paths} | {_HERE + os.sep}
        _prefixes = ("<frozen", *found, *{os.path.realpath(p) + os.sep for p in found})
    return _prefixes


def is_library(path):
    """True for the standard library, installed packages and headrace itself."""
    return any(p in path for p in _LIBRARY_PARTS) or path.startswith(_library_prefixes())


def user_site(depth=1):
    """``file:line`` of the innermost frame of the user's; of the innermost package but torch when there is none.

    Returns also whether the direct caller was the user's own code.
    """
    frame: FrameType | None = sys._getframe(depth)
    direct, last, package = None, None, None
    while frame is not None:
        path = frame.f_code.co_filename
        library = is_library(path)
        if direct is None and not path.startswith((_HERE, HIDDEN)):
            direct = not library
        if not library:
            return text(path, frame.f_lineno), bool(direct)
        if package is None and any(p in path for p in _LIBRARY_PARTS) and not any(p in path for p in _TORCH_PARTS):
            package = frame
        last = frame
        frame = frame.f_back
    last = package or last
    assert last is not None  # there was at least the frame at ``depth``
    return text(last.f_code.co_filename, last.f_lineno), False


def text(path, line):
    """``path`` relative to the working directory when it lies below it."""
    if path.startswith("<"):
        return "%s:%d" % (path, line)
    path = path.encode("utf-8", "replace").decode()
    cwd = state.cwd() + os.sep
    path = os.path.normpath(path if os.path.isabs(path) else os.path.join(cwd, path))
    return "%s:%d" % (path[len(cwd) :] if path.startswith(cwd) else path, line)
