"""Rows created from records: the work that a client does before an application sees a message, for a whole batch.

============================================  ===============================================================
record                                        rows
============================================  ===============================================================
plain                                         one; the body is decompressed by sysFlag
inner batch (sysFlag 0x40 and 0x80)           one per member: its own body, properties and flag, queue offset of
                                              the record + i, all other values from the record
inner batch that cannot be unpacked           one, as it is stored, with a problem
body that cannot be decompressed              one, as it is stored, with a problem
============================================  ===============================================================

Compressed bodies and inner batches are rare in a log. They are decoded one by one and merged into the columns, which
are gathered in bulk. The reader decides about the treatment of a problem (fail, skip, report).
Source: store.md §3.3, §3.7.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rmqkit.errors import BodyError
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.record import COMPRESSED, INNER_BATCH, NEED_UNWRAP, BatchEntry, decode_batch
from rmqkit.store.kernels.gather import gather, text_array
from rmqkit.store.kernels.properties import Properties
from rmqkit.store.log.scan import Records

_PLAIN_BYTES_MAX = 32 << 20
_INNER = INNER_BATCH | NEED_UNWRAP


def message_batches(
    records: Records, *, bodies: bool = True, decompressed: bool = True, unwrapped: bool = True, broker_name: str = ""
) -> Iterator[MessageBatch]:
    """Yield the records as batches of rows: one batch, or several if the decompressed bodies need much memory.

    Args:
        records: sound records.
        bodies: whether the caller reads the bodies of the rows.
        decompressed: whether to return decompressed bodies, instead of the stored bodies.
        unwrapped: whether to return one row per member of an inner batch, instead of one per record.
        broker_name: broker name of the rows; null if empty.
    """
    _keep_freed_memory()
    while len(records):
        batch = MessageBatch(records, bodies, decompressed, unwrapped, broker_name)
        yield batch
        records = records.take(slice(batch.record_count, None))


def topics_of(records: Records) -> pa.Array:
    """Return the topics of the records, dictionary-encoded, as bytes."""
    return gather(records.buffer, records.topic_at, records.topic_bytes).dictionary_encode()


class MessageBatch:
    """Rows of messages. Columns are computed on demand.
    A batch contains the first ``record_count`` of ``records``. ``problems`` has the reason why a row differs from the
    message that a client would see. Computing a column may add a problem. An empty ``broker_name`` is null in the rows.
    """

    def __init__(
        self, records: Records, bodies: bool, decompressed: bool, unwrapped: bool, broker_name: str = ""
    ) -> None:
        sys_flags = records.field("sys_flag")
        inner = (sys_flags & _INNER) == _INNER if unwrapped else np.zeros(len(records), bool)
        packed = (sys_flags & COMPRESSED) != 0
        troubles: dict[int, str] = {}
        plain, self.record_count = _decompressed(
            records, np.flatnonzero(packed & (inner | (bodies and decompressed))), troubles
        )
        self.records = records.take(slice(self.record_count)) if self.record_count < len(records) else records
        entries = _unwrapped(self.records, np.flatnonzero(inner[: self.record_count]), plain, troubles)
        self._decompressed = decompressed
        self._plain = plain
        self._spread(entries)
        self.broker_name = broker_name
        self.problems = {int(self._first_row[record]): reason for record, reason in troubles.items()}
        self._undecodable = [self._first_row[record] for record in troubles if packed[record] and record not in plain]

    def __len__(self) -> int:
        return len(self._record)

    def of_record(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert one number per record to one number per row: each row gets the number of its record."""
        return values if self._is_plain else values[self._record]

    def array_of_record(self, values: pa.Array) -> pa.Array:
        """Convert one Arrow value per record to one value per row: each row gets the value of its record."""
        return values if self._is_plain else values.take(pa.array(self._record))

    def field(self, name: str) -> NDArray[np.int64]:
        """Return a stored number of the record's head for each row, by its name in `HEAD_FIELDS`."""
        return self.of_record(self.records.field(name))

    def row_problem(self, record: int, reason: str) -> None:
        """Record a problem of the rows of a record. A row keeps its first reason."""
        for row in np.flatnonzero(self._record == record).tolist():
            self.problems.setdefault(row, reason)

    @property
    def member(self) -> NDArray[np.int64]:
        """The index of each row in its inner batch, or 0 if its record is not an inner batch."""
        members: NDArray[np.int64] = np.arange(len(self._record)) - self._first_row[self._record]
        return members

    def flags(self) -> NDArray[np.int64]:
        """Return the application's flag of each row. A row for a member of an inner batch has the flag of this
        member."""
        flags = self.field("flag")
        if self._members:
            flags = flags.copy()
            flags[self._member_rows] = [entry.flag for entry in self._members]
        return flags

    def sys_flags(self) -> NDArray[np.int64]:
        """Return sysFlag. The compressed bit is cleared in rows with a decompressed body."""
        flags = self.field("sys_flag").copy()
        cleared = np.full(len(self), self._decompressed)
        cleared[self._member_rows] = True
        cleared[self._undecodable] = False
        flags[cleared] &= ~COMPRESSED
        return flags

    def bodies(self) -> pa.Array:
        """Return the bodies as bytes."""
        arrays = [gather(self.records.buffer, self.records.body_at, self.records.body_bytes)]
        index = np.arange(len(self.records))
        if self._plain and self._decompressed:
            index[list(self._plain)] = len(index) + np.arange(len(self._plain))
            arrays.append(pa.array(list(self._plain.values()), pa.binary()))
        return self._merge(arrays, index, [entry.body for entry in self._members])

    @functools.cached_property
    def property_strings(self) -> pa.Array:
        """The property strings as text. Bytes that are not UTF-8 become U+FFFD."""
        stored = gather(self.records.buffer, self.records.properties_at, self.records.properties_bytes)
        return text_array(
            self._merge([stored], np.arange(len(self.records)), [entry.properties for entry in self._members])
        )

    @functools.cached_property
    def properties(self) -> Properties:
        """The decoded property strings."""
        return Properties(self.property_strings)

    def topics(self) -> pa.Array:
        """Return the topics as strings. A topic that is not UTF-8 is a problem of its rows."""
        encoded = topics_of(self.records)
        names = text_array(encoded.dictionary)
        damaged = [i for i, name in enumerate(encoded.dictionary.to_pylist()) if name != names[i].as_py().encode()]
        for record in np.flatnonzero(np.isin(encoded.indices.to_numpy(), damaged)).tolist() if damaged else ():
            self.row_problem(record, "the topic is not UTF-8")
        return self.array_of_record(names.take(encoded.indices))

    def _spread(self, entries: dict[int, list[BatchEntry]]) -> None:
        """Compute the record of each row."""
        counts = np.ones(len(self.records), "i8")
        counts[list(entries)] = [len(members) for members in entries.values()]
        self._is_plain = not entries
        self._record = np.repeat(np.arange(len(counts)), counts)
        self._first_row = np.cumsum(counts) - counts
        is_member = np.zeros(len(counts), bool)
        is_member[list(entries)] = True
        self._member_rows = np.flatnonzero(is_member[self._record])
        self._members = [entry for record in sorted(entries) for entry in entries[record]]

    def _merge(self, arrays: list[pa.Array], index: NDArray[np.int64], of_members: list[bytes]) -> pa.Array:
        """Concatenate ``arrays``, select the value at ``index`` for every record, and put the values of members of
        inner batches into their rows."""
        if len(arrays) == 1 and self._is_plain:
            return arrays[0]
        index = index[self._record]
        index[self._member_rows] = sum(map(len, arrays)) + np.arange(len(of_members))
        return pa.concat_arrays([*arrays, pa.array(of_members, pa.binary())]).take(pa.array(index))


