"""Hypothesis strategies for values of msgspec Structs, derived from their annotations: with the ranges of Java's
types.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
"""Texts are not empty: the binary header cannot hold an empty value."""

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bytes: st.binary(max_size=9),
    types.NoneType: st.none(),
    msgspec.UnsetType: st.just(msgspec.UNSET),
    Any: st.integers(0, 9) | TEXT,
}


def structs(kind: type[msgspec.Struct], **chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a Struct type. Strategies in ``chosen`` replace those of the annotations.

    A member that is None is left out in JSON and reads as its default, so the strategy draws None only if it is the
    default.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {}
    for info in msgspec.structs.fields(kind):
        given = chosen.get(info.name, values(hints[info.name]))
        fields[info.name] = given if info.required or info.default is None else given.filter(_is_something)
    return st.builds(kind, **fields)


def _is_something(value: Any) -> bool:
    return value is not None


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return st.integers(inner[1].ge, inner[1].le)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(one) for one in inner])
    if origin is list:
        return st.lists(values(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: structs(hint))
    return PLAIN[hint]
