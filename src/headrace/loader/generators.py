"""The three global random generators of a process: reading, restoring and seeding them at the cost of a memory copy.

Used in workers, and in the trainer with 0 workers; nothing blocks. ``random``, ``numpy.random`` (its legacy global
``RandomState``) and torch's default CPU generator are all MT19937: 624 words and a position. The public ways of reading
them cost 7 us (``random.getstate``) and 33 us (``RandomState.get_state``), too much for a task of tiny samples. So the
words are read and written where they lie, at addresses that were proven on a generator of our own when the process
started; where the proof fails (another interpreter, another bit generator) the public way is used, slowly.
torch's ``get_state`` costs 0.6 us and needs no such thing.

Every state read here is comparable with ``==``: equal states mean that nothing was drawn, cached normals included.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from _random import Random as _CRandom
from typing import Any, ClassVar, Protocol

import torch
from torch.utils.data._utils import HAS_NUMPY

try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None  # type: ignore[assignment]

#: Words of an MT19937 state; the position is beyond the last one when the next draw makes new words.
NUM_WORDS = 624
_POSITION_FRESH = NUM_WORDS
_PYTHON_STATE_VERSION = 3


class Generator(Protocol):
    """One global generator."""

    def state(self) -> object:
        """All of its state, comparable; cheap."""

    def restore(self, state: object) -> None:
        """Put back what ``state`` returned."""

    def seed(self, key: int) -> None:
        """Write the state that belongs to a key of up to 256 bits."""


def _words_at(address: int, count: int) -> memoryview:
    """Memory as 32-bit words; the caller keeps what owns it alive."""
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def _words_of(generator: _CRandom) -> memoryview | None:
    """Position and words of a ``random.Random`` where they lie in the object, or None where they lie elsewhere."""
    head_bytes = object.__basicsize__
    if type(generator).__basicsize__ < head_bytes + 4 * (NUM_WORDS + 1):
        return None
    words = _words_at(id(generator) + head_bytes, NUM_WORDS + 1)
    state: Any = generator.getstate()  # the C class gives the words alone
    internal = state[1] if len(state) == 3 and isinstance(state[1], tuple) else state
    return words if (*words[1:], words[0]) == internal else None


def _owned_words() -> memoryview:
    return memoryview(bytearray(4 * NUM_WORDS)).cast("I")


class Mixer:
    """Turns a key into the 624 words of an MT19937 state (4 us: ``init_by_array`` in C). One thread at a time."""

    def __init__(self) -> None:
        self._generator = _CRandom()
        words = _words_of(self._generator)
        self._in_place = words is not None
        self._words = words[1:] if words is not None else _owned_words()
        self.tensor = torch.frombuffer(self._words, dtype=torch.int32)

    def words(self, key: int) -> memoryview:
        """The words for a key, which ``tensor`` has too; valid until the next call."""
        self._generator.seed(key)
        if not self._in_place:
            self._words[:] = memoryview(struct.pack(f"{NUM_WORDS}I", *self._generator.getstate()[:NUM_WORDS])).cast("I")
        return self._words


class PythonGenerator:
    """The generator behind the functions of ``random``, or another ``random.Random``."""

    def __init__(self, generator: random.Random | None = None) -> None:
        self.generator: Any = random._inst if generator is None else generator
        self._words = _words_of(self.generator)

    def state(self) -> object:
        """Position and words as bytes, and the cached normal."""
        if self._words is None:
            _, words, gauss = self.generator.getstate()
            return struct.pack(f"{NUM_WORDS + 1}I", words[-1], *words[:-1]), gauss
        return bytes(self._words), self.generator.gauss_next

    def restore(self, state: object) -> None:
        assert isinstance(state, tuple)
        if self._words is None:
            position, *words = struct.unpack(f"{NUM_WORDS + 1}I", state[0])
            self.generator.setstate((_PYTHON_STATE_VERSION, (*words, position), state[1]))
            return
        self._words.cast("B")[:] = state[0]
        self.generator.gauss_next = state[1]

    def seed(self, key: int) -> None:
        _CRandom.seed(self.generator, key)
        self.generator.gauss_next = None


class _Aug(ctypes.Structure):
    """The end of numpy's ``aug_bitgen_t``: the cached second normal."""

    _fields_ = (("has_gauss", ctypes.c_int), ("gauss", ctypes.c_double))


