"""Hypothesis strategies for any msgspec type, so that new fields of the record are tested without a line here."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect as info

_SCALARS = {
    info.IntType: st.integers(-(2**53), 2**53),
    info.FloatType: st.floats(allow_nan=False, allow_infinity=False),
    info.StrType: st.text(max_size=8),
    info.BoolType: st.booleans(),
    info.NoneType: st.none(),
    info.AnyType: st.none() | st.integers(-9, 9) | st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=2),
}


def records(cls: type) -> st.SearchStrategy[Any]:
    """Any value of a type that msgspec knows."""
    return _strategy(info.type_info(cls))


def _strategy(found: info.Type) -> st.SearchStrategy[Any]:
    if type(found) in _SCALARS:
        return _SCALARS[type(found)]
    if isinstance(found, info.LiteralType):
        return st.sampled_from(found.values)
    if isinstance(found, info.UnionType):
        return st.one_of([_strategy(inner) for inner in found.types])
    if isinstance(found, info.ListType):
        return st.lists(_strategy(found.item_type), max_size=2)
    if isinstance(found, info.TupleType):
        return st.tuples(*map(_strategy, found.item_types))
    if isinstance(found, info.DictType):
        return st.dictionaries(_strategy(found.key_type), _strategy(found.value_type), max_size=2)
    assert isinstance(found, info.StructType), found
    return st.builds(found.cls, **{field.name: _strategy(field.type) for field in found.fields})
