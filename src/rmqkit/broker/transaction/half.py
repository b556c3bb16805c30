"""Half and op messages: what is decided later, and that it was decided (``TransactionalMessageBridge``).

A *half message* lies in queue 0 of ``RMQ_SYS_TRANS_HALF_TOPIC`` under its real topic and queue as properties, out of
its consumers' sight. Commit puts it once more, where it belongs; commit and rollback then note its queue offset in an
*op message*: topic ``RMQ_SYS_TRANS_OP_HALF_TOPIC``, queue of the half message, tag ``d``, body ``17,18,21,`` (4.9: a
single number, no comma). Op messages are written behind the commits they stand for, so a log that ends anywhere never
holds the one without the other.

Offsets are collected for a while before they become an op message. A crash loses what is collected: the half message
is asked about again and may be committed twice (at least once), never forgotten. Loop only.
Not handled here: asking producers (`check_back`). Source: store.md §19.1–19.4; behaviour.md §9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from rmqkit.broker.messages import message_from, with_changes
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.properties import decode_properties, find_property, in_stored_order
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record, decode_record
from rmqkit.store.message_store import MessageStore, PutMessage, PutStatus
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = [
    "COLLECTED_MAX",
    "TRANSACTION_GROUP",
    "OpMessages",
    "committed",
    "half_at",
    "immunity_ms",
    "is_half",
    "number",
    "op_offsets",
    "real_place",
    "record_at",
    "to_half",
]

TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
"""The group under which the progress in both topics is kept among the consumer offsets."""

COLLECTED_MAX = 20_000
"""Offsets that may wait while the store takes no op message; beyond it no transaction is ended."""

_OP_PROPERTIES = b"WAIT\x01true\x02TAGS\x01d\x02"
_PREPARED = property_names.TRANSACTION_PREPARED.encode()
_DELAY = property_names.DELAY.encode()
_UNIQ_KEY = property_names.UNIQ_KEY.encode()
_OP_TAG = b"d"
_OP_TAGS = property_names.TAGS.encode()

_log = logging.getLogger(__name__)


class TransactionContext(Protocol):
    """What the ends of transactions and check-back may touch."""

    clients: ClientTable
    clock: Clock
    counts: Counts | None
    durability: Durability | None
    offsets: OffsetTable
    ops: OpMessages
    schedule: Schedule
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable


def is_half(message: PutMessage) -> bool:
    """Whether a producer means a message as a half message; one that is retried with a delay is none any more."""
    prepared = find_property(message.properties, _PREPARED)
    if prepared is None or prepared.lower() != b"true":
        return False
    delay = find_property(message.properties, _DELAY) if message.reconsume_times > 0 else None
    return delay is None or number(delay.decode("ascii", "replace")) <= 0


def to_half(message: PutMessage) -> None:
    """Make a half message of a message that is ready to be put. Source: store.md §19.2."""
    unique_key = find_property(message.properties, _UNIQ_KEY)
    changes = {
        property_names.TRANSACTION_ID: None if unique_key is None else unique_key.decode("utf-8", "replace"),
        property_names.REAL_TOPIC: message.topic,
        property_names.REAL_QUEUE_ID: str(message.queue_id),
    }
    message.properties = in_stored_order(with_changes(message.properties, changes))
    message.sys_flag &= ~TRANSACTION_MASK
    message.topic, message.queue_id = names.HALF_TOPIC, 0


def record_at(store: MessageStore, physical_offset: int) -> Record | None:
    """The record that lies at a physical offset, to be stored once more; None where none begins or can be read, or its
    body changed on the disk, which is told."""
    raw = store.record_at(physical_offset)
    try:
        record = None if raw is None else decode_record(raw)
    except RecordCorrupt:
        return None
    if record is None or record.has_sound_body or not store.checks_bodies:
        return record
    if record.physical_offset == physical_offset:  # else bytes within another message, which a client asked for
        _log.error(
            "the message of %s at %d is not stored once more: its body is not the one of its CRC, %08x",
            *(record.topic, physical_offset, record.body_crc),
        )
    return None


def half_at(store: MessageStore, physical_offset: int) -> Record | None:
    """The half message that lies at a physical offset, or None."""
    record = record_at(store, physical_offset)
    return record if record is not None and record.topic == names.HALF_TOPIC else None


def real_place(properties: Mapping[str, str]) -> tuple[str, int] | None:
    """Topic and queue id a half message is meant for; None when it does not say."""
    topic, queue_id = properties.get(property_names.REAL_TOPIC), number(properties.get(property_names.REAL_QUEUE_ID))
    return None if topic is None or not 0 <= queue_id < 1 << 31 else (topic, queue_id)


def immunity_ms(seconds: str, timeout_ms: int) -> int:
    """How long nobody is asked about a message with ``CHECK_IMMUNITY_TIME_IN_SECONDS``; not a number means the usual
    ``transactionTimeOut``."""
    own = number(seconds)
    return timeout_ms if own < 0 else own * 1000


def number(text: str | None) -> int:
    """A property as a number, -1 when it is none."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 19 else -1


