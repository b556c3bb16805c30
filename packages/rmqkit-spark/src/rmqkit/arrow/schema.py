"""The choice of columns for one read. `rmqkit.store.kernels.schema` is the table of all columns."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from rmqkit.arrow.options import IncludeProperties
from rmqkit.errors import SettingsError
from rmqkit.store.kernels.schema import CORRUPT, CORRUPT_COLUMN, MESSAGE_COLUMNS, PROPERTY_STRING, Column, arrow_schema

__all__ = [
    "CORRUPT",
    "CORRUPT_COLUMN",
    "MESSAGE_COLUMNS",
    "PROPERTY_STRING",
    "Column",
    "arrow_schema",
    "choose",
    "message_columns",
]


def choose(available: Sequence[Column], wanted: Iterable[str], source: str) -> list[Column]:
    """Return the columns with the wanted names, in this order. Raises SettingsError: a name is not available, or occurs
    twice."""
    by_name = {column.name: column for column in available}
    chosen: dict[str, Column] = {}
    for name in wanted:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(by_name)}"
            raise SettingsError(f"{source}: there is no column {name!r} with these options: {hint}")
        if name in chosen:
            raise SettingsError(f"{source}: column {name!r} is wanted twice: name it once")
        chosen[name] = by_name[name]
    return list(chosen.values())


def message_columns(properties: IncludeProperties) -> list[Column]:
    """List the columns of messages, with the requested form of ``properties``."""
    shown = {IncludeProperties.STRING: [PROPERTY_STRING], IncludeProperties.NONE: []}
    kept = ([column] if column.name != "properties" else shown.get(properties, [column]) for column in MESSAGE_COLUMNS)
    return list(itertools.chain.from_iterable(kept))
