"""Columns of a typed table, as a schema of bodies in any format describes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from rmqkit.errors import SettingsError

META = "_"
"""First character of the columns with the fields of a message. A property of the schema must not begin with it."""
TIMESTAMP = pa.timestamp("us", "UTC")

_NOT_IN_NAMES = re.compile(r"[ .,;{}()\n\t=]")


class BodyColumn(NamedTuple):
    """A property of the body."""

    name: str
    arrow: pa.DataType
    is_required: bool


class Bodies(NamedTuple):
    """The columns of bodies, and the function that decodes a body into their values for Arrow.
    The function raises ValueError, OverflowError or RecursionError: the body does not fit."""

    columns: list[BodyColumn]
    decode: Callable[[bytes], Sequence[Any]]


def check_names(source: str, columns: Sequence[BodyColumn]) -> None:
    """Raise SettingsError if a property cannot be a column of a table."""
    seen: dict[str, str] = {}
    for column in columns:
        if column.name.startswith(META) or not column.name or _NOT_IN_NAMES.search(column.name):
            raise SettingsError(
                f"schema {source}: property {column.name!r} cannot be a column: rename it, without a first {META} and"
                " without blanks and .,;{}()="
            )
        # Spark's columns have the same name if only their case differs.
        if (other := seen.setdefault(column.name.lower(), column.name)) != column.name:
            raise SettingsError(f"schema {source}: {other} and {column.name} differ only in case: rename one of them")
