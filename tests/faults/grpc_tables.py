"""The sizes of an endpoint and its broker: the length of every table that is reachable from it, by class and name.

There is no list of tables, so that new tables are counted too. Left out are

- the store, which grows with its messages, and the delivery of delayed messages;
- counters, one for each topic and group that was ever used (`Statistics`, `PopCounts`);
- the last decisions about transactions, at most 20,000;
- time slots, which remain until their time even if they are empty, and the last pop of an ordered queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from rmqkit.proxy.service.endpoint import Endpoint

__all__ = ["RENEWED", "sizes"]

RENEWED = "messages renewed"
_TABLES = (dict, list, set, frozenset, deque, tuple)
_LEFT_OUT = ("PopCounts.", "Histogram.", "ExpiryWheel.", "OrderInfo.", "OpenTransactions._decisions")
_PASSED_BY = ("rmqkit.store", "rmqkit.broker.statistics", "rmqkit.broker.delay", "rmqkit.settings")


def sizes(endpoint: Endpoint, *others: object) -> dict[str, int]:
    """Return the number of entries by ``Class.attribute``, with nested tables, and the number of tasks of its loop.
    ``others``: objects that are not reachable from the endpoint, such as the broker of a proxy."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[Any] = [endpoint, *others]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _attributes(one):
            if isinstance(value, _TABLES):
                found[f"{type(one).__name__}.{name}"] += _count(value, left)
            elif _is_ours(value):
                left.append(value)
            elif callable(value):
                left += filter(_is_ours, _behind(value))
    held = endpoint.receiving.renewals._held.values()
    found[RENEWED] = sum(one.extended > 0 for by_key in held for one in by_key.values())
    found["tasks"] = len(asyncio.all_tasks())
    return {name: count for name, count in found.items() if not name.startswith(_LEFT_OUT)}


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    names = getattr(one, "__struct_fields__", ())
    slots = [slot for kind in type(one).__mro__ for slot in kind.__dict__.get("__slots__", ()) if not names]
    for name in (*names, *slots):
        if hasattr(one, name):
            yield name, getattr(one, name)


def _count(table: Any, left: list[Any]) -> int:
    """Return the number of entries of a table and of its nested tables. Other objects in it are added to ``left``."""
    entries = list(table.values()) if isinstance(table, dict) else list(table)
    if isinstance(table, dict):
        left += filter(_is_ours, list(table))
    count = len(entries)
    for entry in entries:
        if isinstance(entry, _TABLES):
            count += _count(entry, left) if not isinstance(entry, tuple) else 0
        if _is_ours(entry):
            left.append(entry)
        elif isinstance(entry, tuple):
            left += filter(_is_ours, entry)
    return count


def _is_ours(value: Any) -> bool:
    module = getattr(type(value), "__module__", "") or ""
    return module.startswith("rmqkit.") and not module.startswith(_PASSED_BY) and not isinstance(value, (int, str))


def _behind(value: Any) -> Iterator[Any]:
    """Yield the objects behind a callable: the instance of a method, and bound arguments."""
    if isinstance(value, partial):
        yield from (*value.args, *_behind(value.func))
    elif (owner := getattr(value, "__self__", None)) is not None:
        yield owner
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is not bound yet
            continue
