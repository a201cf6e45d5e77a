"""Random batches of every kind, and what it means that two are the same; for the tests here and for `make chaos`.

`random_batch(rng)` and `random_samples(rng)` take a `random.Random`, seeded or Hypothesis's own (`rngs`): the same
generator serves a property test, which shrinks, and a dataset in another process, which only has a number.
"""

import collections
import dataclasses
import typing

import numpy as np
import torch
from hypothesis import strategies as st

NAMES = (
    "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64 bool complex64 complex128 complex32 "
    "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
)
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
ARRAY_DTYPES = ["?", "u1", "i2", "<i4", ">i4", "i8", "f2", "f4", "f8", "c16", "g", "S3", "U2", "M8[ns]", "m8[s]"]
RECORD = np.dtype([("a", "<i4"), ("b", "f8", (2,)), ("c", "S2")])


class Pair(typing.NamedTuple):
    left: object
    right: object


@dataclasses.dataclass
class Record:
    value: object
    name: str = "record"


class Table(dict):
    """A dict with an attribute."""


class Row(list):
    """A list with an attribute."""


class Image(torch.Tensor):
    """A tensor of another class, with attributes."""


def tensor_of(dtype, shape, seed):
    """A contiguous tensor of random bits."""
    num = int(np.prod(shape, dtype=np.int64))
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (num,), dtype=torch.uint8, generator=generator).view(torch.bool).reshape(shape)
    raw = torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def random_shape(rng, most=4):
    return tuple(rng.choice((0, 1, 2, 3, 3, 5)) for _ in range(rng.randint(0, most)))


def random_tensor(rng):
    dtype, shape, seed = rng.choice(DTYPES), random_shape(rng), rng.randint(0, 2**31)
    if rng.randint(0, 19) == 0:  # large enough to be handed out in place
        shape = (3, 70, rng.choice((330, 512)))
    tensor = tensor_of(dtype, shape, seed)
    return rng.choice(LAYOUTS)(rng, tensor)


def _plain(rng, tensor):
    return tensor


def _transposed(rng, tensor):
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def _channels_last(rng, tensor):
    # through a clone: not every type has a copy between layouts
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor


def _stepped(rng, tensor):
    return tensor[..., ::2] if tensor.dim() else tensor


def _window(rng, tensor):
    return tensor[1:] if tensor.dim() and tensor.shape[0] > 1 else tensor


def _expanded(rng, tensor):
    return tensor.unsqueeze(0).expand(rng.choice((2, 300)), *tensor.shape)


def _requires_grad(rng, tensor):
    return (
        tensor.clone().requires_grad_() if tensor.dtype in (torch.float32, torch.float64, torch.complex64) else tensor
    )


def _parameter(rng, tensor):
    return torch.nn.Parameter(tensor.clone(), requires_grad=tensor.dtype.is_floating_point)


def _subclass(rng, tensor):
    image = tensor.clone().as_subclass(Image)
    image.note = rng.randint(0, 9)
    return image


def _sparse(rng, tensor):
    return tensor.to_sparse() if tensor.dtype in (torch.float32, torch.int64) and tensor.dim() else tensor


def _conjugated(rng, tensor):
    return tensor.conj() if tensor.dtype in (torch.complex64, torch.complex128) else tensor


LAYOUTS = (
    [_plain] * 4 + [_transposed, _channels_last, _stepped, _window, _expanded]
    + [_requires_grad, _parameter, _subclass, _sparse, _conjugated]
)  # fmt: skip


def random_array(rng):
    shape, seed = random_shape(rng, 3), rng.randint(0, 2**31)
    if rng.randint(0, 19) == 0:
        shape = (3, 70, 512)
    bits = np.random.Generator(np.random.PCG64(seed))
    if rng.randint(0, 9) == 0:
        array = np.array([None, "x", 3, {"y": 2}], dtype=object)[bits.integers(0, 4, shape)]
        return array if isinstance(array, np.ndarray) else np.array(array, dtype=object)
    dtype = RECORD if rng.randint(0, 9) == 0 else np.dtype(rng.choice(ARRAY_DTYPES))
    array = np.array(bits.integers(0, 100, shape)).astype(dtype if dtype is not RECORD else "i4")
    if dtype is RECORD:
        filled = np.zeros(shape, RECORD)
        filled["a"] = array
        array = filled
    array = rng.choice((lambda a: a, np.asfortranarray, lambda a: a[..., ::-1] if a.ndim else a, lambda a: a.T))(array)
    if rng.randint(0, 4) == 0:
        array.flags.writeable = False
    return array


def random_value(rng):
    return rng.choice(
        (
            lambda: rng.randint(-5, 2**40),
            lambda: rng.choice((0.5, -1e300, float("inf"))),
            lambda: rng.choice((True, False, None)),
            lambda: "x" * rng.choice((0, 1, 9, 20000)),
            lambda: b"\0y" * rng.choice((0, 3, 9000)),
            lambda: np.float32(rng.randint(0, 9)),
            lambda: complex(rng.randint(0, 3), 1),
            lambda: {rng.randint(0, 3), "a"},
        )
    )()


