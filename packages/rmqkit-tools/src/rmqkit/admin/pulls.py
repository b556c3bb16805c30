"""Pulls of the tools. They use a group that every broker has (`TOOLS_GROUP`). No client joins it; no offset is saved.

`AdminPuller` pulls queue by queue for a `TopicReader`.

`listed` (``printMsg``, ``printMsgByQueue``) yields the current messages of a topic, in order of store time. It searches
the offsets of the span in each queue (code 29) and pulls each queue separately, a few messages ahead. The streams are
merged, so any number of messages needs little memory. Messages that are stored later are not read.
Source: behaviour.md §4, §6.2, §8.16, §9.9; remoting.md §4.3.2, §4.3.3.
"""

from __future__ import annotations

import asyncio
import heapq
import shlex
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from rmqkit.admin.calls import MASTER_ID, AdminCalls
from rmqkit.client.runtime.routes import subscribe_queues
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter import TAG, is_tag_type, matches_tags, subscription
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _
from rmqkit.times import Duration, Moment, duration_ms, moment_ms

if TYPE_CHECKING:
    from rmqkit.client.consumer.pull import PullResult

_FOREVER_MS = (1 << 63) - 1
_PULL_COUNT = 32


class AdminPuller:
    """A puller that sends its requests through an `AdminCalls`, with the credentials and the guard of that object."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic from its current route. Raises UnknownName: there is no such topic."""
        # A cached route would never show new queues.
        self._calls.forget()
        return subscribe_queues(topic, await self._calls.route(topic))

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the first stored offset of a queue."""
        return await self._calls.min_offset(await self._address(queue), queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset after the last message of a queue."""
        return await self._calls.max_offset(await self._address(queue), queue)

    async def search_offset(self, queue: MessageQueue, moment: Moment) -> int:
        """Return the offset of the first message of a queue that was stored at or after a time."""
        return await self._calls.search_offset(await self._address(queue), queue, moment_ms(moment, "moment"))

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: str = "*",
        *,
        max_count: int = _PULL_COUNT,
        wait: Duration = 0,
        expression_type: str = TAG,
    ) -> PullResult:
        """Pull messages of a queue from an offset, without a commit."""
        from rmqkit.client.consumer.loop import unpack
        from rmqkit.client.consumer.pull import PullResult

        suspend_ms = round(duration_ms(wait, "wait"))
        header = pull_request(
            queue,
            offset,
            expression,
            self._calls.clock.now_ms(),
            max_count=max_count,
            suspend_ms=suspend_ms,
            expression_type=expression_type,
        )
        pulled = await self._calls.pull(await self._address(queue), header, self._calls.timeout_ms + suspend_ms)
        body = pulled.body if pulled.status is PullStatus.FOUND else b""
        messages, unreadable = unpack(body, queue.broker_name)
        if is_tag_type(expression_type):  # brokers compare only hashes of tags
            wanted = subscription(queue.topic, expression)
            messages = [one for one in messages if matches_tags(wanted, one.tags)]
            unreadable = [one for one in unreadable if matches_tags(wanted, one.tags)]
        bounds = pulled.min_offset, pulled.max_offset
        return PullResult(pulled.status, pulled.next_begin_offset, *bounds, messages, unreadable)

    async def _address(self, queue: MessageQueue) -> str:
        return (await readers(self._calls, queue.topic))[queue.broker_name]


