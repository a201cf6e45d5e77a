"""Carries an exception of the dataset from a worker to the trainer, with its own type and the worker's traceback.

    worker: pack_exception(error, origin) --bytes--> trainer: unpack_exception(bytes) --> raise it

The trainer's exception has the type that was raised, so that ``except`` clauses go on working, the attributes that
could be pickled, and DataLoader's text: "Caught X in DataLoader worker process 2.", where, and the worker's traceback
from the user's first frame on. Its constructor is never called (it may need arguments that nobody knows, or draw
conclusions from them); the object is made by the built-in class that it derives from, and its attributes are set. Where
the type is not known to the trainer, the nearest base that is known takes its place.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch._utils import KeyErrorMessage

#: Attributes larger than this stay behind: an exception that holds a data set must not be sent.
_MAX_VALUE_BYTES = 1 << 20
#: Members of an exception group that are carried one by one; the text has all of them.
_MAX_MEMBERS = 100
_OUR_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an exception comes from; also the attribute ``headrace_origin`` of what the trainer raises.

    Attributes:
        worker: Number of the worker; None: in the trainer.
        batch: Number of the batch in the pass; None: outside of any (``worker_init_fn``).
        row: Row of the sample in its batch; None: the batch as a whole (``collate_fn``, ``__getitems__``).
        indices: What the sampler gave for the row, or for the whole batch.
    """

    worker: int | None
    batch: int | None = None
    row: int | None = None
    indices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.batch is None:
            return ""
        shown = ", ".join(str(index) for index in self.indices[:8]) + (", ..." if len(self.indices) > 8 else "")
        if self.row is not None:
            return f"batch {self.batch}, row {self.row}, index {shown}"
        return f"batch {self.batch}, indices {shown}" if shown else f"batch {self.batch}"


@dataclass(frozen=True, slots=True)
class _Packed:
    """An exception as plain data."""

    types: list[tuple[str, str]]
    text: str
    message: str
    values: dict[str, bytes] = field(default_factory=dict)
    fields: dict[str, bytes] = field(default_factory=dict)
    args: bytes | None = None
    members: list[_Packed] = field(default_factory=list)


# -- worker -----------------------------------------------------------------------------------------------------------


def pack_exception(error: BaseException, origin: Origin) -> bytes:
    """Turn an exception that has just been caught in a worker into bytes. Never raises for what the exception holds."""
    name = type(error).__name__
    where = f"in DataLoader worker process {origin.worker}" if origin.worker is not None else "in the dataset"
    place = str(origin)
    text = f"Caught {name} {where}.\n" + (f"While making {place}.\n" if place else "") + f"Original {_text(error)}"
    plain = Origin(origin.worker, origin.batch, origin.row, tuple(_plain(index) for index in origin.indices))
    return pickle.dumps((_pack(error, text), plain), protocol=pickle.HIGHEST_PROTOCOL)


def _plain(index: Any) -> Any:
    return index if type(index) in (int, str, bytes, float, bool) else repr(index)


def _text(error: BaseException) -> str:
    """The traceback through the user's frames; ours, which lead to them, are left out where anything remains."""
    start = _first_foreign(error.__traceback__)
    try:
        return "".join(traceback.format_exception(type(error), error, start))
    except Exception as broken:  # noqa: BLE001  a __str__ or a source line that cannot be had must not hide the error
        frames = "".join(traceback.format_tb(start))
        last = f"{type(error).__name__}: <{type(broken).__name__} in its text>\n"
        return f"Traceback (most recent call last):\n{frames}{last}"


def _first_foreign(start: TracebackType | None) -> TracebackType | None:
    frame = start
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
        frame = frame.tb_next
    return frame or start


def _pack(error: BaseException, text: str) -> _Packed:
    types = [(cls.__module__, cls.__qualname__) for cls in type(error).__mro__ if issubclass(cls, BaseException)]
    names = [name for base, names in _FIELDS.items() if isinstance(error, base) for name in names]
    found = {name: value for name in names if (value := getattr(error, name, None)) is not None}
    fields = {name: data for name, value in found.items() if (data := _dump(value)) is not None}
    values = {str(k): data for k, v in vars(error).items() if (data := _dump(v)) is not None}
    members = [_pack(member, _message(member)) for member in getattr(error, "exceptions", ())[:_MAX_MEMBERS]]
    return _Packed(types, text, _message(error), values, fields, _dump(error.args), members if _is_group(error) else [])


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error
        return ""


def _is_group(error: BaseException) -> bool:
    group = getattr(__import__("builtins"), "BaseExceptionGroup", None)  # Python 3.11
    return group is not None and isinstance(error, group)


def _dump(value: Any) -> bytes | None:
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  what cannot be pickled stays behind
        return None
    return data if len(data) <= _MAX_VALUE_BYTES else None


# -- trainer ----------------------------------------------------------------------------------------------------------

