"""ACK_MESSAGE, BATCH_ACK_MESSAGE, CHANGE_MESSAGE_INVISIBLETIME (``AckMessageProcessor`` and its like).

A message is named by its handle, and an answer waits until the log has what it says (SYNC_FLUSH: on the disk,
SYNC_MASTER: at the slaves). Acks that come in one tick of the loop are stored together, those of one pop as one record;
what is not pending any more needs none, but its ack waits, too, for what is in the log before it. Another invisible
time is a pop of its own: a new check point, then an ack of the old one. What was popped in order has no check
point: its acks move the group's offset.
Source: behaviour.md §4.10, §4.11, §4.14; remoting.md §4.6.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from rmqkit.broker.answers import Refusal
from rmqkit.broker.handlers import answers
from rmqkit.broker.pop.handlers import NO_REMARK, PopHandlerBase
from rmqkit.broker.pop.in_flight import AckKey
from rmqkit.broker.pop.read import ORDER_REVIVE_QUEUE
from rmqkit.broker.pop.service import PopContext
from rmqkit.broker.pop.write_batch import Waiting
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.handles import NORMAL_TOPIC, RETRY_TOPIC_V2, PopHandle, decode_acked, decode_pop_handle
from rmqkit.protocol.names import pop_retry_topic
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
)
from rmqkit.protocol.templates import success_frame
from rmqkit.remoting.bodies import decode_body
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = ["PopAckHandlers"]

_OK = PutStatus.OK  # asking an enumeration for a member costs a call


class PopAckHandlers(PopHandlerBase):
    """Takes note of what became of popped messages."""

    def __init__(self, context: PopContext) -> None:
        super().__init__(context)
        self._latest: tuple[str, PopHandle | None] = "", None

    @answers(RequestCode.ACK_MESSAGE)
    def ack(self, connection: Connection, command: Command) -> Command | None:
        """A message is consumed."""
        header = decode_header_leniently(command, AckMessageRequest, drops_unreadable=False)
        refusal = self._refusal(connection, header)
        if refusal is not None:
            return reply(command, *refusal)
        handle = self._handle_of(header.extra_info)
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        low, high = self._context.store.bounds(topic, queue_id)
        if not low <= header.offset <= high:
            remark = f"offset is illegal, key:{topic}@{queue_id}, commit:{header.offset}, store:{low}~{high}"
            return reply(command, ResponseCode.NO_MESSAGE, remark)
        if handle.revive_queue_id == ORDER_REVIVE_QUEUE:
            return reply(command, *self._ack_in_order(topic, group, queue_id, header.offset, handle.pop_time))
        key = topic, group, queue_id, handle.check_point_offset, handle.pop_time
        self._pop.batch.ack(key, header.offset, connection, command, self._answer_acks)
        return None

    @answers(RequestCode.BATCH_ACK_MESSAGE)
    def ack_several(self, connection: Connection, command: Command) -> Command | None:
        """Messages of several pops are consumed; what cannot be is left out."""
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
        """A message comes again at another time; what its new handle is made of."""
        header = decode_header_leniently(command, ChangeInvisibleTimeRequest, drops_unreadable=False)
        nothing = ChangeInvisibleTimeResponse()
        refusal = self._refusal(connection, header)
        if refusal is not None:
            return reply(command, *refusal, header=nothing)
        topic, queue_id = header.topic, header.queue_id
        low, high = self._context.store.bounds(topic, queue_id)
        if not low <= header.offset < high:
            return reply(command, ResponseCode.NO_MESSAGE, NO_REMARK, header=nothing)
        handle = decode_pop_handle(header.extra_info)
        if handle.revive_queue_id == ORDER_REVIVE_QUEUE:
            return self._change_in_order(command, header, handle)
        return self._change(connection, command, header, handle)

    # -- inside

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
        if following is not None and not self._context.offsets.has_reset(group, topic, queue_id):
            self._context.offsets.commit(group, topic, queue_id, following)
        if following is not None and orders.blocked_until(topic, group, queue_id) is None:
            self._pop.waiting.wake(topic, group, queue_id)
        return ResponseCode.SUCCESS, ""

    def _take_batch(self, ack: BatchAck, pending: dict[AckKey, list[int]]) -> None:
        """Take what was popped in order at once, and gather the rest."""
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
        check_points, pop_time = self._pop.check_points, self._context.clock.now_ms()
        while check_points.is_taken(topic, group, queue_id, offset, pop_time):
            pop_time += 1
        queue = handle.revive_queue_id if check_points.has_queue(handle.revive_queue_id) else check_points.next_queue()
        put = check_points.add(
            topic, group, queue_id, [offset], pop_time=pop_time, invisible_ms=header.invisible_time, queue=queue
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
        visible_at_ms = self._context.clock.now_ms() + header.invisible_time
        self._pop.orders.change(topic, group, queue_id, header.offset, handle.pop_time, visible_at_ms)
        self._pop.waiting.wake(topic, group, queue_id)  # it works out anew when to look
        answer = ChangeInvisibleTimeResponse(
            pop_time=handle.pop_time,
            invisible_time=visible_at_ms - handle.pop_time,
            revive_qid=ORDER_REVIVE_QUEUE,
        )
        return reply(command, remark=NO_REMARK, header=answer)

    def _handle_of(self, text: str) -> PopHandle:
        """What an ack's handle names; the message's own offset, its eighth word, stands in the header, too.
        The acks of a pop come together and begin alike."""
        latest, handle = self._latest
        own = text[len(latest) :]
        if handle is not None and own.isascii() and text.startswith(latest) and own.replace(" ", "", 1).isdigit():
            return handle
        handle = decode_pop_handle(text)
        if handle.queue_offset is not None:
            self._latest = " ".join(text.split(" ", 7)[:7]) + " ", handle
        return handle

    def _answer_acks(self, key: AckKey, put: PutResult | None, waiting: Waiting) -> None:
        """Answer the acks of a pop."""
        self._context.statistics.popped(key[0], key[1], "ACK", len(waiting))
        is_stored = put is None or put.status is _OK
        if not is_stored or not self._is_plain:
            return self._answer_stored([put], waiting)
        for connection, command in waiting:
            if not command.is_one_way:
                connection.send_frame(success_frame(command.opaque))
        return None

    def _answer_stored(
        self, puts: Iterable[PutResult | None], waiting: Waiting, success: Command | None = None
    ) -> None:
        """Answer requests when all of what they put is safe."""
        end_offset, refusal = 0, None
        for put in puts:
            if put is None:  # it is in the log already, unless acks are put off
                end_offset = (
                    end_offset if self._context.settings.pop_buffer_merge else self._context.store.max_physical_offset
                )
            elif put.status is _OK:
                end_offset = max(end_offset, put.end_offset)
            else:
                refusal = ResponseCode.SYSTEM_ERROR, put.reason or put.status.value

        def answer(late: Refusal | None) -> None:
            for connection, command in waiting:
                if not command.is_one_way:
                    connection.send((success or reply(command)) if late is None else reply(command, *late))

        if refusal is not None:
            return answer(refusal)
        return self._when_safe(end_offset, answer, answers=len(waiting))
