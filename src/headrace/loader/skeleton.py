"""How a batch is nested, as bytes, with a number in the place of each of its tensors and arrays.

Batches that are one tensor, or a list, tuple or dict of tensors, have a skeleton of one byte (and the keys); any other
is pickled by C's pickler, which asks us only about objects that are not of Python's own simple types. Objects that are
met twice arrive as one object, as with any pickle.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2
from torch.multiprocessing import reductions

from headrace.loader.arena import ARRAY_CODES, DTYPE_CODES

#: First byte of a skeleton: a single leaf, a list or tuple of leaves, a dict of leaves (its keys follow, pickled),
#: anything else (pickled), or all of it in the slot (``IN_SLOT`` follows).
SINGLE, LIST, TUPLE, DICT, PICKLED, SLOT = b"1", b"L", b"T", b"D", b"P", b"S"
#: Offset in the slot, bytes of the skeleton, bytes of the table of leaves.
IN_SLOT = Struct("<QQQ")
#: The newest that all supported Pythons share; multiprocessing's own default is one less on the older ones.
_PROTOCOL = 5
_MAX_KEPT = 1000
#: torch's own parts without types.
_reductions: Any = reductions
_torch_utils: Any = torch._utils
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_QUANTISED = (torch.quint8, torch.qint8, torch.qint32)
_NON_LEAF = (
    "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support crossing "
    "process boundaries. If you just want to transfer the data, call detach() on the tensor before serializing "
    "(e.g., putting it on the queue)."
)


class Skeletons:
    """Makes skeletons, in the worker. Keeps those of dicts by their keys."""

    def __init__(self) -> None:
        self._of_keys: dict[tuple[str, ...], bytes] = {}

    def of(self, batch: Any, placed: Collection[int]) -> tuple[bytes, list[Any]]:
        """The skeleton of a batch, and its tensors and arrays in the order of their numbers.

        Args:
            batch: Anything that can be pickled.
            placed: Ids of tensors that are known to be plain.
        """
        kind = type(batch)
        if kind is list or kind is tuple:
            if _all_plain(batch, placed):
                return (LIST if kind is list else TUPLE), list(batch)
        elif kind is dict:
            if _all_plain(batch.values(), placed) and all(type(key) is str for key in batch):
                return self._of_dict(tuple(batch)), list(batch.values())
        elif kind is torch.Tensor and _all_plain((batch,), placed):
            return SINGLE, [batch]
        items: list[Any] = []
        file = io.BytesIO()
        file.write(PICKLED)
        _Pickler(file, items).dump(batch)
        return file.getvalue(), items

    def _of_dict(self, keys: tuple[str, ...]) -> bytes:
        skeleton = self._of_keys.get(keys)
        if skeleton is None:
            if len(self._of_keys) >= _MAX_KEPT:
                self._of_keys.clear()
            skeleton = self._of_keys[keys] = DICT + pickle.dumps(keys, _PROTOCOL)
        return skeleton


def _all_plain(values: Any, placed: Collection[int]) -> bool:
    """Whether all are different plain tensors."""
    seen = set()
    for value in values:
        key = id(value)
        if key not in placed and (type(value) is not torch.Tensor or not is_plain(value) or value.__dict__):
            return False
        seen.add(key)
    return len(seen) == len(values)


def is_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are plain bytes in this process's memory, of a type that is in the table."""
    return tensor.layout is torch.strided and tensor.dtype in DTYPE_CODES and tensor.is_cpu and not tensor.is_nested


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class can be a leaf as it is."""
    return (
        is_bytes(tensor)
        and not tensor.is_neg()
        and not tensor.is_conj()
        and (not tensor.requires_grad or tensor.is_leaf)
    )


def leaf(number: int) -> Any:
    """Stands in a pickled skeleton for leaf ``number``; the trainer's unpickler puts the leaf there."""
    raise AssertionError(f"leaf {number} outside of a skeleton")


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage that was packed as this tensor of bytes."""
    storage = tensor.untyped_storage()
    if tensor.storage_offset() or storage.nbytes() != tensor.nbytes:  # it overlapped with another one
        return tensor.clone().untyped_storage()
    return storage


def array_of(raw: np.ndarray[Any, Any], dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    """An array of a type that is not in the table, over the bytes that were packed for it."""
    strides = None if order == "C" else np.ndarray(shape, dtype, order="F").strides
    return np.ndarray(shape, dtype, raw, 0, strides)


def sparse_coo(indices: Any, values: Any, shape: Any, is_coalesced: bool, requires_grad: bool) -> torch.Tensor:
    """A sparse tensor of its parts, which are known to be right."""
    tensor = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
    return tensor.requires_grad_(requires_grad)


def sparse_compressed(compressed: Any, plain: Any, values: Any, shape: Any, layout: Any, grad: bool) -> torch.Tensor:
    """A compressed sparse tensor of its parts."""
    tensor = torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)
    return tensor.requires_grad_(grad)


def quantised(integers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """A quantised tensor of its integers."""
    return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)


def quantised_by_channel(integers: Any, scales: Any, zero_points: Any, axis: int) -> torch.Tensor:
    """A quantised tensor of its integers, with a scale for each channel."""
    return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)


class _Pickler(pickle.Pickler):
    """C's pickler with leaves for tensors, arrays and storages."""

    # What multiprocessing can send (connections, sockets, bound methods, ...) but torch's own entries, which would
    # give each storage a descriptor: _reduce answers for those types before this table is asked.
    dispatch_table: Any = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]  # private, and the only way

    def __init__(self, file: io.BytesIO, items: list[Any]) -> None:
        super().__init__(file, _PROTOCOL)
        self._items = items

    def reducer_override(self, obj: Any) -> Any:
        route = _routes.get(type(obj), _unknown)
        if route is _unknown:
            route = _find_route(type(obj))
        return NotImplemented if route is None else route(self, obj)

    def add(self, item: Any) -> tuple[Any, ...]:
        """Makes a leaf of a plain tensor or array, and keeps it alive: the pickler tells objects by their address."""
        self._items.append(item)
        return leaf, (len(self._items) - 1,)


