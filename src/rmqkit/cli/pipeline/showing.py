"""What a job gave back, as tables or JSON. Data frames are fetched while there is a session, and shown after it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rmqkit.cli.printing import cell, jsonable, print_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Rows(msgspec.Struct):
    """The rows of a data frame, or the first of them."""

    names: list[str]
    rows: list[tuple[Any, ...]]
    is_cut: bool = False


def collect(frame: DataFrame, limit: int | None = None) -> Rows:
    """Fetch a data frame, at most ``limit`` rows of it."""
    rows = frame.collect() if limit is None else frame.limit(limit + 1).collect()
    return Rows(list(frame.columns), [tuple(row) for row in rows[:limit]], limit is not None and len(rows) > limit)


def fields(found: msgspec.Struct, **others: Any) -> dict[str, Any]:
    """The fields of what a job gave back, and others, such as the rows of a data frame in its place."""
    return {name: getattr(found, name) for name in found.__struct_fields__} | others


def show(found: Rows | msgspec.Struct | Mapping[str, Any], *, as_json: bool) -> None:
    """Print a data frame, or the totals of a job and the tables among them. A frame is a list of objects in JSON,
    totals are an object with the names of their fields."""
    if as_json:
        print(json.dumps(_objects(found), ensure_ascii=False))
    elif isinstance(found, Rows):
        _print(found)
    else:
        values = fields(found) if isinstance(found, msgspec.Struct) else found
        tables = {name: _rows(value) for name, value in values.items()}
        facts = [
            (_words(name), cell(name, value)) for name, value in values.items() if tables[name] is None and value != []
        ]
        if facts:
            print_table(["what", ""], facts)
        for name, rows in tables.items():
            if rows is not None and rows.rows:
                print(f"{_words(name)}:")
                _print(rows)


def _print(found: Rows) -> None:
    columns = list(zip(*found.rows, strict=True)) or [()] * len(found.names)
    right = [_words(name) for name, values in zip(found.names, columns, strict=True) if _is_numeric(values)]
    shown = (tuple(map(cell, found.names, row)) for row in found.rows)
    print_table(list(map(_words, found.names)), shown, right=right)
    if found.is_cut:
        print(f"rmq: there are more than {len(found.rows)} rows, --limit shows more", file=sys.stderr)


def _words(name: str) -> str:
    """``firstStoreTimestamp`` in words, which can be broken into lines."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()


def _is_numeric(values: Any) -> bool:
    return any(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _rows(value: Any) -> Rows | None:
    """A field of totals as a table; None when it is none."""
    if isinstance(value, Rows):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, msgspec.Struct) for one in value):
        names = list(value[0].__struct_fields__)
        return Rows(names, [tuple(getattr(one, name) for name in names) for one in value])
    return Rows(["what", "count"], list(value.items())) if isinstance(value, dict) else None


def _objects(found: Any) -> Any:
    match found:
        case Rows():
            return [dict(zip(found.names, map(jsonable, row), strict=True)) for row in found.rows]
        case dict():
            return {name: _objects(value) for name, value in found.items()}
    return jsonable(found)
