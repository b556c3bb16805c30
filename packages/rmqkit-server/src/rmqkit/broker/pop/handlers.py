"""The handlers of POP requests (``PopMessageProcessor``, ``AckMessageProcessor``, ``ChangeInvisibleTimeProcessor``).

===============================  =====================================================================================
request                          work of the handler
===============================  =====================================================================================
POP_MESSAGE                      pops messages of one queue or all queues of a topic, and of the group's retry topics
                                 (`rmqkit.broker.pop.read`); answers when their check points are in the log (SYNC_FLUSH:
                                 on the disk), or waits for a message
PEEK_MESSAGE                     reads the same messages and changes nothing
NOTIFICATION, POLLING_INFO       return whether there is a message to pop, and how many pops wait for a queue
ACK_MESSAGE, BATCH_ACK_MESSAGE   store which messages are consumed: all acks of one loop tick with one write, the acks
                                 of one pop as one record
CHANGE_MESSAGE_INVISIBLETIME     stores a new check point, then an ack of the old one. With ``suspend`` (5.5) the
                                 redelivery of the message, or of the whole ordered pop, does not count as a retry
===============================  =====================================================================================

A handle identifies a popped message. An answer waits until its records are in the log (SYNC_FLUSH: on the disk,
SYNC_MASTER: at the slaves). An ack of a message that is not pending any more stores no record. Its answer still waits
until the earlier records of the log are durable. Messages that were popped in order have no check point: their acks
move the group's offset. Records in an answer are slices of the log. Only records of retry topics are rewritten, with
their original topic and their handle (POP_CK).
Source: behaviour.md §4.6, §4.8, §4.10, §4.11, §4.14; remoting.md §4.6.1.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from rmqkit.broker.durability import CODES, NOT_ENOUGH_REPLICAS, Outcome, Refusal
from rmqkit.broker.handlers import Handlers, answers, needs_parser, when_prepared
from rmqkit.broker.lite.handlers import ack_lite, change_lite, notify_lite
from rmqkit.broker.older import Fetched, Missing, read_when_fetched
from rmqkit.broker.pop.check_points import Waiting
from rmqkit.broker.pop.in_flight import AckKey
from rmqkit.broker.pop.read import ORDER_REVIVE_QUEUE, PopRead
from rmqkit.broker.pop.service import PopContext, PopLongPolling, PopService, WaitingPop
from rmqkit.broker.tables.filters import EVERYTHING, PullFilter, inline_filter
from rmqkit.errors import PeerRefused, StoreError
from rmqkit.filter import SQL92
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.core import AckedOffsets
from rmqkit.protocol.ids import NORMAL_TOPIC, RETRY_TOPIC_V2, PopHandle, decode_acked, decode_pop_handle
from rmqkit.protocol.names import pop_retry_topic
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageRequest,
    PopMessageResponse,
)
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.protocol.templates import found_frame
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import OVERLOADED, Router, decode_body, failure
from rmqkit.store.message_store import DispatchRequest, PutResult, PutStatus

__all__ = ["PopAckHandlers", "PopHandlers"]

_log = logging.getLogger(__name__)

_COUNT_MAX = 32
_READ = int(Permission.READ)  # an operation with the enum member costs two calls, and reading it one call
_OK = PutStatus.OK
_LATE_MS = 500
# Up to this size a copy costs less than a write of several pieces.
_COPIED_BYTES_MAX = 256 << 10
NO_REMARK = "not set any response code"
"""The remark of an answer for which the reference sets no other remark."""
_NOTHING = "NO_MESSAGE_IN_QUEUE"
_NOT_PARSED: Refusal = ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed"

_POPPING, _PEEKING = "pop message", "peeking message"
"""The names of forbidden operations in the reference's remarks."""


