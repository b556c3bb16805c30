"""Property strings in bulk: `decode_properties` for a whole column at once.

A property string is ``name 0x01 value 0x02`` repeated; the last 0x02 may be missing. All strings of a batch lie back
to back in one Arrow buffer. One pass finds the separators; they and the ends of the rows cut the buffer into pieces;
names and values are gathered from the pieces. Neither separator can be part of a UTF-8 sequence, so the whole works
on bytes. The rules are those of `decode_properties`: a piece needs 0x01, a name and a value; the last duplicate wins.
Source: store.md §3.4.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmqkit.spark.kernels.gather import every_nth, octets_of, overlay, pick

__all__ = ["Properties"]

_NAME_END = 1
_ENTRY_END = 2
_CELLS_MAX = 1 << 24


class Properties:
    """The decoded properties of a batch of rows: one property string per row, valid UTF-8, no nulls."""

    def __init__(self, strings: pa.Array) -> None:
        self._row_count = len(strings)
        octets, bounds = octets_of(strings)
        rows, starts, equals, ends = _entries(octets, bounds.astype("i8"))
        cuts = np.empty((len(rows), 4), "i8")  # name, 0x01, value, what lies before the next name
        cuts[:, 0], cuts[:, 1], cuts[:, 2], cuts[:, 3] = starts, equals, equals + 1, ends
        parts = overlay(octets.data, cuts.ravel())
        self._rows = rows
        self._names = parts.take(every_nth(0, 4, len(rows))).cast(pa.string(), safe=False).dictionary_encode()
        self._values = parts.take(every_nth(2, 4, len(rows))).cast(pa.string(), safe=False)
        self._drop_duplicates()

    def map(self) -> pa.Array:
        """A ``map<string, string>`` per row."""
        counts = np.bincount(self._rows, minlength=self._row_count)
        offsets = np.zeros(self._row_count + 1, "i4")
        np.cumsum(counts, out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), self._names.dictionary_decode(), self._values)

    def values_of(self, name: str) -> pa.Array:
        """One property per row, null where it is missing."""
        entry_of_row = np.full(self._row_count, -1, "i8")
        code = self._names_found.get(name)
        if code is not None:
            entries = np.flatnonzero(self._codes == code)
            entry_of_row[self._rows[entries]] = entries
        return pick(self._values, entry_of_row)

    @property
    def _codes(self) -> NDArray[np.int32]:
        codes: NDArray[np.int32] = self._names.indices.to_numpy()
        return codes

    @functools.cached_property
    def _names_found(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self._names.dictionary.to_pylist())}

    def _drop_duplicates(self) -> None:
        """Keep the last of several entries with one name in one row; that there are any is rare."""
        cells = self._rows * len(self._names_found) + self._codes
        if not _has_duplicates(cells, self._row_count * len(self._names_found)):
            return
        _, from_behind = np.unique(cells[::-1], return_index=True)
        kept = np.sort(len(cells) - 1 - from_behind)
        self._rows = self._rows[kept]
        self._names = self._names.take(pa.array(kept))
        self._values = self._values.take(pa.array(kept))


def _entries(octets: NDArray[np.uint8], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Row, start of name, position of 0x01 and end of value of every valid entry, in order."""
    low, high = int(bounds[0]), int(bounds[-1])
    separators = np.flatnonzero(octets[low:high] <= _ENTRY_END) + low
    kinds = octets[separators]
    if _is_regular(octets, bounds, kinds):
        equals, ends = separators[0::2], separators[1::2]
        starts = np.concatenate(([low], ends[:-1] + 1))
        rows = np.repeat(np.arange(len(bounds) - 1), np.diff(np.searchsorted(ends, bounds)))
    else:
        equals = separators[kinds == _NAME_END]
        rows, starts, ends = _pieces(separators[kinds == _ENTRY_END], bounds)
        first = np.searchsorted(equals, starts)
        has_one = first < len(equals)
        rows, starts, ends, equals = rows[has_one], starts[has_one], ends[has_one], equals[first[has_one]]
    valid = (starts < equals) & (equals + 1 < ends)
    return (rows, starts, equals, ends) if valid.all() else (rows[valid], starts[valid], equals[valid], ends[valid])


def _is_regular(octets: NDArray[np.uint8], bounds: NDArray[np.int64], kinds: NDArray[np.uint8]) -> bool:
    """Whether 0x01 and 0x02 take turns and every row ends with 0x02, as 5.x brokers write it: nothing to search for."""
    return (
        len(kinds) > 0
        and len(kinds) % 2 == 0
        and bool((kinds[0::2] == _NAME_END).all() and (kinds[1::2] == _ENTRY_END).all())
        and bool((octets[bounds[1:][np.diff(bounds) > 0] - 1] == _ENTRY_END).all())
    )


def _pieces(entry_ends: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Row, start and end of every piece between 0x02, row starts and row ends; empty pieces are left out."""
    row_count = len(bounds) - 1
    ends_before = np.searchsorted(entry_ends, bounds)
    per_row = np.diff(ends_before)
    row_of_end = np.repeat(np.arange(row_count), per_row)
    ends = np.empty(len(entry_ends) + row_count, "i8")
    starts = np.empty_like(ends)
    place = np.arange(len(entry_ends)) + row_of_end  # each row before adds the piece up to its end
    ends[place] = entry_ends
    ends[ends_before[1:] + np.arange(row_count)] = bounds[1:]
    starts[place + 1] = entry_ends + 1
    starts[ends_before[:-1] + np.arange(row_count)] = bounds[:-1]
    rows = np.repeat(np.arange(row_count), per_row + 1)
    filled = starts < ends
    return rows[filled], starts[filled], ends[filled]


def _has_duplicates(cells: NDArray[Any], cell_count: int) -> bool:
    if cell_count <= _CELLS_MAX:
        return bool(len(cells)) and int(np.bincount(cells).max()) > 1
    return len(np.unique(cells)) < len(cells)
