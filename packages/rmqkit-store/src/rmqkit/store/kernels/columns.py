"""One function per column: a batch of rows → an Arrow array of the column's type (`rmqkit.arrow.schema`).

Numbers are copied from the heads. A batch has few distinct topics, hosts and brokers, so their texts are created once
per distinct value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmqkit.protocol import properties as names
from rmqkit.protocol.record import host_text
from rmqkit.store.kernels.batch import MessageBatch
from rmqkit.store.kernels.gather import gather
from rmqkit.store.log.scan import Records

Kernel = Callable[[MessageBatch], pa.Array]

_MS_MAX = (2**63 - 1) // 1000


def int32(name: str) -> Kernel:
    """Return the kernel for a four-byte field of the record head."""
    return lambda batch: pa.array(batch.field(name).astype("i4"))


def int64(name: str) -> Kernel:
    """Return the kernel for an eight-byte field of the record head."""
    return lambda batch: pa.array(batch.field(name))


def timestamp(name: str) -> Kernel:
    """Return the kernel for a time. The time is null if the milliseconds in the record do not fit into Arrow's
    microseconds."""

    def kernel(batch: MessageBatch) -> pa.Array:
        microseconds, fits = to_microseconds(batch.field(name))
        return pa.array(microseconds, mask=None if fits.all() else ~fits).view(pa.timestamp("us", tz="UTC"))

    return kernel


def host(name: str) -> Kernel:
    """Return the kernel for an address, as a text ``ip:port``."""

    def kernel(batch: MessageBatch) -> pa.Array:
        if not batch.records.host_bits.any():
            numbers = batch.records.heads[name].view("i8")
            if (
                len(numbers) and (numbers == numbers[0]).all()
            ):  # true for the store host, and for the messages of one program
                return pa.repeat(host_text(numbers[0].tobytes()), len(batch))
        packed = _packed_hosts(batch.records, name).dictionary_encode()
        texts = pa.array([host_text(value) for value in packed.dictionary.to_pylist()], pa.string())
        return batch.array_of_record(texts.take(packed.indices))

    return kernel


def property_value(name: str) -> Kernel:
    """Return the kernel for one property."""
    return lambda batch: batch.properties.values_of(name)


def broker_names(batch: MessageBatch) -> pa.Array:
    """Return the broker name in the read plan for each row, or null if the plan has none. Records contain no broker
    name."""
    return pa.repeat(pa.scalar(batch.broker_name or None, pa.string()), len(batch))


def queue_offsets(batch: MessageBatch) -> pa.Array:
    """Return the positions in the queue, counted in messages."""
    return pa.array(batch.field("queue_offset") + batch.member)


def commit_log_offsets(batch: MessageBatch) -> pa.Array:
    """Return the physical offsets of the records. The members of an inner batch share an offset."""
    return pa.array(batch.field("physical_offset"))


def store_sizes(batch: MessageBatch) -> pa.Array:
    """Return the sizes of the whole records in bytes. The members of an inner batch share a size."""
    return pa.array(batch.of_record(batch.records.sizes).astype("i4"))


def message_ids(batch: MessageBatch) -> pa.Array:
    """Return the UNIQ_KEY of each message, or its offset message id if it has no UNIQ_KEY."""
    unique_keys = batch.properties.values_of(names.UNIQ_KEY)
    if not unique_keys.null_count:
        return unique_keys
    return pc.coalesce(unique_keys, batch.array_of_record(_offset_ids(batch.records)))


def flags(batch: MessageBatch) -> pa.Array:
    """Return the application's flags."""
    return pa.array(batch.flags().astype("i4"))


def sys_flags(batch: MessageBatch) -> pa.Array:
    """Return RocketMQ's flag bits (store.md §3.3)."""
    return pa.array(batch.sys_flags().astype("i4"))


def to_microseconds(milliseconds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return times in µs, and a mask of the valid times. The clock of a sender may have any value."""
    # Without the check, multiplied values out of range would wrap to times that look right.
    fits = (milliseconds >= -_MS_MAX) & (milliseconds <= _MS_MAX)
    return np.where(fits, milliseconds, 0) * 1000, fits


def _packed_hosts(records: Records, name: str) -> pa.Array:
    """Return the packed addresses in a field of all heads."""
    if records.host_bits.any():
        return gather(records.buffer, records.field_at(name), records.field_bytes(name))
    # A field of a structured array has the stride of the whole head; Arrow reads its buffer without strides.
    packed = np.ascontiguousarray(records.heads[name])
    return pa.Array.from_buffers(pa.binary(packed.itemsize), len(packed), [None, pa.py_buffer(packed)])


def _offset_ids(records: Records) -> pa.Array:
    """Return packed store host and physical offset of every record in upper-case hexadecimal, 32 or 56 digits."""
    hosts = _packed_hosts(records, "store_host")
    offsets = records.field("physical_offset").astype(">i8").view("u1").reshape(-1, 8)
    host_bytes = records.field_bytes("store_host")
    digits = np.zeros((len(records), 2 * (int(host_bytes.max()) + 8)), "u1")
    for width in np.unique(host_bytes).tolist():
        rows = np.flatnonzero(host_bytes == width)
        packed = np.frombuffer(b"".join(hosts.take(pa.array(rows)).to_pylist()), "u1").reshape(-1, width)
        digits[rows, : 2 * (width + 8)] = _hex_digits()[np.hstack((packed, offsets[rows]))].reshape(len(rows), -1)
    ends = np.concatenate(([0], np.cumsum(2 * (host_bytes + 8)))).astype("i4")
    # Ids of IPv4 hosts are shorter than the row if the batch has IPv6 hosts, too. No digit is the byte 0, so removing
    # zeros closes the gaps.
    text = digits[digits != 0]
    assert len(text) == ends[-1], "every id has two digits per byte"
    return pa.Array.from_buffers(pa.string(), len(records), [None, pa.py_buffer(ends), pa.py_buffer(text)])


@functools.cache
def _hex_digits() -> NDArray[np.uint8]:
    """Return the two hexadecimal digits of every byte."""
    return np.frombuffer("".join(f"{byte:02X}" for byte in range(256)).encode(), "u1").reshape(256, 2)