def _reduce_tensor(pickler: _Pickler, tensor: torch.Tensor) -> Any:
    """A tensor of torch's own class."""
    if is_plain(tensor):
        if tensor.__dict__:
            return _with_state(pickler, tensor, tensor)
        return pickler.add(tensor)
    if not tensor.is_cpu and not tensor.is_meta:
        return _reductions.reduce_tensor(tensor)  # another device's memory is shared by its own means
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(_NON_LEAF)
    if is_bytes(tensor):
        return pickler.add(tensor.resolve_conj().resolve_neg())
    if tensor.layout in _COMPRESSED or tensor.layout is torch.sparse_coo:
        return _reduce_sparse(tensor)
    if tensor.is_quantized and tensor.dtype in _QUANTISED:
        return _reduce_quantised(tensor)
    return _by_value(tensor)


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    # Not torch's own way of pickling, which notes each rebuilt tensor in a list that only torch.load() empties.
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return sparse_coo, (tensor._indices(), tensor._values(), shape, tensor.is_coalesced(), tensor.requires_grad)
    rows_first = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = tensor.crow_indices() if rows_first else tensor.ccol_indices()
    plain = tensor.col_indices() if rows_first else tensor.row_indices()
    return sparse_compressed, (compressed, plain, tensor.values().detach(), shape, tensor.layout, tensor.requires_grad)


def _reduce_quantised(tensor: torch.Tensor) -> Any:
    # Not torch's own way either, which warns about the kind of storage that it uses.
    if tensor.qscheme() is torch.per_tensor_affine:
        return quantised, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if tensor.qscheme() is torch.per_channel_affine:
        channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
        return quantised_by_channel, (tensor.int_repr(), *channels)
    return _by_value(tensor)


def _reduce_subclass(pickler: _Pickler, tensor: torch.Tensor) -> Any:
    """A tensor of another class: its bytes as a leaf where it is nothing but a tensor with a class and attributes."""
    kind = type(tensor)
    if (
        kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and kind.__reduce__ is torch.Tensor.__reduce__
    ):
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor).requires_grad_(tensor.requires_grad)
            if is_plain(plain):
                return _with_state(pickler, tensor, plain)
    return _by_value(tensor)


