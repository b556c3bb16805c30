"""Half messages, which are decided later, and op messages, which record the decisions
(``TransactionalMessageBridge``).

A *half message* is stored in queue 0 of ``RMQ_SYS_TRANS_HALF_TOPIC``, which consumers do not read. Its properties have
its real topic and queue. A commit stores the message again in its real queue. Commit and rollback then store the queue
offset of the half message in an *op message*: topic ``RMQ_SYS_TRANS_OP_HALF_TOPIC``, queue of the half message, tag
``d``, body ``17,18,21,`` (4.9: a single number, no comma). An op message is written after the commits that it records,
so a truncated log never has an op message without its commit.

Offsets are collected for a while before they are stored in an op message. If a crash loses collected offsets, the
broker asks the producer about the half message again. The message may be committed twice (at least once), but is never
lost. `check_back` asks the producers. Use this module only on the event loop. Source: store.md §19.1–19.4; behaviour.md
§9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rmqkit.broker.messages import number
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol import names
from rmqkit.protocol.record import Record, decode_record
from rmqkit.store.message_store import InnerMessage, MessageStore, PutStatus

__all__ = [
    "COLLECTED_MAX",
    "OpMessages",
    "half_at",
    "immunity_ms",
    "record_at",
]

COLLECTED_MAX = 20_000
"""The maximum number of collected offsets while the store refuses op messages. Then no transaction is decided."""

# Op messages have no UNIQ_KEY, as in Apache's broker: they are not queried by key.
_OP_PROPERTIES = b"WAIT\x01true\x02TAGS\x01d\x02"

_log = logging.getLogger(__name__)


def record_at(store: MessageStore, physical_offset: int) -> Record | None:
    """Return the record at a physical offset, to store it again. The record may still be in the transient store pool.

    Return None if no readable record begins at the offset. If the body changed on the disk, log this and return None.
    """
    raw = store.log.appended_record_at(physical_offset)
    try:
        record = None if raw is None else decode_record(raw)
    except RecordCorrupt:
        return None
    if record is None or record.has_sound_body or not store.checks_bodies:
        return record
    if record.physical_offset == physical_offset:  # otherwise a client requested an offset within another message
        _log.error(
            "the message of %s at %d is not stored again: its body does not match its CRC, %08x",
            *(record.topic, physical_offset, record.body_crc),
        )
    return None


def half_at(store: MessageStore, physical_offset: int) -> Record | None:
    """Return the half message at a physical offset, or None."""
    record = record_at(store, physical_offset)
    return record if record is not None and record.topic == names.HALF_TOPIC else None


def immunity_ms(seconds: str, timeout_ms: int) -> int:
    """Return the time for which check-back ignores a message with ``CHECK_IMMUNITY_TIME_IN_SECONDS``, in ms. If the
    property is not a number, return ``timeout_ms``."""
    own = number(seconds)
    return timeout_ms if own < 0 else own * 1000


class OpMessages:
    """The collected offsets of decided half messages. They are stored together in op messages.
    The caller calls `write` every ``transactionOpBatchInterval``.
    ``store_host``: the broker's own address, packed as in records.
    ``body_bytes_max``: the maximum size of collected text. Larger text is written immediately
    (``transactionOpMsgMaxSize``)."""

    def __init__(self, store: MessageStore, store_host: bytes, clock: Clock, *, body_bytes_max: int) -> None:
        self._store = store
        self._store_host = store_host
        self._clock = clock
        self._body_bytes_max = body_bytes_max
        self._collected: dict[int, list[int]] = {}
        self._collected_bytes = 0
        self._is_refused = False
        self._unreadable: list[tuple[int, int, frozenset[int]]] = []

    @property
    def is_full(self) -> bool:
        """Return True if no further transaction can be decided, because op messages cannot be stored now."""
        return sum(map(len, self._collected.values())) >= COLLECTED_MAX

    def add(self, queue_id: int, queue_offset: int) -> None:
        """Collect the offset of a decided half message. For a commit, the caller has put the message before."""
        self._collected.setdefault(queue_id, []).append(queue_offset)
        self._collected_bytes += len(str(queue_offset)) + 1
        # Do not try while the store refuses: every further decision would fail and log the same again.
        if self._collected_bytes > self._body_bytes_max and not self._is_refused:
            self.write()

    def holds(self, queue_id: int, queue_offset: int) -> bool:
        """Return True if a half message is decided and its op message cannot be read yet."""
        self._forget_readable()
        return queue_offset in self._collected.get(queue_id, ()) or any(
            queue_id == queue and queue_offset in offsets for _, queue, offsets in self._unreadable
        )

    def write(self) -> None:
        """Store all collected offsets. Offsets that the store refuses are retried by the next call."""
        self._forget_readable()
        for queue_id, offsets in list(self._collected.items()):
            while offsets and (taken := self._put(queue_id, offsets)):
                del offsets[:taken]
            if not offsets:
                del self._collected[queue_id]
        self._is_refused = bool(self._collected)
        self._collected_bytes = sum(len(_body(offsets)) for offsets in self._collected.values())

    def _put(self, queue_id: int, offsets: list[int]) -> int:
        """Put one op message. Return the number of offsets that it contains; 0 if it was refused."""
        body = _body(offsets)
        # Cut after a comma: a part of a number would be the offset of another half message.
        end = body.find(b",", self._body_bytes_max) + 1
        body = body[:end] if end else body
        message = InnerMessage(
            topic=names.OP_HALF_TOPIC,
            queue_id=queue_id,
            body=body,
            string=_OP_PROPERTIES,
            flag=0,
            sys_flag=0,
            born_timestamp=self._clock.now_ms(),
            born_host=self._store_host,
            store_host=self._store_host,
        )
        put = self._store.put(message)
        if put.status is not PutStatus.OK:
            _log.warning("cannot store the op message of half queue %d: %s %s", queue_id, put.status.value, put.reason)
            return 0
        count = body.count(b",")
        assert 0 < count <= len(offsets), "an op message has at least one offset"
        self._unreadable.append((put.end_offset, queue_id, frozenset(offsets[:count])))
        return count

    def _forget_readable(self) -> None:
        # Remember an op message until it can be read: otherwise the producer would be asked again.
        readable = self._store.dispatched_offset
        self._unreadable = [waiting for waiting in self._unreadable if waiting[0] > readable]


def _body(offsets: Iterable[int]) -> bytes:
    return b"".join([b"%d," % offset for offset in offsets])
