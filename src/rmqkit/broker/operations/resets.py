"""Moving groups by an operator: codes 222 (reset by time or offset) and 314 (clone).

By default the broker moves the group itself (``useServerSideResetOffset``): the pull held on a queue, or the next one,
is sent to the target, and what clients commit before that is void. Otherwise it tells every client of the group
(code 220, one-way), and the clients move themselves.
Source: behaviour.md §5.2, §5.3, §5.4; remoting.md §10.6.
"""

from __future__ import annotations

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply, request
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import (
    CloneGroupOffsetRequest,
    ResetClientOffsetRequest,
    ResetOffsetBody,
    ResetOffsetList,
    ResetOffsetRequest,
)
from rmqkit.remoting.connection import Connection

__all__ = ["ResetHandlers"]

_NUMBERS = {"timestamp": "0", "isForce": "false"}
"""What the reference takes where these are missing."""


class ResetHandlers(Handlers[OperationsContext]):
    """Resets and clones the offsets of groups."""

    @answers(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, admins_only=True)
    def reset(self, connection: Connection, command: Command) -> Command:
        """Move a group on one queue of a topic, or on all; the offsets it moves to."""
        header = decode_header_leniently(command, ResetOffsetRequest, missing=_NUMBERS)
        if self._context.settings.server_side_reset:
            return self._reset_here(command, header)
        return self._reset_by_clients(command, header)

    @answers(RequestCode.CLONE_GROUP_OFFSET, admins_only=True)
    def clone(self, connection: Connection, command: Command) -> Command:
        """Give a group the offsets of another one, on one topic or on all.
        Unknown topics are left out; so is, unless the source is taken as offline, what it is online without."""
        header = decode_header_leniently(command, CloneGroupOffsetRequest)
        group = self._context.clients.consumers(header.src_group)
        online = group.subscriptions if group is not None and not header.offline else None
        # 5.4.0 copies nothing without a topic: it looks for one with an empty name.
        for topic in [header.topic] if header.topic else self._context.offsets.topics(header.src_group):
            if self._context.topics.get(topic) is not None and (not online or topic in online):
                self._context.offsets.clone(topic, source=header.src_group, target=header.dest_group)
        return reply(command)

    def _reset_here(self, command: Command, header: ResetOffsetRequest) -> Command:
        if self._context.settings.broker_role is BrokerRole.SLAVE:
            return reply(command, ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")
        topic = self._context.topics.get(header.topic)
        if topic is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        if header.group not in self._context.groups:
            remark = f"Group {header.group} does not exist"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if header.queue_id >= 0 and header.offset is not None and header.offset != -1:
            low = self._context.store.min_offset(header.topic, header.queue_id)
            high = self._context.store.max_offset(header.topic, header.queue_id)
            if not low <= header.offset <= high + 1:
                remark = f"Target offset {header.offset} not in consume queue range [{low}-{high}]"
                return reply(command, ResponseCode.SYSTEM_ERROR, remark)
            targets = {header.queue_id: header.offset}
        else:
            queue_ids = [header.queue_id] if header.queue_id >= 0 else range(topic.write_queue_nums)
            targets = {queue_id: self._offset_at(header, queue_id, header.timestamp < 0) for queue_id in queue_ids}
        for queue_id, offset in targets.items():
            self._context.offsets.reset(header.group, header.topic, queue_id, offset)
            self._context.long_polling.wake(header.topic, queue_id, header.group)
            if self._context.pop is not None:
                self._context.pop.waiting.wake(header.topic, header.group, queue_id)
        return reply(command, body=fastjson.dumps(self._body(header, targets)))

    def _reset_by_clients(self, command: Command, header: ResetOffsetRequest) -> Command:
        topic = self._context.topics.get(header.topic)
        if topic is None:
            remark = f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}"
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, remark)
        targets: dict[int, int] = {}
        for queue_id in range(topic.write_queue_nums):
            committed = self._context.offsets.get(header.group, header.topic, queue_id)
            if committed is None or committed < 0:
                remark = f"THe consumer group <{header.group}> not exist"  # the reference's spelling
                return reply(command, ResponseCode.SYSTEM_ERROR, remark)
            target = self._offset_at(header, queue_id, header.timestamp == -1)
            targets[queue_id] = target if header.is_force else min(committed, target)
        group = self._context.clients.consumers(header.group)
        if group is None:
            remark = (
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}"
            )
            return reply(command, ResponseCode.CONSUMER_NOT_ONLINE, remark)
        body = self._body(header, targets)
        told = ResetClientOffsetRequest(
            topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=header.is_force
        )
        for peer, member in group.members.items():
            content = fastjson.dumps(ResetOffsetList.of(body) if member.language == "CPP" else body)
            peer.send(request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, told, content, one_way=True))
        return reply(command, body=fastjson.dumps(body))

    def _offset_at(self, header: ResetOffsetRequest, queue_id: int, is_end: bool) -> int:
        if is_end:
            return self._context.store.max_offset(header.topic, queue_id)
        return max(0, self._context.store.offset_by_time(header.topic, queue_id, header.timestamp))

    def _body(self, header: ResetOffsetRequest, targets: dict[int, int]) -> ResetOffsetBody:
        name = self._context.settings.broker_name
        return ResetOffsetBody({MessageQueue(header.topic, name, q): offset for q, offset in targets.items()})
