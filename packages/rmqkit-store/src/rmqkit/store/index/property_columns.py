"""The property strings of many records, processed together with numpy: the values of a property, and the hashes of
keys.

The strings are concatenated. A value begins after each 0x01 that follows 0x02 and the wanted name. Hashes are Java's
hashes, computed for all texts of one length together. The plain code handles rare texts one by one: bytes that are not
ASCII, long values, KEYS of several words. Tests compare the results with `key_hashes` and `find_property`.

The keys of a record cost about 1 µs. The import needs numpy: see `scan`. Source: store.md §3.4, §7.2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rmqkit.protocol.properties import Keys, java_hash
from rmqkit.store.index.file import key_hash

__all__ = ["PropertyColumns"]

Ints = NDArray[np.int64]

NAMES = (b"UNIQ_KEY", b"KEYS", b"TAGS")
"""The properties that are keys, in the order of `Keys`."""

_PAD = b"\x02" * 10
_TEXT_BYTES_MAX = 64
"""Maximum length of a text that is hashed together with others. Longer texts are hashed one by one."""
_POWERS = np.array([pow(31, n, 1 << 32) for n in range(_TEXT_BYTES_MAX, -1, -1)], "u4")
"""Powers of 31, the highest first: the factor of each character of a text in its hash, modulo 2³²."""

_Values = tuple[Ints, Ints, Ints]
"""Rows that have a property, and start and end of the value in the joined strings; one value per row."""


class PropertyColumns:
    """The property strings of a run of records, one row each.
    ``joined``: all strings, with 0x02 before each and several at both ends."""

    def __init__(self, strings: Sequence[bytes | bytearray]) -> None:
        self.joined = b"".join((_PAD, b"\x02".join(strings), _PAD))
        self._octets = np.frombuffer(self.joined, "u1")
        bytes_each = np.fromiter(map(len, strings), "i8", len(strings)) + 1
        self.starts: Ints = np.cumsum(bytes_each) - bytes_each + len(_PAD)
        self.found: dict[bytes, _Values] = {}

    @classmethod
    def of_keys(cls, keys: Sequence[Keys]) -> PropertyColumns:
        """Return the columns of records from their values of the properties in `NAMES`. The properties of the records
        are not searched again."""
        values = list(chain.from_iterable(keys))
        assert len(values) == len(NAMES) * len(keys), "each record has a value of each name, which may be empty"
        columns = cls(values)
        starts = columns.starts
        ends = starts + np.fromiter(map(len, values), "i8", len(values))
        for column, name in enumerate(NAMES):
            at, end = starts[column :: len(NAMES)], ends[column :: len(NAMES)]
            rows = np.flatnonzero(end > at)
            columns.found[name] = rows, at[rows], end[rows]
        return columns

    @functools.cached_property
    def _separators(self) -> tuple[Ints, Ints, Ints]:
        """The positions at which names and entries end, and the eight bytes before the end of each name as a number."""
        octets = self._octets
        name_ends, entry_ends = np.flatnonzero(octets == 1), np.flatnonzero(octets == 2)
        return name_ends, entry_ends, self._windows(8)[name_ends - 8].view(">i8")[:, 0].astype("i8")

    def _windows(self, width: int) -> NDArray[np.uint8]:
        """Return one row for each position: the ``width`` octets that begin there. The rows overlap, and indexing
        copies the chosen rows."""
        octets = self._octets
        return np.lib.stride_tricks.as_strided(octets, (len(octets) - width + 1, width), (1, 1), writeable=False)

    def values(self, name: bytes) -> _Values:
        """Return the value of a property in each record that has the property: the last value that is not empty.
        The last eight bytes of a name and its length are compared."""
        if name in self.found:
            return self.found[name]
        octets = self._octets
        name_ends, entry_ends, before = self._separators
        # Eight bytes are one comparison for all names together. Names with the same last bytes differ in length.
        tail = (b"\x02" + name)[-8:]
        mask = (1 << 8 * len(tail)) - 1
        is_named = (before if len(tail) == 8 else before & mask) == int.from_bytes(tail, "big")
        at = name_ends[is_named] + 1
        at = at[octets[at - 2 - len(name)] == 2]
        end = entry_ends[np.searchsorted(entry_ends, at)]
        at, end = at[end > at], end[end > at]
        rows = np.searchsorted(self.starts, at, "right") - 1
        is_last = np.append(np.diff(rows) > 0, True)[: len(rows)]
        self.found[name] = found = rows[is_last], at[is_last], end[is_last]
        return found

    def keys(self, topics: Sequence[str | None], topic: Ints, *, with_tags: bool) -> tuple[Ints, Ints]:
        """Return the index entries of the run in order: the row and the hash of each entry.
        ``topics``, ``topic``: the distinct topics, and for each record the index of its topic.
        ``with_tags``: whether TAGS is a key, too, as in brokers from 5.4 on."""
        found = [self._key_column(topics, topic, b"UNIQ_KEY", "#", 0), *self._words(topics, topic)]
        if with_tags:
            found.append(self._key_column(topics, topic, b"TAGS", "#T#", 1 << 20))
        rows, ranks, hashes = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort((rows << 21) + ranks)
        return rows[order], hashes[order]

    def hashes(self, at: Ints, end: Ints, heads: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return Java's hashes of texts. Each text follows a beginning with a known hash (``heads``)."""
        lengths = end - at
        hashes, is_plain, is_ascii = heads.copy(), lengths <= _TEXT_BYTES_MAX, self.joined.isascii()
        for length in sorted({*lengths[is_plain].tolist()}):
            rows = np.flatnonzero(lengths == length)
            texts = self._windows(length)[at[rows]]
            powers = _POWERS[_TEXT_BYTES_MAX - length :]
            hashes[rows] = hashes[rows] * powers[0] + texts @ powers[1:]
            if not is_ascii:
                is_plain[rows] = texts.max(1, initial=0) < 128
        for row in np.flatnonzero(~is_plain).tolist():
            text = self.joined[at[row] : end[row]].decode("utf-8", "replace")
            units = len(text.encode("utf-16-be", "surrogatepass")) // 2
            hashes[row] = (int(heads[row]) * pow(31, units, 1 << 32) + java_hash(text)) & 0xFFFFFFFF
        return hashes

    # ---- internals

    def _key_column(
        self, topics: Sequence[str | None], topic: Ints, name: bytes, between: str, rank: int
    ) -> tuple[Ints, Ints, Ints]:
        """Return rows, ranks and key hashes of the records that have a property."""
        rows, at, end = self.values(name)
        return rows, np.full(len(rows), rank), self._key_hashes(topics, topic[rows], at, end, between)

    def _words(self, topics: Sequence[str | None], topic: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the columns of KEYS, like `_key_column`; each word is a key."""
        rows, at, end = self.values(NAMES[1])
        joined = self.joined
        spaces = np.flatnonzero(self._octets == 32) if b" " in joined else rows[:0]
        is_many = np.searchsorted(spaces, at) < np.searchsorted(spaces, end)
        one = ~is_many
        yield rows[one], np.ones(int(one.sum()), "i8"), self._key_hashes(topics, topic[rows[one]], at[one], end[one])
        for row, a, b in zip(rows[is_many].tolist(), at[is_many].tolist(), end[is_many].tolist(), strict=True):
            words = [word for word in joined[a:b].decode("utf-8", "replace").split(" ") if word]
            yield (
                np.full(len(words), row),
                np.arange(1, len(words) + 1),
                np.array([key_hash(topics[topic[row]] or "", word) for word in words], "i8"),
            )

    def _key_hashes(self, topics: Sequence[str | None], topic: Ints, at: Ints, end: Ints, between: str = "#") -> Ints:
        heads = np.array([java_hash(f"{text}{between}") & 0xFFFFFFFF for text in topics], "u4")
        hashes = self.hashes(at, end, heads[topic]).astype("u4").view("i4").astype("i8")
        absolute: Ints = np.abs(hashes) & 0x7FFFFFFF  # the smallest number has no absolute value and becomes 0
        return absolute
