"""Moving groups: to a time, to the end, to an offset, or to where another group is.

``resetOffsetByTime``, ``skipAccumulatedMessage``, ``cloneGroupOffset``. A reset is the broker's work (code 222): 5.x
brokers move the group themselves, and what its clients commit before their next pull is void; others tell the clients,
and refuse when none is online. Then the offsets are written one by one, as Java's tool does.
Source: behaviour.md §5.3, §5.4, §9.9; remoting.md §10.6.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.admin.calls import AdminCalls
from rmqkit.errors import ClientError, PeerRefused, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.clients import ConsumerGroupRequest, MessageQueue
from rmqkit.protocol.schemas.offsets import (
    ConsumeStats,
    ConsumeStatsRequest,
    ResetOffsetBody,
    ResetOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from rmqkit.settings import parse_properties

__all__ = ["END_MS", "Moved", "Offsets"]

END_MS = -1
"""In place of a time: the end of each queue."""

_EVERY_QUEUE = -1


class Moved(Struct, rename="camel"):
    """Where a group is in a queue now."""

    topic: str
    broker_name: str
    queue_id: int
    offset: int


class Offsets:
    """Operations on the offsets of groups; each raises what `AdminCalls` raises."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def reset(
        self,
        group: str,
        topic: str,
        timestamp_ms: int,
        *,
        broker: str | None = None,
        queue_id: int | None = None,
        offset: int | None = None,
        is_forced: bool = True,
    ) -> list[Moved]:
        """Move a group to the first message stored at or after a time (`END_MS`: behind the last), or one queue of a
        broker to an offset. Without ``is_forced`` brokers that have their clients do it move no queue forward.
        Raises UnknownName: there is no such topic. Raises PeerRefused: no such group, or an offset the queue lacks.
        Raises ClientError: one queue of a group online cannot be moved there."""
        masters = await (self._calls.masters_of_topic(topic) if broker is None else self._calls.masters(broker=broker))
        header = ResetOffsetRequest(
            topic=topic,
            group=group,
            timestamp=timestamp_ms,
            is_force=is_forced,
            queue_id=_EVERY_QUEUE if queue_id is None else queue_id,
            offset=offset,
        )

        async def move(address: str) -> dict[MessageQueue, int]:
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            if queue_id is not None:
                await self._check_moves_one(address, group)
            try:
                return (await self._calls.fetch(ResetOffsetBody, address, code, header)).offset_table
            except PeerRefused as error:
                if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                    raise
                return await self._rewrite(address, header)

        return _rows(await self._calls.fan_out(masters.values(), move))

    async def skip(self, group: str, topic: str) -> list[Moved]:
        """Move a group behind the last message of each queue; raises as `reset`."""
        return await self.reset(group, topic, END_MS)

    async def clone(self, source: str, target: str, topic: str) -> list[Moved]:
        """Give a group the offsets that another one has on a topic.
        Raises UnknownName: there is no such topic, or the source has no offsets on it.
        Raises PeerRefused: a broker does not know the target."""
        masters = await self._calls.masters_of_topic(topic)

        async def copy(address: str) -> dict[MessageQueue, int]:
            moved: dict[MessageQueue, int] = {}
            for queue in await self._offsets(address, source, topic):
                offset = await self._committed(address, source, queue)
                if offset is not None:
                    moved[queue] = offset
                    await self._put(address, target, queue, offset)
            return moved

        rows = _rows(await self._calls.fan_out(masters.values(), copy))
        if not rows:
            remedy = "look at the groups of the topic with: rmq admin group progress"
            raise UnknownName("offset of group", source, f"topic {topic}", remedy=remedy)
        return rows

    async def _check_moves_one(self, address: str, group: str) -> None:
        """A broker that has its clients move themselves takes a reset of one queue for one of all by time.
        Raises ClientError: it is such a one, and clients of the group are online."""
        try:
            settings = parse_properties(
                (await self._calls.ask(address, RequestCode.GET_BROKER_CONFIG)).payload.decode()
            )
        except PeerRefused:  # an rmqkit broker inside a program: it has no configuration to show
            return
        if settings.get("useServerSideResetOffset") == "true":
            return
        try:
            await self._calls.ask(address, RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(group))
        except PeerRefused:  # nobody is online: the offset can be written
            return
        why = f"{address} has clients reset themselves (useServerSideResetOffset), all their queues at a time"
        raise ClientError(f"{why}: stop the clients of group {group} first, or leave the queue out")

    async def _committed(self, address: str, group: str, queue: MessageQueue) -> int | None:
        """Where a group is in a queue; None when it never was there, which progress (208) shows as 0."""
        timeout_ms = self._calls.timeout_ms
        return await self._calls.committed_offset(address, group, queue, is_stored=True, timeout_ms=timeout_ms)

    async def _put(self, address: str, group: str, queue: MessageQueue, offset: int) -> None:
        """Write an offset. A queue reset and not pulled since ignores that, with a remark: it is reset anew."""
        header = UpdateConsumerOffsetRequest(group, queue.topic, queue.queue_id, offset)
        if (await self._calls.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, header)).remark:
            again = ResetOffsetRequest(
                topic=queue.topic, group=group, timestamp=0, is_force=True, queue_id=queue.queue_id, offset=offset
            )
            await self._calls.ask(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, again)

    async def _offsets(self, address: str, group: str, topic: str) -> dict[MessageQueue, int]:
        header = ConsumeStatsRequest(group, topic)
        stats = await self._calls.fetch(ConsumeStats, address, RequestCode.GET_CONSUME_STATS, header)
        return {queue: one.consumer_offset for queue, one in stats.offset_table.items()}

    async def _rewrite(self, address: str, wanted: ResetOffsetRequest) -> dict[MessageQueue, int]:
        """Do what a broker would have its clients do, of whom none is online."""
        moved: dict[MessageQueue, int] = {}
        for queue, committed in (await self._offsets(address, wanted.group, wanted.topic)).items():
            if wanted.queue_id not in (_EVERY_QUEUE, queue.queue_id):
                continue
            target = await self._target(address, queue, wanted)
            moved[queue] = target if wanted.is_force else min(committed, target)
            await self._put(address, wanted.group, queue, moved[queue])
        return moved

    async def _target(self, address: str, queue: MessageQueue, wanted: ResetOffsetRequest) -> int:
        if wanted.offset is not None and wanted.offset >= 0:
            return wanted.offset
        if wanted.timestamp < 0:
            return await self._calls.max_offset(address, queue)
        return await self._calls.search_offset(address, queue, wanted.timestamp)


def _rows(tables: dict[str, dict[MessageQueue, int]]) -> list[Moved]:
    moved = {queue: offset for table in tables.values() for queue, offset in table.items()}
    return [Moved(queue.topic, queue.broker_name, queue.queue_id, offset) for queue, offset in sorted(moved.items())]
