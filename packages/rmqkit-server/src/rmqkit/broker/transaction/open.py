"""Open transactions: each half message is decided once, even if several decisions arrive.

Check-back stores a half message again each time it asks a producer about it, so a transaction can have several copies
in the half queue. A producer decides the copy that it was asked about. This may be an old copy, and producers may
decide two copies differently. Only the newest copy represents the transaction. `OpenTransactions` has these tables:

===================  ===============================================================================================
``_newest``          the offset of the newest copy of each open transaction that was stored again
``_passed``          the offsets that check-back has to pass: decided, replaced by a newer copy, or given up
``_given_up``        transactions that check-back has given up. Their first decision is still accepted
``_doubtful``        transactions from before the start. Their commit may be stored already
``_decisions``       the decisions of the last transactions, to answer a repeated decision and to refuse a different one
===================  ===============================================================================================

A half message is open in three cases: it has a newest copy, it was given up, or it was never stored again and is
neither passed nor before the position of check-back. The copies of a transaction have the same unique key, birth and
body CRC. Nothing else connects them, because the records have the format of Apache's broker.

The tables are only in memory. The first decision, or the first round of check-back, after a start reads both queues
from the stored positions on, and the last transactions that were given up, in slices. A crash loses the op messages of
the last ``transactionOpBatchInterval``, and a restart loses the decisions of transactions that were given up. So
transactions that are open at the start are *doubtful*: the index is searched for the commit of such a transaction
before it is decided or a producer is asked. Commits with a delay and rollbacks are not in the index. A producer is
asked about these half messages again. Use this module only on the event loop. Apache's broker has no such tables: it
carries out each decision about any copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Protocol, TypeVar

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.messages import real_place
from rmqkit.broker.recorder import Recorder
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.half import OpMessages, record_at
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import TRANSACTION_GROUP
from rmqkit.protocol.op_messages import op_offsets
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_MASK, Record, decode_record
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

__all__ = ["OpenTransactions", "Transaction", "TransactionContext", "transaction_of"]

_REMEMBERED_MAX = 20_000
_RECORDS_PER_READ = 64
_COMMITS_MAX = 32
_FOR_EVER = (1 << 63) - 1

Transaction = tuple[int, str, int, bytes, int]
"""The values that all copies of a half message share: half queue, unique key, born timestamp, born host, body CRC."""

V = TypeVar("V")

_log = logging.getLogger(__name__)


class TransactionContext(Protocol):
    """The parts of the broker that decisions and check-back use."""

    clients: ClientTable
    clock: Clock
    durability: Durability | None
    offsets: OffsetTable
    ops: OpMessages
    recorder: Recorder
    schedule: Schedule
    settings: BrokerSettings
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable
    transactions: OpenTransactions


def transaction_of(half: Record, properties: dict[str, str]) -> Transaction:
    """Return the values that all copies of a half message share. The copy of a given-up message has the same values."""
    queue_id = half.queue_id if half.topic == names.HALF_TOPIC else 0
    key = properties.get(property_names.UNIQ_KEY, "")
    return queue_id, key, half.born_timestamp, bytes(half.born_host), half.body_crc


def _is_copy(properties: dict[str, str]) -> bool:
    """Return True if check-back or an operator stored a half message again."""
    return (
        property_names.TRANSACTION_CHECK_TIMES in properties
        or property_names.TRANSACTION_PREPARED_QUEUE_OFFSET in properties
    )


class OpenTransactions:
    """The undecided transactions of one broker. The caller awaits `prepare` first."""

    def __init__(self, store: MessageStore, topics: TopicTable, offsets: OffsetTable, ops: OpMessages) -> None:
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._ops = ops
        self._newest: dict[Transaction, int] = {}
        self._passed: dict[int, _Marks] = {}
        self._given_up: dict[Transaction, None] = {}
        self._doubtful: set[Transaction] = set()
        self._decisions: dict[Transaction, int] = {}
        self._decided_before: set[Transaction] = set()
        self._reading = asyncio.Lock()
        self.is_ready = False

    @property
    def queue_ids(self) -> range:
        """The queues of the half topic."""
        topic = self._topics.get(names.HALF_TOPIC)
        return range(1 if topic is None else topic.read_queue_nums)

    async def prepare(self) -> None:
        """Read the open transactions. Later calls do nothing."""
        async with self._reading:
            if not self.is_ready:
                for queue_id in self.queue_ids:
                    await self._read_queue(queue_id)
                await self._read_given_up()
                self.is_ready = True

    def newest(self, transaction: Transaction) -> int | None:
        """Return the offset of the newest copy of an open transaction; None if it was never stored again."""
        return self._newest.get(transaction)

    def is_passed(self, queue_id: int, queue_offset: int) -> bool:
        """Return True if check-back has to pass a half message."""
        marks = self._passed.get(queue_id)
        return marks is not None and queue_offset in marks

    def open_offset(self, half: Record, transaction: Transaction) -> int | None:
        """Return the offset with which a half message has to be decided; None if its transaction is decided."""
        if self.was_committed(half, transaction):
            return None
        newest = self._newest.get(transaction)
        if newest is not None:
            return newest
        if transaction in self._given_up:
            return half.queue_offset
        queue_id, queue_offset = half.queue_id, half.queue_offset
        is_ended = queue_offset < self.position(queue_id) or self.is_passed(queue_id, queue_offset)
        return None if is_ended else queue_offset

    def position(self, queue_id: int) -> int:
        """Return the offset from which check-back reads a half queue."""
        known = self._offsets.get(TRANSACTION_GROUP, names.HALF_TOPIC, queue_id)
        return self._store.min_offset(names.HALF_TOPIC, queue_id) if known is None else known

    def was_committed(self, half: Record, transaction: Transaction) -> bool:
        """Return True if a transaction from before the start was committed, but its op message was lost. Then also
        record the decision."""
        if transaction not in self._doubtful:
            return False
        self._doubtful.discard(transaction)
        properties = decode_properties(half.properties)
        place = real_place(properties)
        has_copies = transaction in self._newest or transaction in self._given_up
        for physical_offset in () if place is None else self._commits(place[0], transaction[1]):
            found = record_at(self._store, physical_offset)
            if (
                found is not None
                and found.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT
                and transaction_of(found, properties)[2:] == transaction[2:]
                and (has_copies or found.prepared_transaction_offset == half.physical_offset)
            ):
                newest = self._newest.get(transaction, half.queue_offset)
                self.decided(half, transaction, newest, TRANSACTION_COMMIT)
                return True
        return False

    def _commits(self, topic: str, key: str) -> list[int]:
        return self._store.query(topic, key, _COMMITS_MAX, 0, _FOR_EVER).physical_offsets if key else []

    def decision(self, transaction: Transaction) -> int | None:
        """Return the decision of a transaction; None if it is open, or was decided too long ago."""
        return self._decisions.get(transaction)

    def decided(self, half: Record, transaction: Transaction, open_offset: int, decision: int) -> None:
        """Record the decision of a transaction."""
        assert transaction not in self._decisions or open_offset == half.queue_offset, "a transaction is decided once"
        self._newest.pop(transaction, None)
        self._given_up.pop(transaction, None)
        self._doubtful.discard(transaction)
        _remember(self._decisions, transaction, decision)
        # Record both offsets: after a crash, an Apache broker on this store may begin before the older copy.
        for queue_offset in {half.queue_offset, open_offset}:
            self._pass(half.queue_id, queue_offset)
            self._ops.add(half.queue_id, queue_offset)

    def stored_again(self, transaction: Transaction, old_offset: int | None, new_offset: int) -> None:
        """Record that a newer copy represents a transaction. ``old_offset``: the offset of the replaced copy."""
        replaced = self._newest.get(transaction, old_offset)
        assert replaced is None or new_offset > replaced, "a copy has a greater offset than the copy it replaces"
        if replaced is not None:
            self._pass(transaction[0], replaced)
        self._newest[transaction] = new_offset
        self._given_up.pop(transaction, None)
        self._decisions.pop(transaction, None)

    def gave_up(self, transaction: Transaction, queue_offset: int) -> None:
        """Record that check-back has given up a transaction."""
        self._newest.pop(transaction, None)
        self._pass(transaction[0], queue_offset)
        _remember(self._given_up, transaction, None)

    def forget(self, transaction: Transaction) -> None:
        """Forget the newest copy of a transaction that is decided according to op messages."""
        self._newest.pop(transaction, None)
        self._doubtful.discard(transaction)

    def moved_to(self, queue_id: int, position: int) -> None:
        """Forget the passed offsets before a stored position of check-back."""
        marks = self._passed.get(queue_id)
        if marks is not None:
            marks.forget_before(position)

    # -- inside

    def _pass(self, queue_id: int, queue_offset: int) -> None:
        marks = self._passed.get(queue_id)
        if marks is None:
            marks = self._passed[queue_id] = _Marks(self.position(queue_id))
        marks.add(queue_offset)

    async def _read_queue(self, queue_id: int) -> None:
        """Find the newest copy of every open transaction in a half queue."""
        op_position = self._offsets.get(TRANSACTION_GROUP, names.OP_HALF_TOPIC, queue_id) or 0
        decided: set[int] = set()
        for op in self._records(names.OP_HALF_TOPIC, queue_id, op_position):
            if op is None:
                await asyncio.sleep(0)
            else:
                decided.update(op_offsets(op))
        copies: dict[Transaction, list[int]] = {}
        stored_again: set[Transaction] = set()
        for half in self._records(names.HALF_TOPIC, queue_id, self.position(queue_id)):
            if half is None:
                await asyncio.sleep(0)
                continue
            properties = decode_properties(half.properties)
            transaction = transaction_of(half, properties)
            copies.setdefault(transaction, []).append(half.queue_offset)
            if _is_copy(properties):
                stored_again.add(transaction)
        for transaction, found in copies.items():
            if transaction not in stored_again:
                # These half messages have the same key, but are not copies: the program sent two transactions.
                for queue_offset in decided.intersection(found):
                    self._pass(queue_id, queue_offset)
                if not decided.issuperset(found):
                    self._doubtful.add(transaction)
                continue
            is_decided = any(at in decided or self._ops.holds(queue_id, at) for at in found)
            for queue_offset in found if is_decided else found[:-1]:
                self._pass(queue_id, queue_offset)
            if is_decided:
                self._decided_before.add(transaction)
            else:
                self._newest[transaction] = found[-1]
                self._doubtful.add(transaction)

    async def _read_given_up(self) -> None:
        """Find the last transactions that were given up."""
        topic = names.TRANS_CHECK_MAX_TIME_TOPIC
        low, high = self._store.bounds(topic, 0)
        for record in self._records(topic, 0, max(low, high - _REMEMBERED_MAX)):
            if record is None:
                await asyncio.sleep(0)
                continue
            transaction = transaction_of(record, decode_properties(record.properties))
            if transaction not in self._newest and transaction not in self._decided_before:
                self._doubtful.add(transaction)
                _remember(self._given_up, transaction, None)
        self._decided_before.clear()

    def _records(self, topic: str, queue_id: int, begin: int) -> Iterator[Record | None]:
        """Yield the records of a queue from an offset to its current end. Yield None after each slice."""
        at, end = begin, self._store.max_offset(topic, queue_id)
        while at < end:
            found = self._store.get(topic, queue_id, at, count_max=_RECORDS_PER_READ)
            for raw in found.records:
                try:
                    yield decode_record(raw)
                except RecordCorrupt as error:  # check-back passes the record, too
                    _log.error("skipping a record of queue %d of %s: %s", queue_id, topic, error)
            if found.next_begin_offset <= at:
                return
            at = found.next_begin_offset
            yield None


class _Marks:
    """A set of offsets that are not before a position. It needs one byte for each of up to a hundred thousand
    offsets."""

    def __init__(self, position: int) -> None:
        self._begin = position
        self._marks = bytearray()

    def __contains__(self, offset: int) -> bool:
        return 0 <= offset - self._begin < len(self._marks) and self._marks[offset - self._begin] == 1

    def add(self, offset: int) -> None:
        at = offset - self._begin
        if at >= 0:
            self._marks.extend(bytes(max(0, at + 1 - len(self._marks))))
            self._marks[at] = 1

    def forget_before(self, position: int) -> None:
        if position > self._begin:
            del self._marks[: position - self._begin]
            self._begin = position


def _remember(table: dict[Transaction, V], transaction: Transaction, value: V) -> None:
    """Put an entry at the end of a table. Remove the oldest entry if the table is full."""
    table.pop(transaction, None)
    table[transaction] = value
    if len(table) > _REMEMBERED_MAX:
        del table[next(iter(table))]