def random_batch(rng, depth=3):
    """Anything that a `collate_fn` may return."""
    if depth == 0 or rng.randint(0, 5) == 0:
        return rng.choice((random_tensor, random_tensor, random_array, random_value))(rng)
    return rng.choice(CONTAINERS)(rng, [random_batch(rng, depth - 1) for _ in range(rng.randint(0, 4))])


def _keyed(rng, parts):
    return {rng.choice((f"key{at}", at, (at, "t"))): part for at, part in enumerate(parts)}


def _table(rng, parts):
    table = Table(_keyed(rng, parts))
    table.note = "kept"
    return table


def _row(rng, parts):
    row = Row(parts)
    row.note = "kept"
    return row


def _tensors(rng, parts):
    tensors = [random_tensor(rng) for _ in parts]
    return rng.choice((tensors, tuple(tensors), {f"k{at}": tensor for at, tensor in enumerate(tensors)}))


def _twice(rng, parts):
    return [*parts, *parts[:1]]  # one object at two places


CONTAINERS = (
    lambda rng, parts: parts,
    lambda rng, parts: tuple(parts),
    _keyed,
    lambda rng, parts: Pair(parts, rng.randint(0, 9)),
    lambda rng, parts: Record(parts),
    lambda rng, parts: collections.OrderedDict(_keyed(rng, parts)),
    _table,
    _row,
    _tensors,
    _twice,
)


def random_samples(rng):
    """Samples that torch's `default_collate` takes: of one structure, with other values."""
    make = _random_maker(rng, 2)
    return [make(seed) for seed in range(rng.randint(1, 5))]


def _random_maker(rng, depth):
    if depth == 0 or rng.randint(0, 3) == 0:
        return rng.choice(SAMPLE_LEAVES)(rng)
    parts = [_random_maker(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    return rng.choice(
        (
            lambda: lambda seed: [make(seed) for make in parts],
            lambda: lambda seed: tuple(make(seed) for make in parts),
            lambda: lambda seed: {f"key{at}": make(seed) for at, make in enumerate(parts)},
            lambda: lambda seed: Pair(parts[0](seed), parts[-1](seed)),
            lambda: lambda seed: collections.OrderedDict((at, make(seed)) for at, make in enumerate(parts)),
        )
    )()


def _tensor_maker(rng):
    dtype = rng.choice([dtype for dtype in DTYPES if dtype is not torch.complex32])
    shape = rng.choice(((3, 90, 80), random_shape(rng, 3), random_shape(rng, 3)))
    return lambda seed: tensor_of(dtype, shape, seed)


def _array_maker(rng):
    dtype, shape = np.dtype(rng.choice(("?", "u1", "i2", "i8", "f2", "f4", "f8", "c8"))), random_shape(rng, 3)
    return lambda seed: np.asarray(np.random.Generator(np.random.PCG64(seed)).integers(0, 100, shape)).astype(dtype)


SAMPLE_LEAVES = (
    _tensor_maker,
    _tensor_maker,
    _array_maker,
    lambda rng: lambda seed: seed,
    lambda rng: lambda seed: seed / 3,
    lambda rng: lambda seed: seed % 2 == 0,
    lambda rng: lambda seed: f"s{seed}",
    lambda rng: lambda seed: bytes([seed]),
    lambda rng: lambda seed: np.int16(seed),
    lambda rng: lambda seed: np.float64(seed),
)

#: What a property test gives to the functions above.
rngs = st.randoms(use_true_random=False)


def assert_same(got, want, where="batch"):
    """Same classes, element types, shapes, strides, flags, attributes and bits, all the way down."""
    assert type(got) is type(want), (where, type(got), type(want))
    if isinstance(want, torch.Tensor):
        _same_tensor(got, want, where)
    elif isinstance(want, np.ndarray):
        _same_array(got, want, where)
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for at, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{at}]")
    elif dataclasses.is_dataclass(want):
        assert_same(vars(got), vars(want), f"{where}.")
    else:
        assert got == want, (where, got, want)
    if isinstance(want, Table | Row):
        assert vars(got) == vars(want), where


def _same_tensor(got, want, where):
    assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout), where
    assert got.requires_grad == want.requires_grad, where
    assert vars(got) == vars(want), where
    if want.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    got, want = got.detach().as_subclass(torch.Tensor), want.detach().as_subclass(torch.Tensor)
    assert got.stride() == want.stride(), (where, got.stride(), want.stride())
    assert bits(got) == bits(want), where


def bits(tensor):
    """All elements as bytes, in logical order."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    size = tensor.element_size()
    strides = tuple(size * stride for stride in tensor.stride())
    return np.ndarray(tuple(tensor.shape), f"V{size}", raw, size * tensor.storage_offset(), strides).tobytes()


def _same_array(got, want, where):
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (where, got.dtype, want.dtype)
    assert got.flags.writeable, where
    if want.dtype.hasobject:
        assert got.tolist() == want.tolist(), where
    else:
        assert got.tobytes() == want.tobytes(), where
    assert got.flags.f_contiguous == want.flags.f_contiguous or not want.flags.f_contiguous, where