def _with_state(pickler: _Pickler, tensor: torch.Tensor, plain: torch.Tensor) -> Any:
    rebuild, arguments = pickler.add(plain)
    return _rebuild_from_type_v2, (rebuild, type(tensor), arguments, _torch_utils._get_obj_state(tensor))


def _reduce_parameter(_: _Pickler, tensor: torch.Tensor) -> Any:
    return _by_value(tensor)


def _by_value(tensor: Any) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)


def _reduce_array(pickler: _Pickler, array: np.ndarray[Any, Any]) -> Any:
    if array.size and array.dtype in ARRAY_CODES:
        return pickler.add(array)
    if array.size and array.dtype.itemsize and not array.dtype.hasobject and array.dtype.kind in "biufcmMSUV":
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
        return array_of, (flat, array.dtype, array.shape, order)
    if not array.size and not array.dtype.hasobject:
        return np.empty, (array.shape, array.dtype)
    return array.__reduce__()  # the newest protocol would keep a read-only array read-only, as DataLoader's does not


def _reduce_untyped_storage(_: _Pickler, storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        return _reductions.reduce_storage(storage)
    return storage_of, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage),)


def _reduce_typed_storage(_: _Pickler, storage: Any) -> Any:
    if type(storage) is torch.TypedStorage:
        return reductions.rebuild_typed_storage, (storage._untyped_storage, storage.dtype)
    return reductions.rebuild_typed_storage_child, (storage._untyped_storage, type(storage))


def _find_route(kind: type) -> Any:
    route: Any = None
    if issubclass(kind, torch.nn.Parameter):
        route = _reduce_parameter
    elif issubclass(kind, torch.Tensor):
        route = _reduce_subclass
    elif issubclass(kind, torch.UntypedStorage):
        route = _reduce_untyped_storage
    elif issubclass(kind, torch.TypedStorage):
        route = _reduce_typed_storage
    if len(_routes) >= _MAX_KEPT:  # classes that are made anew for each batch
        _routes.clear()
        _routes.update(_FIRST_ROUTES)
    _routes[kind] = route
    return route


_unknown = object()
_FIRST_ROUTES: dict[type, Callable[[_Pickler, Any], Any]] = {torch.Tensor: _reduce_tensor, np.ndarray: _reduce_array}
_routes: dict[type, Any] = dict(_FIRST_ROUTES)


class _Unpickler(pickle.Unpickler):
    """C's unpickler, which puts leaves in their places."""

    def __init__(self, file: io.BytesIO, leaves: list[Any]) -> None:
        super().__init__(file)
        self._leaves = leaves

    def find_class(self, module: str, name: str) -> Any:
        if name == "leaf" and module == __name__:
            return self._leaves.__getitem__
        return super().find_class(module, name)


class Skins:
    """Puts leaves into skeletons, in the trainer. Keeps the keys of dicts."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[str, ...]] = {}

    def fill(self, skeleton: bytes, leaves: list[Any]) -> Any:
        """The batch.

        Args:
            skeleton: As ``Skeletons`` made it, but one in the slot.
            leaves: By number; the list may become the batch.
        """
        kind = skeleton[:1]
        if kind == LIST:
            return leaves
        if kind == TUPLE:
            return tuple(leaves)
        if kind == SINGLE:
            return leaves[0]
        if kind == DICT:
            return dict(zip(self._keys_of(skeleton), leaves, strict=True))
        file = io.BytesIO(skeleton)
        file.seek(1)
        return _Unpickler(file, leaves).load()

    def _keys_of(self, skeleton: bytes) -> tuple[str, ...]:
        keys = self._keys.get(skeleton)
        if keys is None:
            if len(self._keys) >= _MAX_KEPT:
                self._keys.clear()
            keys = self._keys[skeleton] = pickle.loads(memoryview(skeleton)[1:])
        return keys