@functools.cache
def _find_aug_offset() -> int | None:
    """Where in a ``RandomState`` its cached normal lies, found with one of our own; None where it is not found."""
    probe: Any = np.random.RandomState(1)
    mark = 1234.5678
    probe.set_state(("MT19937", np.arange(NUM_WORDS, dtype=np.uint32), 5, 1, mark))
    size_bytes = type(probe).__basicsize__
    raw = ctypes.string_at(id(probe), size_bytes)
    at = raw.find(struct.pack("d", mark))
    if at < 8 or raw.count(struct.pack("d", mark)) != 1:
        return None
    aug = _Aug.from_address(id(probe) + at - _Aug.gauss.offset)
    if aug.has_gauss != 1:
        return None
    aug.has_gauss, aug.gauss = 0, 0.0
    return at - _Aug.gauss.offset if probe.get_state()[3:] == (0, 0.0) else None


def _mt_words(bit_generator: Any) -> memoryview | None:
    """Words and position of a numpy MT19937 where they lie, or None where they lie elsewhere."""
    if type(bit_generator) is not np.random.MT19937:
        return None
    words = _words_at(bit_generator.ctypes.state_address, NUM_WORDS + 1)
    state = bit_generator.state["state"]
    return words if words[:NUM_WORDS].tolist() == state["key"].tolist() and words[-1] == state["pos"] else None


class NumpyGenerator:
    """The legacy global generator behind the functions of ``numpy.random``. Only where numpy is installed."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer
        self._owner: Any = np.random.mtrand._rand
        self._aug_offset = _find_aug_offset()
        self._bit_generator: Any = None
        self._words: memoryview | None = None
        self._aug: _Aug | None = None
        self._follow()

    def _follow(self) -> None:
        """Find the words again: ``numpy.random.set_bit_generator`` has exchanged the bit generator."""
        self._bit_generator = self._owner._bit_generator
        self._words = None
        if self._aug_offset is not None:
            self._words = _mt_words(self._bit_generator)
            self._aug = _Aug.from_address(id(self._owner) + self._aug_offset)

    def state(self) -> object:
        """Words and position as bytes, and the cached normal; a ``_Comparable`` of another bit generator."""
        if self._owner._bit_generator is not self._bit_generator:
            self._follow()
        if self._words is None or self._aug is None:
            return _comparable(self._owner.get_state(legacy=False))
        return bytes(self._words), self._aug.has_gauss, self._aug.gauss

    def restore(self, state: object) -> None:
        if self._owner._bit_generator is not self._bit_generator:
            self._follow()
        if isinstance(state, _Comparable):
            self._owner.set_state(state.value)
            return
        assert isinstance(state, tuple)
        if self._words is None or self._aug is None:
            words = np.frombuffer(state[0], dtype=np.uint32)
            self._owner.set_state(("MT19937", words[:NUM_WORDS], int(words[NUM_WORDS]), state[1], state[2]))
            return
        self._words.cast("B")[:] = state[0]
        self._aug.has_gauss, self._aug.gauss = state[1], state[2]

    def seed(self, key: int) -> None:
        if self._owner._bit_generator is not self._bit_generator:
            self._follow()
        if self._words is not None and self._aug is not None:
            self._words[:NUM_WORDS] = self._mixer.words(key)
            self._words[NUM_WORDS] = _POSITION_FRESH
            self._aug.has_gauss, self._aug.gauss = 0, 0.0
        elif type(self._bit_generator) is np.random.MT19937:
            words = np.array(self._mixer.words(key), dtype=np.uint32)
            self._owner.set_state(("MT19937", words, _POSITION_FRESH, 0, 0.0))
        else:
            self._bit_generator.state = type(self._bit_generator)(key).state


class NumpyBits:
    """A ``numpy.random.Generator`` over an MT19937 of our own."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer
        bits = np.random.MT19937(0)
        self._words = _mt_words(bits)
        self.generator = np.random.Generator(bits)

    def seed(self, key: int) -> None:
        """Write the state that belongs to a key; a ``Generator`` caches nothing over MT19937."""
        words = self._mixer.words(key)
        if self._words is not None:
            self._words[:NUM_WORDS] = words
            self._words[NUM_WORDS] = _POSITION_FRESH
        else:
            state = {"key": np.array(words, dtype=np.uint32), "pos": _POSITION_FRESH}
            self.generator.bit_generator.state = {"bit_generator": "MT19937", "state": state}