def committed(half: Record) -> PutMessage | None:
    """The message that the commit of a half message puts, None when its destination is missing. Source: §19.3."""
    place = real_place(decode_properties(half.properties))
    if place is None:
        return None
    return message_from(
        half,
        topic=place[0],
        queue_id=place[1],
        changes={property_names.REAL_TOPIC: None, property_names.REAL_QUEUE_ID: None},
        sys_flag=half.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT,
        prepared_transaction_offset=half.physical_offset,
    )


def op_offsets(op: Record) -> list[int]:
    """The half queue offsets in an op message; pieces that are no numbers are left out."""
    if find_property(op.properties, _OP_TAGS) != _OP_TAG:
        return []
    pieces = op.body.decode("ascii", "replace").split(",")
    return [offset for offset in map(number, pieces) if offset >= 0]


class OpMessages:
    """Collects the offsets of decided half messages and writes them down, many at a time.
    `write` has to be called every ``transactionOpBatchInterval``.
    ``store_host``: the broker's own address, packed as in records.
    ``body_bytes_max``: collected text beyond which it is written at once (``transactionOpMsgMaxSize``)."""

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
        """Whether no further transaction may be ended: op messages cannot be written at present."""
        return sum(map(len, self._collected.values())) >= COLLECTED_MAX

    def add(self, queue_id: int, queue_offset: int) -> None:
        """Note that a half message is decided; its commit, if it is one, was put before."""
        self._collected.setdefault(queue_id, []).append(queue_offset)
        self._collected_bytes += len(str(queue_offset)) + 1
        if self._collected_bytes > self._body_bytes_max and not self._is_refused:
            self.write()

    def holds(self, queue_id: int, queue_offset: int) -> bool:
        """Whether a half message is decided and its op message cannot be read yet."""
        self._forget_readable()
        return queue_offset in self._collected.get(queue_id, ()) or any(
            queue_id == queue and queue_offset in offsets for _, queue, offsets in self._unreadable
        )

    def write(self) -> None:
        """Put everything collected; what the store refuses stays collected until the next call."""
        self._forget_readable()
        for queue_id, offsets in list(self._collected.items()):
            while offsets and (taken := self._put(queue_id, offsets)):
                del offsets[:taken]
            if not offsets:
                del self._collected[queue_id]
        self._is_refused = bool(self._collected)
        self._collected_bytes = sum(len(_body(offsets)) for offsets in self._collected.values())

    def _put(self, queue_id: int, offsets: list[int]) -> int:
        """Put one op message; how many of the offsets it holds, 0 when it was refused."""
        body = _body(offsets)
        end = body.find(b",", self._body_bytes_max) + 1
        body = body[:end] if end else body
        message = PutMessage(
            topic=names.OP_HALF_TOPIC,
            queue_id=queue_id,
            body=body,
            properties=_OP_PROPERTIES,
            flag=0,
            sys_flag=0,
            born_timestamp=self._clock.now_ms(),
            born_host=self._store_host,
            store_host=self._store_host,
        )
        put = self._store.put(message)
        if put.status is not PutStatus.OK:
            _log.warning("op message of half queue %d cannot be put: %s %s", queue_id, put.status.value, put.reason)
            return 0
        count = body.count(b",")
        self._unreadable.append((put.end_offset, queue_id, frozenset(offsets[:count])))
        return count

    def _forget_readable(self) -> None:
        readable = self._store.dispatched_offset
        self._unreadable = [waiting for waiting in self._unreadable if waiting[0] > readable]


def _body(offsets: Iterable[int]) -> bytes:
    return b"".join([b"%d," % offset for offset in offsets])