class PopHandlerBase(Handlers[PopContext]):
    """The base of the handlers of POP."""

    def __init__(self, context: PopContext) -> None:
        super().__init__(context)
        assert context.pop is not None, "a master pops"
        self._pop: PopService = context.pop
        self._context = context
        self._is_plain = context.durability is None and context.counts is None
        """True if answers never wait and are not measured."""

    @property
    def _busy(self) -> Refusal | None:
        """The reason to refuse a request that puts messages now, or None. The reasons are too few slaves, or too many
        answers that wait."""
        durability = self._context.durability
        if durability is None or not (durability.is_full or durability.lacks_replicas):
            return None
        return NOT_ENOUGH_REPLICAS if durability.lacks_replicas else (ResponseCode.SYSTEM_BUSY, OVERLOADED)

    def _is_safe(self, end_offset: int) -> bool:
        """Return True if the log is durable (flushed and replicated as configured) up to an offset, so that no answer
        has to wait. Also return True for offset 0, which means that no record was put."""
        return not end_offset or self._context.durability is None or self._context.durability.has(end_offset)

    def _when_safe(self, end_offset: int, answer: Callable[[Refusal | None], None], *, answers: int = 1) -> None:
        """Call ``answer`` as soon as the log is durable up to an offset, or with a refusal if this takes too long.
        After a refusal, popped messages are redelivered when their time is over, and a client has to repeat its ack."""
        durability = self._context.durability
        if durability is None or self._is_safe(end_offset):
            return answer(None)

        def release(outcome: Outcome, reason: str) -> None:
            answer(None if outcome is Outcome.DURABLE else (CODES[outcome], reason))

        return durability.hold(end_offset, release, answers=answers)