# What built-in classes keep outside of args and __dict__. The text is put where ``str`` of the class shows it.
_FIELDS: dict[type[BaseException], tuple[str, ...]] = {
    OSError: ("errno", "filename", "filename2"),
    UnicodeEncodeError: ("encoding", "object", "start", "end"),
    UnicodeDecodeError: ("encoding", "object", "start", "end"),
    UnicodeTranslateError: ("object", "start", "end"),
    ImportError: ("name", "path"),
    SyntaxError: ("filename", "lineno", "offset", "end_lineno", "end_offset"),
    AttributeError: ("name",),
    NameError: ("name",),
}


def unpack_exception(data: bytes) -> BaseException:
    """The exception to raise in the trainer. Never raises for what the bytes hold.

    A ``StopIteration`` of a ``__getitem__`` becomes a ``RuntimeError``, or it would end the loop as if all were done.
    """
    packed, origin = pickle.loads(data)
    error = _unpack(packed, packed.text)
    error.headrace_origin = origin  # type: ignore[attr-defined]
    return error


def _unpack(packed: _Packed, text: str) -> BaseException:
    error = _make(_find_type(packed.types), packed, text)
    for name, value in _loaded(packed.values):
        try:
            setattr(error, name, value)
        except Exception:  # noqa: BLE001  a read-only property of the user's class
            continue
    return _saying(error, text)


def _make(cls: type[BaseException], packed: _Packed, text: str) -> BaseException:
    """An instance without its class's own constructor."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    make: Any = builtin.__new__
    fields = dict(_loaded(packed.fields))
    if packed.members:
        return _call(make, cls, text, [_unpack(member, member.text) for member in packed.members])
    if issubclass(cls, OSError) and fields.get("errno") is not None:
        paths = (fields.get("filename"), None, fields.get("filename2")) if fields.get("filename") is not None else ()
        return _call(make, cls, fields["errno"], text, *paths)
    if issubclass(cls, UnicodeError) and fields:
        return _call(make, cls, *(fields.get(name) for name in _unicode_fields(cls)), text)
    error = _call(make, cls, KeyErrorMessage(text) if issubclass(cls, KeyError) else text)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def _unicode_fields(cls: type[BaseException]) -> tuple[str, ...]:
    return next(names for base, names in _FIELDS.items() if issubclass(cls, base) and issubclass(base, UnicodeError))


def _call(make: Any, cls: type[BaseException], *args: Any) -> BaseException:
    """Make with the built-in's ``__new__`` and, for those that keep fields of their own, its ``__init__``."""
    error: BaseException = make(cls, *args)
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    try:
        builtin.__init__(error, *args)
    except TypeError:
        error.args = args
    return error


def _saying(error: BaseException, text: str) -> BaseException:
    """The exception itself if it shows the text, otherwise one of a subclass of the same name that does."""
    if text in _message(error):
        return error
    cls = type(error)
    names = {"__str__": lambda _: text, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        error.__class__ = type(cls.__name__, (cls,), names)
    except TypeError:
        error.args = (text,)
    return error


def _loaded(values: dict[str, bytes]) -> list[tuple[str, Any]]:
    loaded = []
    for name, data in values.items():
        try:
            loaded.append((name, _Unpickler(io.BytesIO(data)).load()))
        except Exception:  # noqa: BLE001  its class is not known here, or refuses: the attribute stays behind
            continue
    return loaded


class _Unpickler(pickle.Unpickler):
    """Knows the main module of a spawned worker under its name in the trainer."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == "__mp_main__" else module, name)


def _find_type(types: list[tuple[str, str]]) -> type[BaseException]:
    """The class of the first name that is known here; RuntimeError where only Exception is left, as DataLoader does."""
    for module, qualname in types:
        cls = _import_type(module, qualname) or _find_local(module, qualname)
        if cls is not None and issubclass(cls, (StopIteration, StopAsyncIteration)):
            return RuntimeError
        if cls is not None and (cls not in (Exception, BaseException) or (module, qualname) == types[0]):
            return cls
        if cls is not None:
            break
    return RuntimeError


def _import_type(module: str, qualname: str) -> type[BaseException] | None:
    name = "__main__" if module == "__mp_main__" else module
    try:
        found: Any = sys.modules.get(name) or importlib.import_module(name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception:  # noqa: BLE001  a module of the worker's only, a local class: look further
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _find_local(module: str, qualname: str) -> type[BaseException] | None:
    """A class without an importable name (local to a function, a notebook's), which a fork shares with its parent."""
    waiting: list[type[BaseException]] = [BaseException]
    seen: set[type[BaseException]] = set()
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        # Newest last: of two classes of one name, the one that was made last is the one in use.
        waiting.extend(type.__subclasses__(cls))
        if (cls.__module__, cls.__qualname__) == (module, qualname):
            return cls
    return None
