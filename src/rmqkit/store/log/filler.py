"""Filler records: what a repair writes over a stretch of the log that is no record, so that the log goes on behind it.

A blank cannot bridge such a stretch: it ends its file. A filler is a record like any other, sound in every field, that
nobody dispatches: its sysFlag says *rollback*, as the transaction markers of old brokers do, so that brokers of Apache
and ours put it in no queue and not in the index, and it needs no queue offset. Its topic is `FILLER_TOPIC`, its body
zeros (bytes of lost records in it would be found by a search for records), its storeTimestamp that of the record behind
it, and its preparedTransactionOffset says how many bytes of records may be lost there: its own, or those up to the end
of the file where a blank follows. Fillers have at most `FILLER_BYTES_MAX`, as Apache's recovery reads each into memory.

A filler also says that messages were lost there: blank entries in queues are in order in a store that has some.
Source: store.md §3.3, §11, §12.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from rmqkit.protocol.record import TRANSACTION_MASK, TRANSACTION_ROLLBACK, Record, encode_record, layout_of, pack_host

__all__ = ["FILLER_BYTES_MAX", "FILLER_BYTES_MIN", "FILLER_TOPIC", "fillers", "is_filler"]

FILLER_TOPIC = "rmq_sys_LOST"
FILLER_BYTES_MAX = 1 << 20
_TOPIC = FILLER_TOPIC.encode()
_FIXED_BYTES = layout_of(0).head_bytes + 1 + 2
_TOPIC_BYTES_MIN = 1
FILLER_BYTES_MIN = _FIXED_BYTES + _TOPIC_BYTES_MIN
"""A record that was lost had at least so many bytes."""
_NOBODY = pack_host("0.0.0.0", 0)


def fillers(start: int, size: int, store_timestamp: int, *, lost_bytes: int = 0) -> Iterator[bytes]:
    """Records that together fill ``size`` bytes from a physical offset on; the size is at least `FILLER_BYTES_MIN`.
    ``lost_bytes``: what one says that stands for more than its own bytes."""
    assert size >= FILLER_BYTES_MIN, "there is room for a record"
    left = size
    while left:
        part = left if left <= FILLER_BYTES_MAX else min(FILLER_BYTES_MAX, left - FILLER_BYTES_MIN)
        topic = _TOPIC[: part - _FIXED_BYTES]
        yield encode_record(
            topic=topic,
            queue_id=0,
            flag=0,
            queue_offset=0,
            physical_offset=start + size - left,
            sys_flag=TRANSACTION_ROLLBACK,
            born_timestamp=store_timestamp,
            born_host=_NOBODY,
            store_timestamp=store_timestamp,
            store_host=_NOBODY,
            reconsume_times=0,
            prepared_transaction_offset=lost_bytes or part,
            body=bytes(part - _FIXED_BYTES - len(topic)),
            properties=b"",
        )
        left -= part


def is_filler(record: Record) -> bool:
    """Whether a record stands for bytes that were lost."""
    is_rollback = record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK
    return is_rollback and bool(record.topic) and FILLER_TOPIC.startswith(record.topic) and not record.properties
