"""An exception arrives with its own type, the worker's traceback and the place where it happened."""

import copy
import json
import multiprocessing
import pickle
import sys
import textwrap
import threading

import pytest

from headrace.loader.errors_remote import Origin, pack_exception, unpack_exception


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"shard {a} is bad near {b}")
        self.a = a


class KeywordOnly(Exception):
    fmt = "request failed: {error}"

    def __init__(self, *args, **kw):
        super().__init__(self.fmt.format(**kw))
        self.kw = kw

    def __reduce__(self):
        return _rebuild, (self.kw,)


def _rebuild(kw):
    return KeywordOnly(**kw)


class Native(Exception):
    def __init__(self, msg):
        super().__init__(msg)
        self.handle = threading.Lock()
        self.path = "cache/17"


class OwnText(ValueError):
    def __init__(self, code):
        self.code = code

    def __str__(self):
        return f"code {self.code}"


class BrokenText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OwnNew(Exception):
    def __new__(cls, *, must):
        return super().__new__(cls, must)

    def __init__(self, *, must):
        super().__init__(must)


class ReadOnly(Exception):
    @property
    def message(self):
        return "fixed"


class WithSlots(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code


class _NotHere:
    """Pickles, but not back."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise ImportError("only in the worker")


class CarriesIt(Exception):
    def __init__(self, msg):
        super().__init__(msg)
        self.bad, self.good = _NotHere(), 7


def dataset_getitem(error):
    raise error


PLACE = Origin(1, 3, 2, (44,))


def arrive(error, origin=PLACE):
    try:
        dataset_getitem(error)
    except BaseException as caught:
        return unpack_exception(pack_exception(caught, origin))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Odd("s7", "offset 91"), "shard s7 is bad near offset 91"),
        (KeywordOnly(error="throttled by the store"), "throttled by the store"),
        (Native("header of cache file 17 is corrupt"), "header of cache file 17 is corrupt"),
        (OwnText(91), "code 91"),
        (OwnNew(must="be given"), "be given"),
        (ReadOnly("x-y"), "x-y"),
        (WithSlots("s-l"), "s-l"),
        (CarriesIt("payload"), "payload"),
        (KeyError("no_such_column"), "no_such_column"),
        (IndexError("list index out of range"), "list index out of range"),
        (FileNotFoundError(2, "No such file", "a/b.jpg"), "a/b.jpg"),
        (OSError("tar header is truncated"), "tar header is truncated"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
        (UnicodeEncodeError("ascii", "\xff", 0, 1, "ordinal not in range"), "ordinal not in range"),
        (UnicodeTranslateError("\xff", 0, 1, "untranslatable"), "untranslatable"),
        (json.JSONDecodeError("Expecting value", "doc", 0), "Expecting value"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'"),
        (SyntaxError("bad", ("f.py", 3, 1, "x =")), "bad"),
        (AttributeError("no attribute 'start'", name="start"), "no attribute 'start'"),
        (MemoryError(), "MemoryError"),
        (AssertionError(), "AssertionError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_type_text_frame_and_place_arrive(error, words):
    arrived = arrive(error)
    text = str(arrived)
    assert isinstance(arrived, type(error))
    assert type(arrived).__name__ == type(error).__name__
    assert words in text
    assert f"Caught {type(error).__name__} in DataLoader worker process 1.\n" in text
    assert "While making batch 3, row 2, index 44.\nOriginal Traceback (most recent call last):\n" in text
    assert "in dataset_getitem" in text
    assert arrived.headrace_origin == Origin(1, 3, 2, (44,))
    with pytest.raises(type(error)):
        raise arrived


@pytest.mark.parametrize(
    "error", [Odd("a", "b"), KeyError("k"), ValueError("v"), Native("n"), FileNotFoundError(2, "m", "f")]
)
def test_the_type_is_the_very_one_where_it_shows_the_text(error):
    assert type(arrive(error)) is type(error)


def test_a_key_error_is_readable():
    text = str(arrive(KeyError("no_such_column")))
    assert "\\n" not in text
    assert text.count("\n") > 2


def test_attributes_arrive_as_far_as_they_can():
    assert arrive(Odd("s7", 1)).a == "s7"
    assert arrive(OwnText(91)).code == 91
    native = arrive(Native("x"))
    assert native.path == "cache/17"
    assert not hasattr(native, "handle")
    carried = arrive(CarriesIt("x"))
    assert carried.good == 7
    assert not hasattr(carried, "bad")
    missing = arrive(FileNotFoundError(2, "No such file", "a/b.jpg"))
    assert (missing.errno, missing.filename) == (2, "a/b.jpg")
    assert arrive(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")).object == b"\xff"
    assert arrive(ModuleNotFoundError("m", name="x")).name == "x"


def test_what_is_huge_stays_behind():
    error = ValueError("x")
    error.dataset, error.small = bytes(2 << 20), 1
    arrived = arrive(error)
    assert not hasattr(arrived, "dataset")
    assert arrived.small == 1


def test_a_broken_text_does_not_hide_the_error():
    arrived = arrive(BrokenText())
    assert isinstance(arrived, BrokenText)
    assert "in dataset_getitem" in str(arrived)


def test_the_end_of_an_iterator_does_not_end_the_loop():
    arrived = arrive(StopIteration("shard is empty"))
    assert type(arrived) is RuntimeError
    assert "Caught StopIteration" in str(arrived)
    assert "shard is empty" in str(arrived)


def test_a_cause_is_in_the_text():
    def chained():
        try:
            dataset_getitem(OSError("disk"))
        except OSError as cause:
            raise ValueError("cannot decode") from cause

    try:
        chained()
    except ValueError as caught:
        arrived = unpack_exception(pack_exception(caught, Origin(0)))
    text = str(arrived)
    assert "OSError: disk" in text
    assert text.index("OSError: disk") < text.index("ValueError: cannot decode")
    assert "While making" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="add_note and groups came with Python 3.11")
def test_notes_and_groups_arrive():
    error = ValueError("bad label")
    error.add_note("in file a.json")
    arrived = arrive(error)
    assert arrived.__notes__ == ["in file a.json"]
    assert "in file a.json" in str(arrived)
    from builtins import ExceptionGroup  # Python 3.10 is not asked

    group = arrive(ExceptionGroup("two", [ValueError("left"), Odd("s", "t")]))
    assert type(group) is ExceptionGroup
    assert [type(member) for member in group.exceptions] == [ValueError, Odd]
    assert str(group.exceptions[1]) == "shard s is bad near t"
    assert "left" in str(group)
    matched, rest = group.split(Odd)
    assert len(matched.exceptions) == len(rest.exceptions) == 1


def test_a_local_class_of_a_fork_is_found():
    class Local(LookupError):
        pass

    assert type(arrive(Local("x"))) is Local


def test_an_unknown_class_arrives_as_the_nearest_known_base():
    """A class that the worker made is not known to the trainer: its base is, and the text has its name."""

    def make(base, name):
        cls = type(name, (base,), {"__module__": "only.in.worker"})
        try:
            raise cls("strange")
        except base as caught:
            return pack_exception(caught, Origin(0))

    data = make(LookupError, "Stranger").replace(b"Stranger", b"Strangex")
    arrived = unpack_exception(data)
    assert type(arrived) is LookupError
    assert "strange" in str(arrived)
    arrived = unpack_exception(make(Exception, "Stranger").replace(b"Stranger", b"Strangex"))
    assert type(arrived) is RuntimeError, "as DataLoader does"


def test_plain_exceptions_stay_plain():
    assert type(arrive(Exception("x"))) is Exception


def test_our_own_frames_are_left_out():
    from headrace.core.seeds import batch_key
    from headrace.loader.seeding import Generators, PlaceSeeder

    def getitem():
        raise ValueError("user's")

    try:
        PlaceSeeder(0, Generators([])).run(0, 0, getitem)
    except ValueError as caught:
        whole = unpack_exception(pack_exception(caught.with_traceback(caught.__traceback__.tb_next), Origin(0)))
    assert "in getitem" in str(whole)
    assert "seeding.py" not in str(whole)
    # Where only our own frames are left, they are better than none.
    with pytest.raises(TypeError) as caught:
        batch_key(None, 0, 0)
    assert "Traceback" in str(unpack_exception(pack_exception(caught.value, Origin(0))))


def test_long_batches_are_named_shortly_and_strange_indices_by_their_text():
    text = str(arrive(ValueError("x"), Origin(0, 5, None, tuple(range(64)))))
    assert "While making batch 5, indices 0, 1, 2, 3, 4, 5, 6, 7, ...\n" in text.replace("....\n", "...\n")
    arrived = arrive(ValueError("x"), Origin(0, 5, 1, (threading.Lock(),)))
    assert "lock" in arrived.headrace_origin.indices[0]


def test_what_arrived_can_be_copied_and_pickled():
    arrived = arrive(ValueError("x"))
    assert str(copy.copy(arrived)) == str(arrived)
    assert str(pickle.loads(pickle.dumps(arrived))) == str(arrived)


SPAWNED = """
    import multiprocessing, sys
    from headrace.loader.errors_remote import Origin, pack_exception, unpack_exception

    class MainError(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")
            self.box = Box()

    class Box:
        pass

    def work(pipe):
        try:
            raise MainError(1, 2)
        except MainError as error:
            pipe.send_bytes(pack_exception(error, Origin(0)))

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,))
        process.start()
        error = unpack_exception(ours.recv_bytes())
        process.join()
        assert type(error) is MainError, type(error)
        assert type(error.box) is Box
        assert "1 and 2" in str(error)
        print("ok")
"""


@pytest.mark.slow
def test_a_class_of_the_main_script_arrives_from_a_spawned_worker(tmp_path):
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SPAWNED))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ok\n", done.stderr
    assert multiprocessing.active_children() == []
