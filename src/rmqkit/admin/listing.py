"""The messages of a topic by time, over all its queues, oldest first (``printMsg``, ``printMsgByQueue``).

Each queue is searched for the span (code 29) and pulled on its own, a few messages ahead; the streams are merged by
store time, so that any number of messages needs little memory. Where a queue ends is asked once: what is stored later
is not waited for (`rmqkit.admin.tail` does that). No offset is saved, no group joined: pulls are made for
``TOOLS_CONSUMER``, which every broker has. Source: behaviour.md §4, §8.16, §9.9; remoting.md §4.3.2, §4.3.3.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable

from msgspec import Struct

from rmqkit.admin.calls import MASTER_ID, AdminCalls
from rmqkit.client.runtime.requests import PullStatus
from rmqkit.client.runtime.routes import subscribe_queues
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter.tags import TAG, matches_tags, subscription
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import TopicRequest

__all__ = ["Span", "age", "listed", "readers"]

_TOOLS_GROUP = "TOOLS_CONSUMER"
_FOREVER_MS = (1 << 63) - 1
_PULL_COUNT = 32


class Span(Struct, frozen=True, kw_only=True):
    """Which messages of a topic: stored within some ms, both ends included; of a broker, of a queue from an offset on;
    with one of some tags (``A || B``), and that an SQL92 expression wants."""

    begin_ms: int = 0
    end_ms: int | None = None
    broker: str | None = None
    queue_id: int | None = None
    begin_offset: int = 0
    tags: str = "*"
    sql: str = ""

    def test(self) -> Callable[[ReceivedMessage], bool]:
        """Whether a message is wanted; the SQL92 is not left to brokers, many of which do not filter by it, or let
        everything pass when it is wrong. Raises SettingsError: an expression cannot be understood."""
        end_ms = _FOREVER_MS if self.end_ms is None else self.end_ms
        try:
            tags, matches = subscription("*", self.tags), None
            if self.sql:
                from rmqkit.filter.sql92 import compile_expression

                matches = compile_expression(self.sql).matches
        except ValueError as error:
            raise SettingsError(str(error)) from None
        return lambda message: (
            self.begin_ms <= message.store_timestamp <= end_ms
            and matches_tags(tags, message.tags)
            and (matches is None or matches(encode_properties(message.properties)))
        )


async def listed(calls: AdminCalls, topic: str, span: Span) -> AsyncIterator[ReceivedMessage]:
    """The messages that a topic has now, from the oldest on.
    Raises UnknownName: there is no such topic. Raises ClientError: it has no such queue that may be read.
    Raises SettingsError: an expression cannot be understood."""
    asked = await readers(calls, topic)
    queues = [
        queue
        for queue in subscribe_queues(topic, await calls.route(topic))
        if span.broker in (None, queue.broker_name, asked[queue.broker_name])
        and span.queue_id in (None, queue.queue_id)
    ]
    if not queues:
        raise ClientError(f"topic {topic} has no such queue that may be read: look with rmq admin topic route {topic}")
    is_wanted = span.test()
    empty = await _empty(calls, topic, {asked[queue.broker_name] for queue in queues})
    queues = [queue for queue in queues if queue not in empty]
    sources = [_of_queue(calls, queue, asked[queue.broker_name], span, is_wanted) for queue in queues]
    firsts = await asyncio.gather(*(anext(source, None) for source in sources))
    heads = [(age(message), number, message) for number, message in enumerate(firsts) if message is not None]
    heapq.heapify(heads)
    while heads:
        _, number, message = heads[0]
        yield message
        following = await anext(sources[number], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (age(following), number, following))


def age(message: ReceivedMessage) -> tuple[int, int, int]:
    """Sorts messages by when they were stored; members of a batch stored as one keep their order."""
    return message.store_timestamp, message.physical_offset, message.queue_offset


async def readers(calls: AdminCalls, topic: str) -> dict[str, str]:
    """The address to read from of each broker name that has a topic: its master, or else a slave.
    Raises UnknownName: there is no such topic."""
    return {
        data.broker_name: data.broker_addrs.get(MASTER_ID) or min(data.broker_addrs.items())[1]
        for data in (await calls.route(topic)).broker_datas
        if data.broker_addrs
    }


async def _empty(calls: AdminCalls, topic: str, addresses: Iterable[str]) -> set[MessageQueue]:
    """The queues of a topic that have nothing, asked of each broker at once: a topic may have thousands."""
    code, header = RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)
    tables = await calls.fan_out(addresses, lambda address: calls.fetch(TopicStatsTable, address, code, header))
    queues = [one for table in tables.values() for one in table.offset_table.items()]
    return {queue for queue, has in queues if has.min_offset >= has.max_offset}


async def _of_queue(
    calls: AdminCalls, queue: MessageQueue, address: str, span: Span, is_wanted: Callable[[ReceivedMessage], bool]
) -> AsyncIterator[ReceivedMessage]:
    broker = calls.broker
    end = await broker.max_offset(address, queue)
    if span.end_ms is not None:
        # One more: 4.x brokers may find the nearest message instead of the next one.
        end = min(end, 1 + await broker.search_offset(address, queue, span.end_ms + 1))
    begin_ms = span.begin_ms
    first = broker.search_offset(address, queue, begin_ms) if begin_ms else broker.min_offset(address, queue)
    offset = max(await first, span.begin_offset)
    while offset < end:
        header = _pull_request(queue, offset, span.tags, calls.clock.now_ms())
        pulled = await broker.pull(address, header, calls.timeout_ms)
        if pulled.status is PullStatus.FOUND:
            for message in read_messages(pulled.body, queue.broker_name):
                if offset <= message.queue_offset < end and is_wanted(message):
                    yield message
        if pulled.status is PullStatus.NO_NEW_MESSAGE or pulled.next_begin_offset <= offset:
            return
        offset = pulled.next_begin_offset


def _pull_request(queue: MessageQueue, offset: int, tags: str, now_ms: int) -> PullMessageRequest:
    return PullMessageRequest(
        consumer_group=_TOOLS_GROUP,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=_PULL_COUNT,
        sys_flag=int(PullFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=now_ms,
        subscription=tags,
        expression_type=TAG,
        bname=queue.broker_name,
    )