def _comparable(state: dict[str, Any]) -> object:
    """What ``NumpyGenerator.state`` returns, from the public form."""
    if state["bit_generator"] != "MT19937":
        return _Comparable(state)
    words = np.append(state["state"]["key"], state["state"]["pos"]).astype(np.uint32)
    return words.tobytes(), int(state["has_gauss"]), float(state["gauss"])


class _Comparable:
    """A state with arrays inside, made comparable."""

    __slots__ = ("_text", "value")

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value
        with np.printoptions(threshold=1 << 20):
            self._text = repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Comparable) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


# The state that torch's generators read and write: seed (8 bytes), left (4), seeded (4), next (8), 624 words of 8 bytes
# each, cached normals (40). ``left`` 1 makes the next draw make new words.
_TORCH_STATE_BYTES = 5056
_TorchState = ctypes.c_char * _TORCH_STATE_BYTES
_TORCH_HEAD = struct.Struct("<QiiQ")
_TORCH_WORDS = slice(_TORCH_HEAD.size // 4, _TORCH_HEAD.size // 4 + 2 * NUM_WORDS, 2)


class TorchState:
    """A torch generator whose state is read and put back; of any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state(self) -> object:
        """All of it as bytes, ``initial_seed`` included."""
        state = self.generator.get_state()
        # Of its true size, were it another than ours; a raw copy costs half of ctypes.string_at.
        layout = _TorchState if state.numel() == _TORCH_STATE_BYTES else ctypes.c_char * state.numel()
        return layout.from_address(state.data_ptr()).raw

    def restore(self, state: object) -> None:
        assert isinstance(state, bytes)
        self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class TorchGenerator(TorchState):
    """torch's default CPU generator, or another one. Seeding keeps its ``initial_seed()``."""

    #: Whether this torch's states look as above; tried once.
    _is_layout_known: ClassVar[bool | None] = None

    def __init__(self, mixer: Mixer, generator: torch.Generator | None = None) -> None:
        super().__init__(torch.default_generator if generator is None else generator)
        self._mixer = mixer
        self._state = torch.zeros(_TORCH_STATE_BYTES, dtype=torch.uint8)
        self._words: Any = self._state.view(torch.int32)[_TORCH_WORDS]
        self._source: Any = mixer.tensor
        if HAS_NUMPY:
            # A third of the time of torch's copy_ between strided tensors.
            self._words, self._source = self._words.numpy(), mixer.tensor.numpy()
        self._head: Any = (ctypes.c_char * _TORCH_HEAD.size).from_address(self._state.data_ptr())
        if TorchGenerator._is_layout_known is None:
            TorchGenerator._is_layout_known = self._try_layout()
        self._is_known = TorchGenerator._is_layout_known

    def seed(self, key: int) -> None:
        if self._is_known:
            self._write(self.generator, self.generator.initial_seed(), key)
        else:
            # Another layout than the one above: torch's own seeding, which takes 64 bits and changes initial_seed().
            self.generator.manual_seed(_CRandom(key).getrandbits(63))

    def _write(self, generator: torch.Generator, initial_seed: int, key: int) -> None:
        self._mixer.words(key)
        self._head.raw = _TORCH_HEAD.pack(initial_seed, 1, 1, 0)
        self._words[:] = self._source
        generator.set_state(self._state)

    def _try_layout(self) -> bool:
        """Whether a generator of our own, seeded in this way, draws what Python's draws from the same words."""
        probe = torch.Generator()
        if probe.get_state().numel() != _TORCH_STATE_BYTES:
            return False
        twin = _CRandom(91)
        self._write(probe, 17, 91)
        # From 2**28 on, some releases draw 64 bits for a number.
        drawn = torch.randint(0, 1 << 16, (700,), generator=probe).tolist()
        return probe.initial_seed() == 17 and drawn == [twin.getrandbits(32) & 0xFFFF for _ in range(700)]
