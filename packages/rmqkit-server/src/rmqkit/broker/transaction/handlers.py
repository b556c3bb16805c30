"""END_TRANSACTION, RESUME_CHECK_HALF_MESSAGE (``EndTransactionProcessor``): decisions about half messages.

A half message is found by its physical offset, and must have the group and the queue offset of the request. A commit
stores the message in its real topic and then records the decision. A rollback only records the decision. Each
transaction is decided once (`open`). A repeated decision is answered like the first decision and does nothing. A
different decision is refused. (The reference commits once per request.) The answer to a commit waits for disk and
slaves like the answer to a send.
Source: behaviour.md §9.1; store.md §19.3; remoting.md §4.3.5.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Awaitable

from rmqkit.broker.delay.timer import schedule_timed
from rmqkit.broker.durability import CODES, NOT_ENOUGH_REPLICAS, Durability, put_refusal
from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.messages import committed, message_from, number
from rmqkit.broker.settings import BrokerRole
from rmqkit.broker.transaction.half import half_at, immunity_ms, record_at
from rmqkit.broker.transaction.open import Transaction, TransactionContext, transaction_of
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, Record
from rmqkit.protocol.schemas.send import EndTransactionRequest, ResumeCheckRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED
from rmqkit.store.message_store import PutStatus

__all__ = ["TransactionHandlers"]

_UNKNOWN = 0
_NO_REMARK = "not set any response code"
"""The remark of an answer for which the reference sets no other remark."""

_RESUMABLE = (names.HALF_TOPIC, names.TRANS_CHECK_MAX_TIME_TOPIC)
_PAST = {TRANSACTION_COMMIT: "committed", TRANSACTION_ROLLBACK: "rolled back"}

_log = logging.getLogger(__name__)


class TransactionHandlers(Handlers[TransactionContext]):
    """The handlers that decide transactions, and that resume the check-back of a half message."""

    def __init__(self, context: TransactionContext) -> None:
        super().__init__(context)
        self._ops = context.ops
        self._open = context.transactions
        self._store_settings = context.store_settings

    @answers(RequestCode.END_TRANSACTION)
    def end(self, connection: Connection, command: Command) -> Command | Awaitable[Command] | None:
        """END_TRANSACTION: commit or roll back, or do nothing if the producer has not decided yet."""
        header = decode_header_leniently(command, EndTransactionRequest, drops_unreadable=False)
        if header.commit_or_rollback not in (TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, _UNKNOWN):
            return reply(command, ResponseCode.SYSTEM_ERROR, "commitOrRollback field wrong")
        if self._context.settings.broker_role is BrokerRole.SLAVE:
            return reply(command, ResponseCode.SLAVE_NOT_AVAILABLE, _NO_REMARK)
        if header.commit_or_rollback == _UNKNOWN:
            return None
        if not self._open.is_ready:
            return self._end_when_ready(command, header)
        return self._end(command, header)

    async def _end_when_ready(self, command: Command, header: EndTransactionRequest) -> Command:
        await self._open.prepare()
        answer = self._end(command, header)
        return answer if isinstance(answer, Command) else await answer

    def _end(self, command: Command, header: EndTransactionRequest) -> Command | Awaitable[Command]:
        """Carry out a commit or rollback."""
        # Check before the put: without an op message the producer is asked again, and the message is committed again.
        if self._ops.is_full or (self._context.durability is not None and self._context.durability.is_full):
            return reply(command, ResponseCode.SYSTEM_BUSY, OVERLOADED)
        # The client may send any offset: `_refusal` compares the record at the offset with the request.
        half = half_at(self._context.store, header.commit_log_offset)
        if half is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, "Find prepared transaction message failed")
        refusal = self._refusal(header, half)
        if refusal is not None:
            return reply(command, *refusal)
        transaction = transaction_of(half, decode_properties(half.properties))
        open_offset = self._open.open_offset(half, transaction)
        if open_offset is None:
            is_commit = header.commit_or_rollback == TRANSACTION_COMMIT
            was_committed = self._open.decision(transaction) == TRANSACTION_COMMIT
            if not (header.decided_by_ledger and is_commit and not was_committed):
                return self._decided_before(command, header, transaction)
            open_offset = half.queue_offset
        if header.commit_or_rollback == TRANSACTION_COMMIT:
            return self._commit(command, half, transaction, open_offset)
        self._decided(half, transaction, open_offset, TRANSACTION_ROLLBACK)
        return reply(command, remark=_NO_REMARK)

    @answers(RequestCode.RESUME_CHECK_HALF_MESSAGE, admins_only=True)
    async def resume(self, connection: Connection, command: Command) -> Command:
        """RESUME_CHECK_HALF_MESSAGE: put a copy of a half message into the half topic, and set its number of checks to
        0.

        The new copy replaces the newest copy of the transaction. Refuse a transaction that was committed or rolled
        back.
        """
        header = decode_header_leniently(command, ResumeCheckRequest, missing={"msgId": ""})
        failed = f"Exception was thrown when putting message back to {names.HALF_TOPIC}."
        try:
            physical_offset = decode_offset_id(header.msg_id)[2]
        except ValueError:
            return reply(command, ResponseCode.SYSTEM_ERROR, failed)
        await self._open.prepare()
        record = record_at(self._context.store, physical_offset)
        if record is None or record.topic not in _RESUMABLE:
            return reply(command, ResponseCode.SYSTEM_ERROR, failed)
        transaction = transaction_of(record, decode_properties(record.properties))
        self._open.was_committed(record, transaction)
        decision = self._open.decision(transaction)
        if decision is not None:
            return reply(command, ResponseCode.ILLEGAL_OPERATION, _ended(transaction, decision))
        changes = {property_names.TRANSACTION_CHECK_TIMES: "0"}
        put = self._context.store.put(
            message_from(record, topic=names.HALF_TOPIC, queue_id=transaction[0], changes=changes)
        )
        if put.status is not PutStatus.OK:
            return reply(command, *put_refusal(put, self._store_settings.message_bytes_max))
        replaced = record.queue_offset if record.topic == names.HALF_TOPIC else None
        self._open.stored_again(transaction, replaced, put.queue_offset)
        return reply(command)

    # -- inside

    def _refusal(self, header: EndTransactionRequest, half: Record) -> tuple[ResponseCode, str] | None:
        """Return the reason to refuse a decision, or None. The checks run in the reference's order."""
        properties = decode_properties(half.properties)
        own_immunity = properties.get(property_names.CHECK_IMMUNITY_SECONDS)
        if own_immunity is not None and not header.from_transaction_check:
            timeout_ms = self._context.settings.transaction_timeout_ms
            if self._context.clock.now_ms() - half.born_timestamp > max(
                timeout_ms, immunity_ms(own_immunity, timeout_ms)
            ):
                return ResponseCode.ILLEGAL_OPERATION, _NO_REMARK  # check-back asks the producer instead
        group = properties.get(property_names.PRODUCER_GROUP)
        if group is None or header.producer_group != group:
            return ResponseCode.SYSTEM_ERROR, "The producer group wrong"
        if header.tran_state_table_offset != half.queue_offset:
            return ResponseCode.SYSTEM_ERROR, "The transaction state table offset wrong"
        if header.commit_log_offset != half.physical_offset:
            return ResponseCode.SYSTEM_ERROR, "The commit log offset wrong"
        return None

    def _decided_before(self, command: Command, header: EndTransactionRequest, transaction: Transaction) -> Command:
        """Answer a decision about a decided transaction. The answer is a success only if both decisions are equal."""
        decision = self._open.decision(transaction)
        if decision == header.commit_or_rollback:
            return reply(command, remark=None if decision == TRANSACTION_COMMIT else _NO_REMARK)
        remark = _ended(transaction, decision)
        if header.commit_or_rollback == TRANSACTION_COMMIT:
            # Log this: producers send decisions one-way, so only the log shows that the message is not delivered.
            _log.warning("a commit of group %s has no effect: %s", header.producer_group, remark)
        return reply(command, ResponseCode.ILLEGAL_OPERATION, remark)

    def _commit(
        self, command: Command, half: Record, transaction: Transaction, open_offset: int
    ) -> Command | Awaitable[Command]:
        message = committed(half)
        if message is None:
            remark = f"half message at {half.physical_offset} does not name its topic and queue"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        level = number(message.parsed.get(property_names.DELAY))
        kept = (
            self._context.schedule.schedule(message, level)
            if level > 0
            else schedule_timed(self._context.timer, message)
        )
        if isinstance(kept, tuple):
            return reply(command, *kept)
        # Check before the put: after it, the message would be stored although the answer is a refusal.
        if self._context.durability is not None and self._context.durability.lacks_replicas:
            return reply(command, *NOT_ENOUGH_REPLICAS)
        put = self._context.store.put(kept)
        if put.status is not PutStatus.OK:
            return reply(command, *put_refusal(put, self._store_settings.message_bytes_max))
        self._context.recorder.moved(kept, put)
        self._decided(half, transaction, open_offset, TRANSACTION_COMMIT)
        if self._context.durability is None:
            return reply(command)
        # Request the flush even if nobody waits: Apache's clients send decisions one-way.
        if command.is_one_way or self._context.durability.has(put.end_offset):
            self._context.durability.wake()
            return reply(command)
        return self._answer_when_durable(self._context.durability, command, put.end_offset)

    def _decided(self, half: Record, transaction: Transaction, open_offset: int, decision: int) -> None:
        # The commit was put before this call. A crash in between makes the broker ask the producer again. An op message
        # without its commit would lose the message.
        assert half.topic == names.HALF_TOPIC, "a decided message is a half message"
        self._open.decided(half, transaction, open_offset, decision)
        self._context.recorder.decided(half, is_commit=decision == TRANSACTION_COMMIT)

    async def _answer_when_durable(self, durability: Durability, command: Command, end_offset: int) -> Command:
        outcome, reason = await durability.wait(end_offset)
        return reply(command, CODES[outcome], reason or None)


def _ended(transaction: Transaction, decision: int | None) -> str:
    """Return the reason why a transaction cannot be decided or resumed."""
    key = transaction[1] or "without a key"
    if decision is not None:
        return f"transaction {key} is {_PAST[decision]} already"
    resume = f"; if it was given up, run: rmq message resume {shlex.quote(key)}" if transaction[1] else ""
    return f"transaction {key} is not open: it is decided, or was given up before this broker started{resume}"
