"""Check-back: the broker asks producers about undecided half messages (``TransactionalMessageCheckService``).

A *round* is one call of `CheckBack.round`. It reads each half queue from the position at which the last round ended. It
applies these rules to a half message, in this order:

=====================================================  ================================================================
half message                                           action
=====================================================  ================================================================
is in an op message, or will be in the next one, or    passed
was stored again, resumed or given up
was stored after the round began                       the round ends
is younger than ``transactionTimeOut``, without        the round ends: later half messages are younger still
its own immunity
is not in the op messages read so far                  more op messages are read first
is a copy, and its original is in an op message        passed
is not the newest copy of its transaction              passed (`open`)
is younger than its own immunity                       stored again at the end of the half queue, with the offset of
                                                       its original. The counter does not change: no producer was asked
was asked about ``transactionCheckMax`` times, or its  copied to ``TRANS_CHECK_MAX_TIME_TOPIC`` for operators, and
age (after its own immunity) is greater than the       passed, which has the effect of a rollback
retention of the store
any other half message                                 stored again with an increased counter, and one live producer of
                                                       its group is asked
=====================================================  ================================================================

The reference counts a copy inside the immunity as a check. If the immunity is longer than ``transactionCheckMax``
rounds, the reference gives up without a question.

A round reads the queue once, from front to back. Open half messages are stored again, so they are always after the
position. Positions are stored as offsets of the group ``CID_RMQ_SYS_TRANS`` in both topics, when all records that were
put before are as durable as the store promises. A crash may repeat a part of a round: a producer is asked twice, and no
message is lost.

An acting master asks no producer. It sends half messages to another broker (``elsewhere``) instead of asking about
them, giving them up or storing them again. The other broker asks the producers then. If a send fails, the round ends.

A round runs in small steps, and the loop runs other tasks in between.
Use this module only on the event loop. Source: store.md §19.5; behaviour.md §2.6, §9.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from rmqkit.broker.delay.destination import RemotePut
from rmqkit.broker.messages import message_from, number, real_place, with_changes
from rmqkit.broker.transaction.half import (
    immunity_ms,
)
from rmqkit.broker.transaction.open import OpenTransactions, Transaction, TransactionContext, transaction_of
from rmqkit.errors import RecordCorrupt
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.names import TRANSACTION_GROUP
from rmqkit.protocol.op_messages import op_offsets
from rmqkit.protocol.properties import decode_properties, in_stored_order
from rmqkit.protocol.record import Record, decode_record, encode_record
from rmqkit.protocol.schemas.send import CheckTransactionRequest
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import GetStatus, InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["CheckBack"]

_ROUND_MS_MAX = 60_000
_OPS_PER_READ = 32
_PRODUCERS_TRIED_MAX = 4
_HOUR_MS = 3_600_000
_WORK_PER_TICK = 256
_PASSED = -1
_GROUPS_LOGGED_MAX = 10
_UNSTORABLE = (PutStatus.MESSAGE_ILLEGAL, PutStatus.PROPERTIES_SIZE_EXCEEDED)

_log = logging.getLogger(__name__)


class CheckBack:
    """The check-back of half messages. With ``elsewhere``, half messages are sent to other brokers instead.
    The caller calls `round` every ``transactionCheckInterval``."""

    def __init__(self, context: TransactionContext, elsewhere: RemotePut | None = None) -> None:
        self._elsewhere = elsewhere
        self._settings = context.settings
        self._store_settings = context.store_settings
        self._store = context.store
        self._topics = context.topics
        self._offsets = context.offsets
        self._clients = context.clients
        self._ops = context.ops
        self._clock = context.clock
        self._durability = context.durability
        # An acting master needs a new table: while it was a slave, its half queue changed without updates of the table.
        self._open = (
            context.transactions
            if elsewhere is None
            else OpenTransactions(context.store, context.topics, context.offsets, context.ops)
        )
        self._producer_turn = 0
        self._is_stopping = False

    def stop(self) -> None:
        """Stop a running round after its current message."""
        self._is_stopping = True

    async def round(self) -> None:
        """Check every half queue once."""
        await self._open.prepare()
        for queue_id in self._open.queue_ids:
            await self._walk(queue_id)

    # -- inside

    async def _walk(self, queue_id: int) -> None:
        half_offset = self._position(names.HALF_TOPIC, queue_id)
        ops = _OpReader(self._store, queue_id, self._position(names.OP_HALF_TOPIC, queue_id))
        end_offset, started_ms = self._store.max_offset(names.HALF_TOPIC, queue_id), self._clock.monotonic_ms()
        walk = _Walk(queue_id, half_offset, ops, end_offset, started_ms)
        ops.read(half_offset)
        ends_at_ms = started_ms + _ROUND_MS_MAX
        while not self._is_stopping and self._clock.monotonic_ms() < ends_at_ms and self._step(walk):
            if walk.moving is not None and not await self._move(walk, walk.moving):
                break
            if walk.work >= _WORK_PER_TICK:
                walk.work = 0
                await self._save(walk)
                await asyncio.sleep(0)
        for group, count in walk.given_up.items():
            _log.warning(
                "gave up %d undecided half messages of producer group %s: see rmq waiting transactions",
                *(count, group or "(others)"),
            )
        await self._save(walk)

    def _position(self, topic: str, queue_id: int) -> int:
        known = self._offsets.get(TRANSACTION_GROUP, topic, queue_id)
        return self._store.min_offset(topic, queue_id) if known is None else known

    def needed_from(self) -> int | None:
        """Return the physical offset of the oldest undecided half message, or None."""
        topic = names.HALF_TOPIC
        config = self._topics.get(topic)
        found = [
            entry[1]
            for queue_id in range(0 if config is None else config.write_queue_nums)
            for entry in self._store.entries(topic, queue_id, self._position(topic, queue_id), count_max=1)
        ]
        return min(found, default=None)

    async def _save(self, walk: _Walk) -> None:
        """Store the positions when all earlier copies are durable: a crash must not lose the copy of a passed
        message."""
        half_offset, op_offset = walk.half_offset, walk.ops.position
        if not await self._settled():
            return
        for topic, offset in ((names.HALF_TOPIC, half_offset), (names.OP_HALF_TOPIC, op_offset)):
            if self._offsets.get(TRANSACTION_GROUP, topic, walk.queue_id) != offset:
                self._offsets.commit(TRANSACTION_GROUP, topic, walk.queue_id, offset)
        self._open.moved_to(walk.queue_id, half_offset)

    async def _settled(self) -> bool:
        end = self._store.max_physical_offset
        if self._elsewhere is not None or self._durability is None or self._durability.is_on_disk(end):
            return True
        await self._durability.wait(end)
        return self._durability.is_on_disk(end)

    def _step(self, walk: _Walk) -> bool:
        """Check one half message. Return False if the round ends at this message."""
        walk.work += 1
        at = walk.half_offset
        if walk.ops.take(at) or self._ops.holds(walk.queue_id, at):
            walk.half_offset += 1
            return True
        if self._open.is_passed(walk.queue_id, at):
            # The op message is not read yet. Read on, so that the op position keeps up with the half position.
            walk.work += walk.ops.read(at) and _OPS_PER_READ
            walk.ops.take(at)
            walk.half_offset += 1
            return True
        found = self._store.get(names.HALF_TOPIC, walk.queue_id, at, count_max=1)
        if found.status is not GetStatus.FOUND:
            walk.half_offset = found.next_begin_offset
            return walk.half_offset != at
        raw = found.records[0]
        walk.work += len(raw) >> 10
        try:
            half = decode_record(raw, verify_crc=self._store.checks_bodies)
        except RecordCorrupt as error:
            _log.error("skipping half message %d of queue %d, which cannot be read: %s", at, walk.queue_id, error)
            walk.half_offset += 1
            return True
        if half.queue_offset > at:  # the half messages in between were deleted
            walk.half_offset = half.queue_offset
            return True
        return self._judge(walk, half)

    def _judge(self, walk: _Walk, half: Record) -> bool:
        """Handle a half message that is not in the op messages read so far. The table at the top of the module has the
        rules."""
        properties = decode_properties(half.properties)
        timeout_ms = self._settings.transaction_timeout_ms
        age_ms = self._clock.now_ms() - half.born_timestamp
        own_immunity = properties.get(property_names.CHECK_IMMUNITY_SECONDS)
        if half.queue_offset >= walk.end_offset or (own_immunity is None and 0 <= age_ms <= timeout_ms):
            return False
        # Read more op messages first: the producer must not be asked about a decided message. Limit the time, because
        # op messages may be written as fast as they are read.
        if self._clock.monotonic_ms() - walk.started_ms <= timeout_ms and walk.ops.read(walk.half_offset):
            walk.work += _WORK_PER_TICK
            return True
        transaction = transaction_of(half, properties)
        # For a copy inside the immunity, Apache's broker records the decision with the offset of the original.
        original = number(properties.get(property_names.TRANSACTION_PREPARED_QUEUE_OFFSET))
        if walk.ops.take(original) or self._ops.holds(walk.queue_id, original):
            self._open.forget(transaction)
            walk.half_offset += 1
            return True
        newest = self._open.newest(transaction)
        if (newest is not None and newest > walk.half_offset) or self._open.was_committed(half, transaction):
            walk.half_offset += 1
            return True
        if self._elsewhere is not None:
            walk.moving = half
            return True
        own_immunity_ms = 0 if own_immunity is None else immunity_ms(own_immunity, timeout_ms)
        # Compare the absolute age: the immunity must not grow if the clock of broker or producer was set back.
        if own_immunity is not None and abs(age_ms) <= own_immunity_ms:
            first = original if original >= 0 else walk.half_offset
            changes = {
                property_names.TRANSACTION_PREPARED_QUEUE_OFFSET: str(first),
                property_names.WAIT: "false",
            }
            return self._put_again(walk, half, transaction, changes, asks=False)
        checks = max(0, number(properties.get(property_names.TRANSACTION_CHECK_TIMES)))
        kept_ms = self._store_settings.file_reserved_hours * _HOUR_MS + own_immunity_ms
        if checks >= self._settings.transaction_checks_max or age_ms > kept_ms:
            return self._give_up(walk, half, transaction)
        changes = {property_names.TRANSACTION_CHECK_TIMES: str(checks + 1)}
        return self._put_again(walk, half, transaction, changes, asks=True)

    async def _move(self, walk: _Walk, half: Record) -> bool:
        """Send a half message to another broker. Return False if this has to be retried."""
        assert self._elsewhere is not None, "only an acting master moves half messages"
        walk.moving = None
        is_moved = await self._elsewhere(message_from(half, topic=names.HALF_TOPIC, queue_id=walk.queue_id))
        walk.half_offset += is_moved
        return is_moved

    def _give_up(self, walk: _Walk, half: Record, transaction: Transaction) -> bool:
        """Copy a half message to the topic for messages that were never decided."""
        # Copy the message before the half offset moves: a crash in between copies it twice, but never loses it.
        self._topics.ensure(names.TRANS_CHECK_MAX_TIME_TOPIC, 1)
        put = self._store.put(message_from(half, topic=names.TRANS_CHECK_MAX_TIME_TOPIC, queue_id=0))
        if put.status is not PutStatus.OK:
            _log.warning("cannot give up half message %d: %s %s", walk.half_offset, put.status.value, put.reason)
            return False
        group = decode_properties(half.properties).get(property_names.PRODUCER_GROUP, "")
        is_named = group in walk.given_up or len(walk.given_up) < _GROUPS_LOGGED_MAX
        walk.given_up[group if is_named else ""] += 1
        self._open.gave_up(transaction, walk.half_offset)
        walk.half_offset += 1
        return True

    def _put_again(
        self, walk: _Walk, half: Record, transaction: Transaction, changes: dict[str, str], *, asks: bool
    ) -> bool:
        """Put a half message at the end of its queue, so that the position can move past it."""
        again = message_from(half, topic=names.HALF_TOPIC, queue_id=walk.queue_id, changes=changes, reconsume_times=0)
        again.string = in_stored_order(again.properties)
        put = self._store.put(again)
        if put.status in _UNSTORABLE:  # the higher counter makes the message too long
            return self._give_up(walk, half, transaction)
        if put.status is not PutStatus.OK:
            _log.warning("cannot store half message %d again: %s %s", walk.half_offset, put.status.value, put.reason)
            return False
        self._open.stored_again(transaction, walk.half_offset, put.queue_offset)
        walk.half_offset += 1
        if asks:
            self._ask(half, again, put)
        return True

    def _ask(self, half: Record, again: InnerMessage, put: PutResult) -> None:
        """Send CHECK_TRANSACTION_STATE for a half message that was put again. Source: remoting.md §4.3.5."""
        properties = again.parsed
        group = properties.get(property_names.PRODUCER_GROUP, "")
        place = real_place(properties)
        producer = None if place is None else self._pick_producer(group, place[0])
        if producer is None or place is None:
            _log.warning("half message %d of group %r: no producer can be asked", half.queue_offset, group)
            return
        unique_key = properties.get(property_names.UNIQ_KEY)
        header = CheckTransactionRequest(
            topic=names.HALF_TOPIC,
            # Send both offsets of the copy: the producer sends them back with its decision. The old message is passed,
            # and a decision with its offset would have no effect.
            tran_state_table_offset=put.queue_offset,
            commit_log_offset=put.physical_offset,
            msg_id=unique_key,
            transaction_id=unique_key,
            offset_msg_id=offset_id(again.store_host, put.physical_offset),
            bname=self._settings.broker_name,
        )
        body = encode_record(
            # Send the real topic and queue: the producer does not know the half topic.
            topic=place[0].encode(),
            queue_id=place[1],
            flag=half.flag,
            queue_offset=put.queue_offset,
            physical_offset=put.physical_offset,
            sys_flag=half.sys_flag,
            born_timestamp=half.born_timestamp,
            born_host=half.born_host,
            store_timestamp=half.store_timestamp,
            store_host=half.store_host,
            reconsume_times=half.reconsume_times,
            prepared_transaction_offset=0,
            body=half.body,
            properties=with_changes(again.properties, {property_names.WAIT: "false"}),
        )
        # Send it one-way: the producer answers with a separate END_TRANSACTION, perhaps much later.
        producer.send(request(RequestCode.CHECK_TRANSACTION_STATE, header, body, one_way=True))

    def _pick_producer(self, group: str, topic: str) -> Connection | None:
        """Return the next producer of a group that has the right to see the topic's messages and has a writable
        connection. Return None after a few tries: the next round asks again. (The reference also sends to a stalled
        producer, which costs memory.)"""
        members = self._clients.producers(group).items()
        producers = [producer for producer, member in members if self._clients.may_be_asked(producer, member, topic)]
        self._producer_turn += 1
        for step in range(min(_PRODUCERS_TRIED_MAX, len(producers))):
            producer = producers[(self._producer_turn + step) % len(producers)]
            if producer.is_writable:
                return producer
        return None


@dataclass(slots=True)
class _Walk:
    """One round in one half queue.
    ``half_offset``: the offset of the current half message. All earlier half messages are passed.
    ``end_offset``: the end of the half queue at the start. Copies that the round stores are for the next round.
    ``started_ms``: the monotonic time of the start.
    ``work``: the work since the loop last ran, in units of about ten microseconds.
    ``moving``: the current half message, if it has to be sent to another broker.
    ``given_up``: the number of half messages that were given up, by producer group."""

    queue_id: int
    half_offset: int
    ops: _OpReader
    end_offset: int
    started_ms: float
    work: int = 0
    moving: Record | None = None
    given_up: Counter[str] = field(default_factory=Counter)


class _OpReader:
    """The op messages of one queue. They are read when they are needed."""

    def __init__(self, store: MessageStore, queue_id: int, op_offset: int) -> None:
        self._store = store
        self._queue_id = queue_id
        self._next = op_offset
        self._op_of: dict[int, int] = {}
        self._open: dict[int, int] = {}

    @property
    def position(self) -> int:
        """The offset of the first op message that has a half message which is not passed yet."""
        # The dict is in the order of reading, so its first op message is the oldest.
        return next(iter(self._open), self._next)

    def take(self, half_offset: int) -> bool:
        """Return True if a half message is in an op message. Remove its entry: the caller passes the half message."""
        op_offset = self._op_of.pop(half_offset, None)
        if op_offset in self._open:
            self._open[op_offset] -= 1
            if not self._open[op_offset]:
                del self._open[op_offset]
        return op_offset is not None

    def read(self, half_offset: int) -> bool:
        """Read some more op messages. Return False if there are none. ``half_offset``: earlier half messages are
        passed."""
        found = self._store.get(names.OP_HALF_TOPIC, self._queue_id, self._next, count_max=_OPS_PER_READ)
        before, self._next = self._next, found.next_begin_offset
        for raw in found.records:
            try:
                op = decode_record(raw, verify_crc=self._store.checks_bodies)
            except RecordCorrupt as error:
                _log.error("skipping an op message of queue %d, which cannot be read: %s", self._queue_id, error)
                continue
            self._enter(op, half_offset)
        return self._next != before

    def _enter(self, op: Record, half_offset: int) -> None:
        ahead = 0
        for offset in op_offsets(op):
            # A repeated decision stores the offset in two op messages. Count it for one of them: `take` removes it from
            # one op message, and the other op message would hold the position for ever.
            if offset not in self._op_of:
                # Store passed offsets, too: a later half message may be a copy of a passed one.
                is_ahead = offset >= half_offset
                self._op_of[offset] = op.queue_offset if is_ahead else _PASSED
                ahead += is_ahead
        if ahead:
            self._open[op.queue_offset] = ahead
