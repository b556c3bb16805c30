"""The messages of a topic over all its queues: those that it has by time (`listed`), and those that come (`Tail`).

Queues are pulled one by one for a group that every broker has (``TOOLS_CONSUMER``): nobody joins it, no offset is
saved, and brokers keep nothing of it.

`listed` (``printMsg``, ``printMsgByQueue``) searches each queue for the span (code 29) and pulls it on its own, a few
messages ahead; the streams are merged by store time, so that any number of messages needs little memory. Where a queue
ends is asked once: what is stored later is not waited for.

`Tail` (``rmq tail``) reads queues that appear from their first message. A broker that is away is asked again every
second; what it stores meanwhile is not missed. Only some queues at a time are asked what they have, and of very many it
is told how far that is. What is stored already comes in the order of store times over all queues, then messages as they
arrive. Loop only.
Source: behaviour.md §4, §6.2, §8.16, §9.9; remoting.md §4.3.2, §4.3.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import shlex
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from rmqkit.admin.calls import MASTER_ID, AdminCalls
from rmqkit.client.runtime.routes import subscribe_queues
from rmqkit.errors import BodyError, ClientError, NoRoute, PeerRefused, RemotingError, RmqError, SettingsError
from rmqkit.filter import TAG, is_tag_type, matches_tags, subscription
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.remoting.tasks import Tasks
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _
from rmqkit.times import Duration, Moment, duration_ms, moment_ms

if TYPE_CHECKING:
    from rmqkit.client.consumer.pull import PullResult

TOOLS_GROUP = "TOOLS_CONSUMER"
_HELD_PULLS_MAX = 8
_ASKED_MAX = 64
_QUEUES_PER_NOTE = 1000
_SUSPEND_MS = 15_000
_PULL_COUNT = 32
_PAUSE_SECONDS = 1.0
_PASSES = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.FLOW_CONTROL,
)


class Start(Struct, frozen=True):
    """Where to begin in each queue: at an offset, at a time (ms since the epoch), or without both at the end."""

    offset: int | None = None
    time_ms: int | None = None


class Wanted(Struct, frozen=True):
    """Which messages: all that are left where nothing is said.

    Attributes:
        expression, expression_type: tags or SQL92, for which the broker is asked.
        keys: one of them is a key of the message, or its unique key.
        queues: ``3``, or ``broker-a:3``.
    """

    expression: str = "*"
    expression_type: str = "TAG"
    keys: Collection[str] = ()
    queues: Collection[str] = ()

    def has_queue(self, queue: MessageQueue) -> bool:
        return not self.queues or bool({str(queue.queue_id), queue_text(queue)}.intersection(self.queues))

    def has(self, message: ReceivedMessage) -> bool:
        """Whether its keys are wanted; the rest was asked of the broker."""
        return not self.keys or not {message.msg_id, *message.keys}.isdisjoint(self.keys)


class _Lane(Struct):
    """What a queue had when the tail began: from the next offset up to the end, and what is pulled of it already."""

    queue: MessageQueue
    offset: int
    end: int
    held: list[ReceivedMessage] = field(default_factory=list)


def queue_text(queue: MessageQueue) -> str:
    """A queue as people write it."""
    return f"{queue.broker_name}:{queue.queue_id}"


class Puller(Protocol):
    """What `Tail` pulls with: a `rmqkit.PullConsumer`, or `AdminPuller`."""

    async def queues(self, topic: str) -> list[MessageQueue]: ...
    async def min_offset(self, queue: MessageQueue) -> int: ...
    async def max_offset(self, queue: MessageQueue) -> int: ...
    async def search_offset(self, queue: MessageQueue, moment: Moment) -> int: ...
    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: str = "*",
        *,
        max_count: int = 32,
        wait: Duration = 0,
        expression_type: str = TAG,
    ) -> PullResult: ...


class AdminPuller:
    """Pulls through an `AdminCalls`, signed as it signs and watched by its guard."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that may be read, as its route is now. Raises UnknownName: there is no such topic."""
        # Routes are kept otherwise, and a queue that is new would never be seen.
        self._calls.forget()
        return subscribe_queues(topic, await self._calls.route(topic))

    async def min_offset(self, queue: MessageQueue) -> int:
        """The first offset that is stored."""
        return await self._calls.min_offset(await self._address(queue), queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """One past the last message."""
        return await self._calls.max_offset(await self._address(queue), queue)

    async def search_offset(self, queue: MessageQueue, moment: Moment) -> int:
        """Return the offset of the first message stored at or after a time."""
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
        """Read a queue from an offset on, and commit nothing."""
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
        if is_tag_type(expression_type):  # a broker compares hashes
            wanted = subscription(queue.topic, expression)
            messages = [one for one in messages if matches_tags(wanted, one.tags)]
            unreadable = [one for one in unreadable if matches_tags(wanted, one.tags)]
        bounds = pulled.min_offset, pulled.max_offset
        return PullResult(pulled.status, pulled.next_begin_offset, *bounds, messages, unreadable)

    async def _address(self, queue: MessageQueue) -> str:
        return (await readers(self._calls, queue.topic))[queue.broker_name]


async def first_offset(consumer: Puller, queue: MessageQueue, start: Start) -> int:
    """The offset in a queue that a start means. Raises RmqError: the broker does not tell."""
    if start.time_ms is not None:
        return await consumer.search_offset(queue, start.time_ms / 1000)
    if start.offset is None:
        return await consumer.max_offset(queue)
    low, high = await asyncio.gather(consumer.min_offset(queue), consumer.max_offset(queue))
    return max(low, min(start.offset, high))


class Tail:
    """Follows a topic; a context manager.

    Args:
        consumer: pulls. A `rmqkit.PullConsumer` is started, and has a short ``route_interval_ms``, as new queues are
            seen by its routes.
        note: is told in a line what a person should know: a broker is away, is back, messages are gone.
        offsets: where to start in some queues, by ``broker:queue``, in place of ``start``.
    """

    def __init__(
        self,
        consumer: Puller,
        topic: str,
        start: Start,
        wanted: Wanted,
        note: Callable[[str], None],
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._start = start
        self._offsets = offsets or {}
        self._wanted = wanted
        self._note = note
        self._tasks = Tasks()
        self._found: asyncio.Queue[list[ReceivedMessage] | RmqError] = asyncio.Queue(_HELD_PULLS_MAX)
        self._empty: list[_Lane] = []
        self._filled: list[tuple[int, str, int, _Lane]] = []  # a heap by the first held message
        self._known: set[MessageQueue] = set()
        self._away: set[str] = set()
        self._window = asyncio.Semaphore(_ASKED_MAX)
        self._asked_count = 0

    async def __aenter__(self) -> Tail:
        """Begin. Raises NoRoute: there is no such topic. Raises SettingsError: it has none of the wanted queues."""
        queues = await self._consumer.queues(self._topic)
        if not any(map(self._wanted.has_queue, queues)):
            names = ", ".join(map(queue_text, queues))
            raise SettingsError(
                _(
                    "topic {topic} has no queue {queues}: it has {names}",
                    topic=self._topic,
                    queues=", ".join(self._wanted.queues),
                    names=names,
                )
            )
        self._known = {queue for queue in queues if self._wanted.has_queue(queue)}
        await asyncio.gather(*map(self._open, self._known))
        self._tasks.start(self._look_for_queues(), _("queues of {topic}", topic=self._topic))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._tasks.close()

    async def next(self) -> list[ReceivedMessage]:
        """Wait for messages, all of one queue. Raises RmqError: a broker refuses to give any."""
        while self._empty or self._filled:
            empty, self._empty = self._empty, []
            await asyncio.gather(*map(self._fill, empty))
            if self._filled:
                return self._earliest()
        found = await self._found.get()
        if isinstance(found, RmqError):
            raise found
        return found

    def _earliest(self) -> list[ReceivedMessage]:
        """Take the messages of one lane that are older than any of the others."""
        *__, lane = heapq.heappop(self._filled)
        until_ms = self._filled[0][0] if self._filled else lane.held[-1].store_timestamp
        taken = list(itertools.takewhile(lambda one: one.store_timestamp <= until_ms, lane.held))
        del lane.held[: len(taken)]
        if lane.held:
            self._keep(lane)
        elif lane.offset < lane.end:
            self._empty.append(lane)
        else:
            self._start_following(lane.queue, Start(offset=lane.offset))
        return taken

    def _keep(self, lane: _Lane) -> None:
        queue = lane.queue
        heapq.heappush(self._filled, (lane.held[0].store_timestamp, queue.broker_name, queue.queue_id, lane))

    async def _open(self, queue: MessageQueue) -> None:
        """Begin with what a queue has now behind the start, if it has any and its broker answers."""
        offset = self._offsets.get(queue_text(queue))
        start = self._start if offset is None else Start(offset=offset)
        try:
            if start != Start():
                async with self._asking():
                    low, high = await asyncio.gather(
                        first_offset(self._consumer, queue, start), self._consumer.max_offset(queue)
                    )
                self._empty.append(_Lane(queue, low, high))
                return
        except (RemotingError, NoRoute, PeerRefused):  # those who follow tell what is wrong
            pass
        self._start_following(queue, start)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Ask what a queue has, when others were asked; where there are very many a person waits for it."""
        async with self._window:
            yield
        self._asked_count += 1
        if self._asked_count % _QUEUES_PER_NOTE == 0 and self._asked_count < len(self._known):
            self._note(
                _(
                    "{asked:,} of {count:,} queues of {topic} told what they have",
                    asked=self._asked_count,
                    count=len(self._known),
                    topic=self._topic,
                )
            )

    async def _fill(self, lane: _Lane) -> None:
        """Have a message of a lane, or follow its queue from there on."""
        with contextlib.suppress(RemotingError, NoRoute, PeerRefused, BodyError):
            while not lane.held and lane.offset < lane.end:
                async with self._window:
                    pulled = await self._pull(lane.queue, lane.offset, 0)
                lane.held = self._chosen(pulled)
                # A broker that names no later offset would be asked for ever.
                if pulled.next_begin_offset <= lane.offset:
                    break
                lane.offset = pulled.next_begin_offset
        if lane.held:
            self._keep(lane)
        else:
            self._start_following(lane.queue, Start(offset=lane.offset))

    def _start_following(self, queue: MessageQueue, start: Start) -> None:
        # Before the task begins: the next look at the queues must not follow it a second time.
        self._known.add(queue)
        self._tasks.start(self._follow(queue, start), _("tail of {queue}", queue=queue_text(queue)))

    async def _look_for_queues(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(RmqError):  # those who follow tell what is wrong
                for queue in await self._consumer.queues(self._topic):
                    if queue not in self._known and self._wanted.has_queue(queue):
                        self._start_following(queue, Start(offset=0))

    async def _follow(self, queue: MessageQueue, start: Start) -> None:
        offset: int | None = None
        while True:
            try:
                if offset is None:
                    async with self._asking():
                        offset = await first_offset(self._consumer, queue, start)
                offset = await self._take(queue, offset, await self._pull(queue, offset, _SUSPEND_MS))
            except PeerRefused as error:
                if error.code not in _PASSES:
                    await self._found.put(self._explained(error))
                    return
                await self._wait(queue, error)
            except (RemotingError, NoRoute, BodyError) as error:
                await self._wait(queue, error)

    async def _pull(self, queue: MessageQueue, offset: int, suspend_ms: int) -> PullResult:
        wanted = self._wanted
        pulled = await self._consumer.pull(
            queue,
            offset,
            wanted.expression,
            expression_type=wanted.expression_type,
            max_count=_PULL_COUNT,
            wait=0 if queue.broker_name in self._away else suspend_ms / 1000,
        )
        if queue.broker_name in self._away:
            self._away.discard(queue.broker_name)
            self._note(_("broker {broker} answers again", broker=queue.broker_name))
        return pulled

    async def _take(self, queue: MessageQueue, offset: int, pulled: PullResult) -> int:
        if messages := self._chosen(pulled):
            await self._found.put(messages)
        if pulled.status is PullStatus.OFFSET_ILLEGAL and pulled.next_begin_offset != offset:
            to = pulled.next_begin_offset
            self._note(
                _(
                    "{queue} has no offset {offset} (any more), going on at {to}",
                    queue=queue_text(queue),
                    offset=offset,
                    to=to,
                )
            )
        return pulled.next_begin_offset

    def _chosen(self, pulled: PullResult) -> list[ReceivedMessage]:
        for one in pulled.unreadable:
            self._note(
                _(
                    "message {id} of queue {queue}, offset {offset}, cannot be unpacked",
                    id=one.msg_id,
                    queue=one.queue_id,
                    offset=one.queue_offset,
                )
            )
        begin_ms = self._start.time_ms or 0
        return [one for one in pulled.messages if one.store_timestamp >= begin_ms and self._wanted.has(one)]

    async def _wait(self, queue: MessageQueue, error: RmqError) -> None:
        if queue.broker_name not in self._away:
            self._away.add(queue.broker_name)
            self._note(
                _(
                    "broker {broker}: {error}; trying again",
                    broker=queue.broker_name,
                    error=str(error).partition(";")[0],
                )
            )
        await asyncio.sleep(_PAUSE_SECONDS)

    def _explained(self, error: PeerRefused) -> RmqError:
        if is_tag_type(self._wanted.expression_type) or error.code != ResponseCode.SYSTEM_ERROR:
            return error
        return ClientError(
            _(
                "broker {address} does not filter by SQL92 ({remark}): set enablePropertyFilter=true "
                "there, or choose by tags",
                address=error.address,
                remark=error.remark.partition("For more")[0].strip(),
            )
        )


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
    end = await calls.max_offset(address, queue)
    if span.end_ms is not None:
        # One more: 4.x brokers may find the nearest message instead of the next one.
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
    """A pull for the tools' group, which commits nothing; the broker may wait ``suspend_ms`` for a message."""
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
