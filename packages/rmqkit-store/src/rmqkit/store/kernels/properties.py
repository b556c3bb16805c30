"""Property strings in bulk: `decode_properties` for a whole column.

A property string is ``name 0x01 value 0x02`` repeated. The last 0x02 may be missing. All strings of a batch are
contiguous in one Arrow buffer. One pass finds the separators. Separators and ends of rows cut the buffer into pieces.
Names and values are gathered from the pieces. Neither separator can be part of a UTF-8 sequence, so the functions work
on bytes. The rules are the same as in `decode_properties`: a piece needs 0x01, a name and a value, and the last
duplicate wins.
Source: store.md §3.4.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmqkit.store.kernels.gather import between, gather, octets_of, pick

_NAME_END = 1
_ENTRY_END = 2
_CELLS_MAX = 1 << 24


class Properties:
    """The decoded properties of a batch of rows: one property string per row, valid UTF-8, no nulls."""

    def __init__(self, strings: pa.Array) -> None:
        self._row_count = len(strings)
        octets, bounds = octets_of(strings)
        # The comparison finds 0, too, although 0 is not a separator. `_entries` decodes rows with a 0, and searches
        # only for 1 and 2.
        separators = np.flatnonzero(octets[bounds[0] : bounds[-1]] <= _ENTRY_END) + bounds[0]
        kinds = octets[separators]
        self._common = _common_names(octets, bounds, separators, kinds)
        if self._common is not None:
            # Change the separators in place to the bounds of values: after each 0x01 and up to its 0x02.
            separators[0::2] += 1
            self._values = between(octets.data, separators.astype("i4")).cast(pa.string(), safe=False)
            return
        self._rows, starts, equals, ends = _entries(octets, bounds.astype("i8"), separators, kinds)
        self._values = _between(octets, equals + 1, ends)
        self._names = _between(octets, starts, equals).dictionary_encode()
        self._drop_duplicates()

    def map(self) -> pa.Array:
        """Return a ``map<string, string>`` per row."""
        if self._common is not None:
            bounds = np.arange(0, len(self._values) + 1, len(self._common), dtype="i4")
            return pa.MapArray.from_arrays(pa.array(bounds), _repeated(self._common, self._row_count), self._values)
        counts = np.bincount(self._rows, minlength=self._row_count)
        offsets = np.zeros(self._row_count + 1, "i4")
        np.cumsum(counts, out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), self._names.dictionary_decode(), self._values)

    def values_of(self, name: str) -> pa.Array:
        """Return the value of one property for each row, or null if the row does not have the property."""
        if self._common is not None and name.encode() in self._common:
            first, step = self._common.index(name.encode()), len(self._common)
            return self._values.take(pa.array(np.arange(first, len(self._values), step, dtype="i4")))
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
        if self._common is not None:
            return {}
        return {name: code for code, name in enumerate(self._names.dictionary.to_pylist())}

    def _drop_duplicates(self) -> None:
        """Retain only the last of several entries with the same name in a row. Such entries are rare."""
        cells = self._rows * len(self._names_found) + self._codes
        if not _has_duplicates(cells, self._row_count * len(self._names_found)):
            return
        _, from_behind = np.unique(cells[::-1], return_index=True)
        kept = np.sort(len(cells) - 1 - from_behind)
        self._rows = self._rows[kept]
        self._names = self._names.take(pa.array(kept))
        self._values = self._values.take(pa.array(kept))


def _between(octets: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> pa.Array:
    """Return the texts between pairs of positions. The texts are in order and do not overlap."""
    return gather(octets.data, starts, ends - starts).cast(pa.string(), safe=False)


def _common_names(
    octets: NDArray[np.uint8], bounds: NDArray[np.int32], separators: NDArray[np.int64], kinds: NDArray[np.uint8]
) -> list[bytes] | None:
    """Return the names of the properties if all rows have the same names in the same order, otherwise None. Messages of
    one program often have the same names, which then need not be decoded row by row."""
    row_count = len(bounds) - 1
    if not row_count or not len(separators) or len(separators) % (2 * row_count):
        return None
    starts = np.empty_like(separators)
    starts[0] = bounds[0]
    np.add(separators[:-1], 1, out=starts[1:])
    ends, starts = separators.reshape(row_count, -1), starts.reshape(row_count, -1)
    sizes = ends - starts
    is_alike = (
        (kinds.view("<u2") == (_ENTRY_END << 8 | _NAME_END)).all()
        and (ends[:, -1] + 1 == bounds[1:]).all()
        and sizes.min() > 0
        and (sizes[:, 0::2] == sizes[0, 0::2]).all()
    )
    names = [octets[start:end].tobytes() for start, end in zip(starts[0, 0::2], ends[0, 0::2], strict=True)]
    if not is_alike or len(set(names)) < len(names):
        return None
    for name, at in zip(names, starts.T[0::2], strict=True):
        width = min(8, 1 << len(name).bit_length() - 1)
        words = np.ndarray((len(octets) - width + 1,), f"u{width}", octets, 0, (1,))
        for shift in {*range(0, len(name) - width, width), len(name) - width}:
            found = words[at + shift] if shift else words[at]
            if (found != found[0]).any():
                return None
    return names


def _repeated(names: list[bytes], count: int) -> pa.Array:
    """Repeat a sequence of texts ``count`` times."""
    bounds = np.cumsum([0, *map(len, names)], dtype="i4")
    offsets = np.empty(count * len(names) + 1, "i4")
    np.add(np.arange(count, dtype="i4")[:, None] * bounds[-1], bounds[:-1], out=offsets[:-1].reshape(count, -1))
    offsets[-1] = count * bounds[-1]
    octets = pa.py_buffer(b"".join(names) * count)
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, pa.py_buffer(offsets), octets])


def _entries(
    octets: NDArray[np.uint8], bounds: NDArray[np.int64], separators: NDArray[np.int64], kinds: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], ...]:
    """Return four columns for the valid entries, in order: the row, the start of the name, the position of 0x01, and
    the end of the value."""
    low = int(bounds[0])
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
    """Return True if 0x01 and 0x02 alternate and every row ends with 0x02, as in records of 5.x brokers. Then the
    separators are the bounds of the entries."""
    return (
        len(kinds) > 0
        and len(kinds) % 2 == 0
        and bool((kinds[0::2] == _NAME_END).all() and (kinds[1::2] == _ENTRY_END).all())
        and bool((octets[bounds[1:][np.diff(bounds) > 0] - 1] == _ENTRY_END).all())
    )


def _pieces(entry_ends: NDArray[np.int64], bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Split every row at each 0x02. Return the row, the start and the end of every piece that is not empty."""
    row_count = len(bounds) - 1
    ends_before = np.searchsorted(entry_ends, bounds)
    per_row = np.diff(ends_before)
    row_of_end = np.repeat(np.arange(row_count), per_row)
    ends = np.empty(len(entry_ends) + row_count, "i8")
    starts = np.empty_like(ends)
    place = np.arange(len(entry_ends)) + row_of_end  # each earlier row adds the piece up to its end
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