class PopHandlers(PopHandlerBase):
    """The handlers of pops. Popped messages are hidden from the group until they are acknowledged or their invisible
    time is over."""

    @answers(RequestCode.POP_MESSAGE)
    def pop(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Return messages, or None if the request waits for messages or until its check points are stored."""
        header = decode_header_leniently(command, PopMessageRequest, drops_unreadable=False)
        if header.exp_type == SQL92 and needs_parser():
            return when_prepared(connection, lambda: self.pop(connection, command))
        refusal = self._refusal(connection, header, _POPPING) or self._busy
        if refusal is None and header.max_msg_nums > _COUNT_MAX:
            remark = f"the broker[{self._context.identity.ip}] pop message's num is greater than {_COUNT_MAX}"
            refusal = ResponseCode.INVALID_PARAMETER, remark
        if refusal is not None:
            return reply(command, *refusal, header=PopMessageResponse())
        try:
            wanted = inline_filter(header.exp or "*", header.exp_type)
        except ValueError:
            return reply(command, *_NOT_PARSED, header=PopMessageResponse())
        self._context.clients.compensate(header.consumer_group, header.topic, header.exp, header.exp_type)
        answer = self._pop_once(connection, command, header, wanted, may_hold=True)
        if isinstance(answer, Missing):
            return self._pop_fetched(connection, command, header, wanted, answer)
        return answer

    @answers(RequestCode.PEEK_MESSAGE)
    def peek(self, connection: Connection, command: Command) -> Command:
        """Return the messages that a pop would return, without popping them."""
        header = decode_header_leniently(command, PeekMessageRequest, drops_unreadable=False)
        refusal = self._place_refusal(connection, header, _PEEKING)
        if refusal is not None:
            return reply(command, *refusal, header=PopMessageResponse())
        read = PopRead(self._context, header, count=min(header.max_msg_nums, _COUNT_MAX))
        read.peek()
        code = ResponseCode.SUCCESS if read.records else ResponseCode.PULL_NOT_FOUND
        answer = PopMessageResponse(rest_num=read.rest)
        return reply(command, code, "FOUND" if read.records else _NOTHING, header=answer, body=read.records)

    @answers(RequestCode.NOTIFICATION)
    def notification(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Answer as soon as there is a message to pop, or when the time is over."""
        header = decode_header_leniently(command, NotificationRequest, drops_unreadable=False)
        is_filtered = bool(header.exp_type and header.exp) and self._context.settings.filters_notifications
        if is_filtered and header.exp_type == SQL92 and needs_parser():
            return when_prepared(connection, lambda: self.notification(connection, command))
        refusal = self._refusal(connection, header, _PEEKING)
        if refusal is not None:
            return reply(command, *refusal, header=NotificationResponse())
        if header.is_lite_consumer and self._context.lite is not None:
            return notify_lite(self._context, connection, command, header)
        try:
            wanted = inline_filter(header.exp, header.exp_type) if is_filtered else EVERYTHING
        except ValueError:
            return reply(command, *_NOT_PARSED, header=NotificationResponse())
        return self._notify(connection, command, header, wanted, may_hold=True)

    @answers(RequestCode.POLLING_INFO)
    def polling_info(self, connection: Connection, command: Command) -> Command:
        """Return how many pops wait for a queue."""
        header = decode_header_leniently(command, PollingInfoRequest, drops_unreadable=False)
        refusal = self._place_refusal(connection, header, _PEEKING)
        if refusal is not None:
            return reply(command, *refusal, header=PollingInfoResponse())
        count = self._pop.waiting.count(header.topic, header.consumer_group, header.queue_id)
        return reply(command, remark=NO_REMARK, header=PollingInfoResponse(count))

    # -- inside

    def _refusal(
        self, connection: Connection, header: PopMessageRequest | NotificationRequest, what: str
    ) -> Refusal | None:
        """Return the reason to refuse a request, or None. The checks run in the reference's order."""
        now_ms = self._context.clock.now_ms()  # the wall clock, not the clock of pops: the client sent its wall time
        # Use the current time for a request without a time: with 0 it would be refused as too late.
        header.born_time = header.born_time or now_ms
        if now_ms - header.born_time - header.poll_time > _LATE_MS:
            return ResponseCode.POLLING_TIMEOUT, f"the broker[{self._context.identity.ip}] {what} is timeout too much"
        return self._place_refusal(connection, header, what)

    def _place_refusal(self, connection: Connection, header: PollingInfoRequest, what: str) -> Refusal | None:
        """Return the reason why topic or group do not allow a request, or None. Both can change while the request
        waits."""
        return self._topic_refusal(connection, header, what) or self._group_refusal(header.consumer_group)

    def _topic_refusal(self, connection: Connection, header: PollingInfoRequest, what: str) -> Refusal | None:
        if not self._context.settings.broker_permission & _READ:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._context.identity.ip}] {what} is forbidden"
        topic = self._context.topics.get(header.topic)
        if topic is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please! {FAQ}"
        if not topic.perm & _READ:
            return ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] {_PEEKING} is forbidden"
        if header.queue_id >= topic.read_queue_nums:
            remark = (
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{connection.peer}]"
            )
            return ResponseCode.INVALID_PARAMETER, remark
        return None

    def _group_refusal(self, name: str) -> Refusal | None:
        group = self._context.groups.get(name)
        if group is None:
            return ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] does not exist, {FAQ}"
        if not group.consume_enable:
            return ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}"
        return None

    def _pop_fetched(
        self,
        connection: Connection,
        command: Command,
        header: PopMessageRequest,
        wanted: PullFilter,
        missing: Missing,
    ) -> Awaitable[Command | None]:
        """Fetch messages from another place, then pop them.
        The awaitable raises PeerRefused, StoreError, OSError: the messages cannot be fetched."""

        def read(fetched: Fetched) -> Command | Missing | None:
            # Topic, group and log may have changed meanwhile.
            refusal = self._place_refusal(connection, header, _POPPING) or self._busy
            if refusal is not None:
                return reply(command, *refusal, header=PopMessageResponse())
            return self._pop_once(connection, command, header, wanted, may_hold=True, fetched=fetched)

        assert self._context.older is not None, "missing messages can be fetched from another place"
        nothing = reply(command, ResponseCode.POLLING_TIMEOUT, _NOTHING, header=PopMessageResponse())
        return read_when_fetched(self._context.older, connection, missing, read, otherwise=nothing)

    async def _send_late(self, connection: Connection, command: Command, answering: Awaitable[Command | None]) -> None:
        """Send the answer to a request that waited."""
        try:
            answer = await answering
        except (PeerRefused, StoreError, OSError) as error:
            answer = failure(connection, command, error)
        if answer is not None:
            connection.send(answer)

    def _pop_once(
        self,
        connection: Connection,
        command: Command,
        header: PopMessageRequest,
        wanted: PullFilter,
        *,
        may_hold: bool,
        fetched: Fetched | None = None,
    ) -> Command | Missing | None:
        """Pop once. Return the answer, None if the request is held, or the messages to fetch first."""
        read = PopRead(self._context, header, count=header.max_msg_nums, wanted=wanted, fetched=fetched)
        missing = read.pop(header)
        if missing is not None:
            return missing
        if not read.records:
            if fetched is None:
                return self._wait(connection, command, header, wanted, read, may_hold=may_hold)
            # Another pop took the fetched messages, or none of them passes the filter: continue with the next messages.
            return self._pop_once(connection, command, header, wanted, may_hold=may_hold)
        if read.rest:
            self._pop.waiting.wake(header.topic, header.consumer_group, header.queue_id)
        if not read.check_points:
            return reply(command, remark="FOUND", header=read.answer(header), body=read.records)
        answer = partial(self._answer_popped, connection, command, header, read)
        self._pop.batch.pop(connection, read.check_points, answer)
        return None

    def _wait(
        self,
        connection: Connection,
        command: Command,
        header: PopMessageRequest,
        wanted: PullFilter,
        read: PopRead,
        *,
        may_hold: bool,
    ) -> Command | None:
        """Hold a pop that found nothing, or return its answer."""
        # A client pops again immediately after POLLING_TIMEOUT, but waits for a second after POLLING_FULL.
        if not may_hold or header.poll_time <= 0:
            return reply(command, ResponseCode.POLLING_TIMEOUT, _NOTHING, header=read.answer(header))

        def retry(may_hold: bool) -> None:
            refusal = self._place_refusal(connection, header, _POPPING)
            if refusal is not None:
                return connection.send(reply(command, *refusal, header=PopMessageResponse()))
            try:
                answer = self._pop_once(connection, command, header, wanted, may_hold=may_hold)
            except PeerRefused as error:
                answer = failure(connection, command, error)
            if isinstance(answer, Missing):
                popping = self._pop_fetched(connection, command, header, wanted, answer)
                self._pop.fetching.start(self._send_late(connection, command, popping), "pop")
            elif answer is not None:
                connection.send(answer)
            return None

        if self._hold(self._pop.waiting, connection, header, retry, wanted, read.blocked_until):
            return None
        return reply(command, ResponseCode.POLLING_FULL, _NOTHING, header=read.answer(header))

    def _answer_popped(
        self, connection: Connection, command: Command, header: PopMessageRequest, read: PopRead, put: PutResult
    ) -> None:
        """Answer a pop after its check points were stored or refused."""
        if command.is_one_way:
            return None
        if put.status is not _OK:
            refusal = ResponseCode.SYSTEM_ERROR, put.reason or put.status.value
            connection.send(reply(command, *refusal, header=PopMessageResponse()))
            return None
        answer, records = read.answer(header), read.records
        if self._is_plain and sum(map(len, records)) <= _COPIED_BYTES_MAX:
            return connection.send_frame(found_frame(command.opaque, answer, records))
        found = reply(command, remark="FOUND", header=answer, body=records)
        return self._when_safe(
            put.end_offset, lambda late: connection.send(found if late is None else reply(command, *late))
        )

    def _notify(
        self,
        connection: Connection,
        command: Command,
        header: NotificationRequest,
        wanted: PullFilter,
        *,
        may_hold: bool,
    ) -> Command | None:
        read = PopRead(self._context, header, count=1, wanted=wanted)
        has_message = read.has_message(bool(header.order), header.attempt_id)
        if has_message or not may_hold or header.poll_time <= 0:
            return reply(command, remark=NO_REMARK, header=NotificationResponse(has_message))

        def retry(may_hold: bool) -> None:
            refusal = self._place_refusal(connection, header, _PEEKING)
            if refusal is not None:
                answer: Command | None = reply(command, *refusal, header=NotificationResponse())
            else:
                answer = self._notify(connection, command, header, wanted, may_hold=may_hold)
            if answer is not None:
                connection.send(answer)

        if self._hold(self._pop.notifications, connection, header, retry, wanted, read.blocked_until):
            return None
        return reply(command, remark=NO_REMARK, header=NotificationResponse(has_msg=False, polling_full=True))

    def _hold(
        self,
        polling: PopLongPolling,
        connection: Connection,
        header: PopMessageRequest | NotificationRequest,
        retry: Callable[[bool], None],
        wanted: PullFilter,
        look_at_ms: int | None,
    ) -> bool:
        def wants(arrival: DispatchRequest) -> bool:
            is_tagged = wanted.codes is None or arrival.tags_code in wanted.codes
            return is_tagged and (wanted.wants is None or wanted.wants(arrival))

        # The request's times are by the client's clock, so use the remaining time instead of the end time.
        left_ms = min(header.poll_time, header.born_time + header.poll_time - self._context.clock.now_ms())
        until_ms = self._pop.clock.now_ms() + left_ms
        return polling.hold(
            WaitingPop(
                connection, header.topic, header.consumer_group, header.queue_id, until_ms, retry, wants, look_at_ms
            )
        )