@functools.cache
def _keep_freed_memory() -> None:
    """Make glibc retain the freed memory of a batch for the next batch. When a block is freed, glibc raises the size
    from which blocks are returned to the system, up to 32 MiB. Without this call, the arrays of 8,192 rows cost 600
    page faults for each batch."""
    np.empty((32 << 20) - 8192, "u1")


def _decompressed(records: Records, rows: NDArray[np.int64], troubles: dict[int, str]) -> tuple[dict[int, bytes], int]:
    """Return decompressed bodies by record, and the number of records with bodies that fit into memory together."""
    plain: dict[int, bytes] = {}
    budget = _PLAIN_BYTES_MAX
    for row in rows.tolist():
        # Check before each body: a first body of any size fits, so every batch has a record and the loop of the caller
        # ends.
        if budget <= 0:
            return plain, row
        try:
            plain[row] = decompress(_stored_body(records, row), int(records.heads["sys_flag"][row]))
        except BodyError as error:
            troubles[row] = str(error)
        else:
            budget -= len(plain[row])
    return plain, len(records)


def _unwrapped(
    records: Records, rows: NDArray[np.int64], plain: dict[int, bytes], troubles: dict[int, str]
) -> dict[int, list[BatchEntry]]:
    """Decode the members of the inner batches. Return them by the index of the record."""
    entries: dict[int, list[BatchEntry]] = {}
    for row in rows.tolist():
        if row in troubles:
            continue
        try:
            entries[row] = decode_batch(plain[row] if row in plain else _stored_body(records, row))
        except BodyError as error:
            troubles[row] = str(error)
    return entries


def _stored_body(records: Records, row: int) -> bytes:
    at = int(records.body_at[row])
    return bytes(memoryview(records.buffer)[at : at + int(records.body_bytes[row])])