class Span(Struct, frozen=True, kw_only=True):
    """A selection of a topic's messages: by store time (ms, both ends included), broker, queue, first offset, tag
    expression (``A || B``) and SQL92 expression."""

    begin_ms: int = 0
    end_ms: int | None = None
    broker: str | None = None
    queue_id: int | None = None
    begin_offset: int = 0
    tags: str = "*"
    sql: str = ""

    def test(self) -> Callable[[ReceivedMessage], bool]:
        """Return a function that tests if a message is selected.

        SQL92 is evaluated here, because many brokers do not filter by SQL92, or accept every message if the expression
        is wrong.
        Raises SettingsError: an expression does not compile.
        """
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
    """Yield the current messages of a topic, the oldest first.
    Raises UnknownName: there is no such topic. Raises ClientError: the topic has no such readable queue.
    Raises SettingsError: an expression does not compile."""
    asked = await readers(calls, topic)
    queues = [
        queue
        for queue in subscribe_queues(topic, await calls.route(topic))
        if span.broker in (None, queue.broker_name, asked[queue.broker_name])
        and span.queue_id in (None, queue.queue_id)
    ]
    if not queues:
        raise ClientError(
            _(
                "topic {topic} has no such queue that may be read; see its queues: rmq topic route {topic}",
                topic=shlex.quote(topic),
            )
        )
    is_wanted = span.test()
    empty = await _empty(calls, topic, {asked[queue.broker_name] for queue in queues})
    queues = [queue for queue in queues if queue not in empty]
    sources = [_of_queue(calls, queue, asked[queue.broker_name], span, is_wanted) for queue in queues]
    firsts = await asyncio.gather(*(anext(source, None) for source in sources))
    heads = [(age(message), number, message) for number, message in enumerate(firsts) if message is not None]
    heapq.heapify(heads)
    while heads:
        __, number, message = heads[0]
        yield message
        following = await anext(sources[number], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (age(following), number, following))


def age(message: ReceivedMessage) -> tuple[int, int, int]:
    """Return a sort key by store time. The messages of a batch are sorted by offset."""
    return message.store_timestamp, message.physical_offset, message.queue_offset


async def readers(calls: AdminCalls, topic: str) -> dict[str, str]:
    """Return the address to read a topic from, by broker name: the address of the master, or else of a slave.
    Raises UnknownName: there is no such topic."""
    return {
        data.broker_name: data.broker_addrs.get(MASTER_ID) or min(data.broker_addrs.items())[1]
        for data in (await calls.route(topic)).broker_datas
        if data.broker_addrs
    }


async def _empty(calls: AdminCalls, topic: str, addresses: Iterable[str]) -> set[MessageQueue]:
    """Return the empty queues of a topic. A topic may have thousands of queues, so each broker gets one request."""
    code, header = RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)
    tables = await calls.fan_out(addresses, lambda address: calls.fetch(TopicStatsTable, address, code, header))
    queues = [one for table in tables.values() for one in table.offset_table.items()]
    return {queue for queue, has in queues if has.min_offset >= has.max_offset}


async def _of_queue(
    calls: AdminCalls, queue: MessageQueue, address: str, span: Span, is_wanted: Callable[[ReceivedMessage], bool]
) -> AsyncIterator[ReceivedMessage]:
    end = await calls.max_offset(address, queue)
    if span.end_ms is not None:
        # Add 1, because 4.x brokers may find the nearest message instead of the next one.
        end = min(end, 1 + await calls.search_offset(address, queue, span.end_ms + 1))
    begin_ms = span.begin_ms
    first = calls.search_offset(address, queue, begin_ms) if begin_ms else calls.min_offset(address, queue)
    offset = max(await first, span.begin_offset)
    while offset < end:
        header = pull_request(queue, offset, span.tags, calls.clock.now_ms())
        pulled = await calls.pull(address, header, calls.timeout_ms)
        if pulled.status is PullStatus.FOUND:
            for message in read_messages(pulled.body, queue.broker_name):
                if offset <= message.queue_offset < end and is_wanted(message):
                    yield message
        if pulled.status is PullStatus.NO_NEW_MESSAGE or pulled.next_begin_offset <= offset:
            return
        offset = pulled.next_begin_offset


def pull_request(
    queue: MessageQueue,
    offset: int,
    expression: str,
    now_ms: int,
    *,
    max_count: int = _PULL_COUNT,
    suspend_ms: int = 0,
    expression_type: str = TAG,
) -> PullMessageRequest:
    """Return a pull request of the tools' group, without a commit. The broker may wait ``suspend_ms`` for a message."""
    return PullMessageRequest(
        consumer_group=TOOLS_GROUP,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=max_count,
        sys_flag=int(PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)),
        commit_offset=0,
        suspend_timeout_millis=suspend_ms,
        sub_version=now_ms,
        subscription=expression,
        expression_type=expression_type,
        bname=queue.broker_name,
    )