class PopAckHandlers(PopHandlerBase):
    """The handlers of acks and of new invisible times."""

    def __init__(self, context: PopContext) -> None:
        super().__init__(context)
        self._latest: tuple[str, PopHandle | None] = "", None

    def register(self, router: Router) -> None:
        """Register the handlers. Acks that arrive with one read are handled together."""
        super().register(router)
        router.take_acks = self._take_all

    @answers(RequestCode.ACK_MESSAGE)
    def ack(self, connection: Connection, command: Command) -> Command | None:
        """Store that a message is consumed."""
        header = decode_header_leniently(command, AckMessageRequest, drops_unreadable=False)
        if header.lite_topic:
            return reply(command, *ack_lite(self._context, header))
        refusal = self._refusal(connection, header)
        if refusal is not None:
            return reply(command, *refusal)
        handle = self._handle_of(header.extra_info)
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        # Also accept the offset after the last message, like the reference. No message in flight has this offset.
        low, high = self._context.store.bounds(topic, queue_id)
        if not low <= header.offset <= high and not self._context.store.is_older(topic, queue_id, header.offset):
            remark = f"offset is illegal, key:{topic}@{queue_id}, commit:{header.offset}, store:{low}~{high}"
            return reply(command, ResponseCode.NO_MESSAGE, remark)
        if handle.revive_queue_id == ORDER_REVIVE_QUEUE:
            return reply(command, *self._ack_in_order(topic, group, queue_id, header.offset, handle.pop_time))
        key = topic, group, queue_id, handle.check_point_offset, handle.pop_time
        self._pop.batch.ack(key, header.offset, connection, command, self._answer_acks)
        return None

    @answers(RequestCode.BATCH_ACK_MESSAGE)
    def ack_several(self, connection: Connection, command: Command) -> Command | None:
        """Store that messages of several pops are consumed. Messages that are not in flight are ignored."""
        acks = decode_body(command, BatchAckBody).acks if command.payload else []
        if not acks:
            return reply(command, ResponseCode.NO_MESSAGE)
        if (busy := self._busy) is not None:
            return reply(command, *busy)
        pending: dict[AckKey, list[int]] = {}
        for ack in acks:
            self._take_batch(ack, pending)
        self._answer_stored(self._pop.check_points.ack(pending), [(connection, command)])
        return None

    @answers(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
    def change(self, connection: Connection, command: Command) -> Command | None:
        """Change the time at which a message is redelivered. The answer has the parts of the new handle."""
        header = decode_header_leniently(command, ChangeInvisibleTimeRequest, drops_unreadable=False)
        if header.lite_topic:
            answer, changed = change_lite(self._context, header)
            return reply(command, *answer, header=changed)
        nothing = ChangeInvisibleTimeResponse()
        refusal = self._refusal(connection, header)
        if refusal is not None:
            return reply(command, *refusal, header=nothing)
        topic, queue_id = header.topic, header.queue_id
        low, high = self._context.store.bounds(topic, queue_id)
        if not low <= header.offset < high and not self._context.store.is_older(topic, queue_id, header.offset):
            return reply(command, ResponseCode.NO_MESSAGE, NO_REMARK, header=nothing)
        handle = decode_pop_handle(header.extra_info)
        if handle.revive_queue_id == ORDER_REVIVE_QUEUE:
            return self._change_in_order(command, header, handle)
        return self._change(connection, command, header, handle)

    # -- inside

    def _take_all(self, connection: Connection, pops: list[AckedOffsets]) -> bool:
        """Do the same as `ack` for requests that arrived together. Return False and do nothing if any of them has to
        be handled alone."""
        if not self._is_plain:
            return False
        try:
            # Check all requests first: after False each request is handled alone, and a request must not be answered
            # twice.
            for topic, _, queue_id, _, _, revive_queue_id, offsets, _ in pops:
                config = self._context.topics.get(topic)
                if config is None or queue_id >= config.read_queue_nums or revive_queue_id == ORDER_REVIVE_QUEUE:
                    return False
                low, high = self._context.store.bounds(topic, queue_id)
                if min(offsets) < low or max(offsets) > high:
                    return False
        except Exception:  # noqa: BLE001 - the outer edge of these requests: none is answered, each is tried alone
            _log.exception("cannot take acks of %s together", connection.peer)
            return False
        batch = self._pop.batch
        for topic, group, queue_id, start_offset, pop_time, _, offsets, opaques in pops:
            key = topic, group, queue_id, start_offset, pop_time
            batch.ack_all(key, offsets, connection, opaques, self._answer_acks)
        return True

    def _refusal(self, connection: Connection, header: AckMessageRequest) -> Refusal | None:
        topic = self._context.topics.get(header.topic)
        if topic is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please! {FAQ}"
        if not 0 <= header.queue_id < topic.read_queue_nums:
            remark = (
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[/{connection.peer}]"
            )
            return ResponseCode.MESSAGE_ILLEGAL, remark
        return self._busy

    def _ack_in_order(self, topic: str, group: str, queue_id: int, offset: int, pop_time: int) -> Refusal:
        committed = self._context.offsets.get(group, topic, queue_id) or 0
        if offset < committed:
            return ResponseCode.SUCCESS, ""
        orders = self._pop.orders
        try:
            following = orders.ack(topic, group, queue_id, offset, pop_time, committed=committed)
        except ValueError:
            return ResponseCode.MESSAGE_ILLEGAL, f"offset is illegal, key:{topic}@{queue_id}, offset:{offset}"
        # An operator's reset takes precedence over acks of messages that were popped before it.
        if following is not None and not self._context.offsets.has_reset(group, topic, queue_id):
            self._context.offsets.commit(group, topic, queue_id, following)
        if following is not None and orders.blocked_until(topic, group, queue_id) is None:
            self._pop.waiting.wake(topic, group, queue_id)
        return ResponseCode.SUCCESS, ""

    def _take_batch(self, ack: BatchAck, pending: dict[AckKey, list[int]]) -> None:
        """If messages were popped in order, store their acks immediately. Add all other acks to ``pending``."""
        topic = ack.topic
        if ack.retry != NORMAL_TOPIC:
            topic = pop_retry_topic(ack.group, topic, "+" if ack.retry == RETRY_TOPIC_V2 else "_")
        offsets = decode_acked(ack.start_offset, ack.acked)
        self._context.statistics.popped(topic, ack.group, "ACK", len(offsets))
        if ack.revive_queue_id != ORDER_REVIVE_QUEUE:
            key = topic, ack.group, ack.queue_id, ack.start_offset, ack.pop_time
            pending.setdefault(key, []).extend(offsets)
            return
        for offset in offsets:
            self._ack_in_order(topic, ack.group, ack.queue_id, offset, ack.pop_time)

    def _change(
        self, connection: Connection, command: Command, header: ChangeInvisibleTimeRequest, handle: PopHandle
    ) -> Command | None:
        topic, group, queue_id, offset = header.topic, header.consumer_group, header.queue_id, header.offset
        check_points, pop_time = self._pop.check_points, self._pop.clock.now_ms()
        while check_points.is_taken(topic, group, queue_id, offset, pop_time):
            pop_time += 1
        # The handle may name a queue that this broker does not have: a check point there would never be read.
        queue = handle.revive_queue_id if check_points.has_queue(handle.revive_queue_id) else check_points.next_queue()
        # Store the new check point before the ack of the old one: a crash in between repeats a message, but loses none.
        put = check_points.add(
            topic,
            group,
            queue_id,
            [offset],
            pop_time=pop_time,
            invisible_ms=header.invisible_time,
            queue=queue,
            suspends=header.suspend is True,
        )
        if put.status is not _OK:
            return reply(command, ResponseCode.SYSTEM_ERROR, put.reason or put.status.value)
        acked = check_points.ack({(topic, group, queue_id, handle.check_point_offset, handle.pop_time): [offset]})
        answer = ChangeInvisibleTimeResponse(pop_time=pop_time, invisible_time=header.invisible_time, revive_qid=queue)
        changed = reply(command, remark=NO_REMARK, header=answer)
        self._answer_stored([put, *acked], [(connection, command)], changed)
        return None

    def _change_in_order(self, command: Command, header: ChangeInvisibleTimeRequest, handle: PopHandle) -> Command:
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        if header.offset < (self._context.offsets.get(group, topic, queue_id) or 0):
            return reply(command, remark=NO_REMARK, header=ChangeInvisibleTimeResponse())
        visible_at_ms = self._pop.clock.now_ms() + header.invisible_time
        orders = self._pop.orders
        orders.change(topic, group, queue_id, header.offset, handle.pop_time, visible_at_ms)
        if header.suspend:
            orders.suspend(topic, group, queue_id, handle.pop_time)
        self._pop.waiting.wake(topic, group, queue_id)  # the woken pop sets its retry time again
        answer = ChangeInvisibleTimeResponse(
            pop_time=handle.pop_time,
            invisible_time=visible_at_ms - handle.pop_time,
            revive_qid=ORDER_REVIVE_QUEUE,
        )
        return reply(command, remark=NO_REMARK, header=answer)

    def _handle_of(self, text: str) -> PopHandle:
        """Return the decoded handle of an ack.

        The acks of a pop often arrive together, and their handles differ only in the eighth word, the message's offset.
        The request's header has this offset, too, so the last decoded handle is cached and used again.
        """
        latest, handle = self._latest
        own = text[len(latest) :]
        if handle is not None and own.isascii() and text.startswith(latest) and own.replace(" ", "", 1).isdigit():
            return handle
        handle = decode_pop_handle(text)
        if handle.queue_offset is not None:
            self._latest = " ".join(text.split(" ", 7)[:7]) + " ", handle
        return handle

    def _answer_acks(self, key: AckKey, put: PutResult | None, waiting: Waiting) -> None:
        """Answer the acks of one pop."""
        count = 0
        is_stored = put is None or put.status is _OK
        for connection, asked in waiting:
            if isinstance(asked, list):
                count += len(asked)
                if is_stored:
                    connection.send_successes(asked)
            else:
                count += 1
                if is_stored and self._is_plain and not asked.is_one_way:
                    connection.send_successes([asked.opaque])
        self._context.statistics.popped(key[0], key[1], "ACK", count)
        if not is_stored or not self._is_plain:
            self._answer_stored([put], waiting)

    def _answer_stored(
        self, puts: Iterable[PutResult | None], waiting: Waiting, success: Command | None = None
    ) -> None:
        """Answer requests when all their records are durable, or immediately with an error if a record was refused."""
        end_offset, refusal = 0, None
        for put in puts:
            if put is None:  # nothing was stored: the ack is in the log already, or acks are delayed
                end_offset = (
                    end_offset if self._context.settings.pop_buffer_merge else self._context.store.max_physical_offset
                )
            elif put.status is _OK:
                end_offset = max(end_offset, put.end_offset)
            else:
                refusal = ResponseCode.SYSTEM_ERROR, put.reason or put.status.value

        # Acks that arrived together get here only if they are refused.
        each = [
            (connection, command)
            for connection, asked in waiting
            for command in (
                [Command(RequestCode.ACK_MESSAGE, one) for one in asked] if isinstance(asked, list) else [asked]
            )
        ]

        def answer(late: Refusal | None) -> None:
            for connection, command in each:
                if not command.is_one_way:
                    connection.send((success or reply(command)) if late is None else reply(command, *late))

        if refusal is not None:
            return answer(refusal)
        return self._when_safe(end_offset, answer, answers=len(each))
