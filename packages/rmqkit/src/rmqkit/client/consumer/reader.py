"""Reading of a topic without a group (`rmqkit.connect().read`, ``rmq tail``): first the stored messages, then new
messages.

A `TopicReader` pulls each queue for ``TOOLS_CONSUMER``, a group that every broker has. No client joins this group, no
offset is saved, and other consumers are not affected.

========  ============================================  =======================================================
queue     range                                         order of its messages
========  ============================================  =======================================================
stored    up to the end that it had at the beginning    merged with those of other queues, in order of store time
followed  from there on; the broker holds the pull      as they arrive
========  ============================================  =======================================================

A queue that appears later is followed from its first message. If a broker is unreachable, the reader retries every
second, and misses no message that was stored meanwhile. The queues of this broker are not merged with others. With
``stop_at_end``, a queue is read up to the end that it had at the beginning, or when its broker became reachable again.

The reader requests the offsets of at most 64 queues at a time. It buffers one pull for each queue, and 8 more. Use this
module only on the event loop.
Source: behaviour.md §4, §6.2, §8.16; remoting.md §4.3.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct, field

from rmqkit.client.consumer.pull import PullResult
from rmqkit.errors import BodyError, ClientError, NoRoute, PeerRefused, RemotingError, RmqError, SettingsError
from rmqkit.filter import SQL92, TAG, is_tag_type, subscription
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import topic_fault
from rmqkit.protocol.schemas.clients import MessageQueue, queue_text
from rmqkit.remoting.tasks import Tasks
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _
from rmqkit.times import Duration, Moment, duration_ms, moment_ms

ReadFrom: TypeAlias = Literal["first", "new"] | Moment | timedelta | Mapping[MessageQueue, int]
"""The start: the first stored message, new messages only, a time, a period before now, or an offset for each queue.
Queues that are not in the mapping start at their first message."""

_FOLLOWED_PULLS_MAX = 8
_ASKED_MAX = 64
_QUEUES_PER_NOTE = 1000
_SUSPEND_SECONDS = 15.0
_PULL_COUNT = 32
_PAUSE_SECONDS = 1.0
_OFFSET_MAX = 1_000_000_000
"""A smaller number means a time before 2001: the caller probably meant an offset."""
_PASSES = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.FLOW_CONTROL,
)


class Start(Struct, frozen=True):
    """The start in each queue: an offset, a time (ms since the epoch), or the end of the queue if both are missing.

    Attributes:
        offset: the offset. If the queue does not have this offset, the nearest offset of the queue is used.
        time_ms: the time.
        offsets: start offsets of single queues. For these queues the other fields have no effect.
    """

    offset: int | None = None
    time_ms: int | None = None
    offsets: Mapping[MessageQueue, int] = {}

    def of(self, queue: MessageQueue) -> Start:
        """Return the start in a queue."""
        return Start(self.offsets[queue]) if queue in self.offsets else Start(self.offset, self.time_ms)


class Wanted(Struct, frozen=True):
    """The messages to read.

    Attributes:
        expression: tags (``A || B``) or a SQL92 expression, by which the brokers filter.
        expression_type: ``TAG`` or ``SQL92``.
        keys: keys or message ids. A message must have one of them. Empty means all messages.
        queues: queue ids, such as ``3``, or ``broker-a:3``. Empty means all queues.
    """

    expression: str = "*"
    expression_type: str = TAG
    keys: Collection[str] = ()
    queues: Collection[str] = ()

    def has_queue(self, queue: MessageQueue) -> bool:
        return not self.queues or bool({str(queue.queue_id), queue_text(queue)}.intersection(self.queues))

    def has(self, message: ReceivedMessage) -> bool:
        """Return True if a message has one of the keys. The brokers compare the expression."""
        return not self.keys or not {message.msg_id, *message.keys}.isdisjoint(self.keys)


class Puller(Protocol):
    """The methods that a `TopicReader` calls. A started `rmqkit.PullConsumer` has them."""

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


class _Lane(Struct):
    """A queue with stored messages that are still to be read: the next offset to pull, the end of the queue at the
    start, and the pulled messages."""

    queue: MessageQueue
    offset: int
    end: int
    held: list[ReceivedMessage] = field(default_factory=list)


def start_of(start: object, now_ms: int) -> Start:
    """Convert an argument to a start.

    Raises SettingsError: the argument is not a start. Raises TimeIllegal: the time is not valid.
    """
    if start == "first":
        return Start(offset=0)
    if start == "new":
        return Start()
    if isinstance(start, timedelta):
        return Start(time_ms=max(0, now_ms - round(duration_ms(start, "start"))))
    if isinstance(start, Mapping) and all(isinstance(a, MessageQueue) and isinstance(b, int) for a, b in start.items()):
        return Start(offset=0, offsets=dict(start))
    if isinstance(start, datetime) or (isinstance(start, int | float) and start >= _OFFSET_MAX):
        return Start(time_ms=moment_ms(start, "start"))
    raise SettingsError(
        f"start is {start!r}: give 'first', 'new', a datetime, a timedelta (so long ago), or offsets as "
        "{MessageQueue(…): 17}"
    )


def check_wanted(topic: str, wanted: Wanted) -> None:
    """Check the arguments of a reader. Raises SettingsError: the topic, the expression or the keys are not valid."""
    fault = topic_fault(topic)
    if fault is None and wanted.expression_type not in (TAG, SQL92):
        fault = f"expression_type is {wanted.expression_type!r}: give 'TAG' or 'SQL92'"
    if fault is None and isinstance(wanted.keys, str):
        fault = f"keys is {wanted.keys!r}: give a list, for example [{wanted.keys!r}]"
    try:
        subscription(topic, wanted.expression, expression_type=wanted.expression_type)
    except ValueError as error:
        fault = fault or str(error)
    if fault is not None:
        raise SettingsError(fault)


async def first_offset(consumer: Puller, queue: MessageQueue, start: Start) -> int:
    """Return the offset of a start in a queue. Raises RmqError: the broker does not answer, or refuses."""
    if start.time_ms is not None:
        return await consumer.search_offset(queue, start.time_ms / 1000)
    if start.offset is None:
        return await consumer.max_offset(queue)
    low, high = await asyncio.gather(consumer.min_offset(queue), consumer.max_offset(queue))
    return max(low, min(start.offset, high))


class TopicReader:
    """A reader of a topic. It is a context manager.

    Args:
        consumer: the consumer that executes the pulls. ``route_interval_ms`` of a `rmqkit.PullConsumer` determines how
            soon new queues are found.
        note: a function that gets a line of text if a broker is unreachable or reachable again, or if messages no
            longer exist.
        stop_at_end: stop after the messages that were stored at the beginning.
    """

    def __init__(
        self,
        consumer: Puller,
        topic: str,
        start: Start,
        wanted: Wanted,
        note: Callable[[str], None],
        *,
        stop_at_end: bool = False,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._start = start
        self._wanted = wanted
        self._note = note
        self._stop_at_end = stop_at_end
        self._tasks = Tasks()
        self._found: asyncio.Queue[list[ReceivedMessage] | RmqError] = asyncio.Queue(_FOLLOWED_PULLS_MAX)
        self._empty: list[_Lane] = []
        self._filled: list[tuple[int, str, int, _Lane]] = []  # a heap by the first held message
        self._known: set[MessageQueue] = set()
        self._followed: set[MessageQueue] = set()
        self._away: set[str] = set()
        self._window = asyncio.Semaphore(_ASKED_MAX)
        self._asked_count = 0
        self._is_closed = False

    async def __aenter__(self) -> TopicReader:
        """Start to read. Raises NoRoute: the topic does not exist. Raises SettingsError: it has none of the wanted
        queues.
        """
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
        if not self._stop_at_end:
            self._tasks.start(self._look_for_queues(), _("queues of {topic}", topic=self._topic))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the reader. `next` returns an empty list, even to a caller that is already waiting."""
        self._is_closed = True
        await self._tasks.close()
        with contextlib.suppress(asyncio.QueueFull):  # then no caller waits
            self._found.put_nowait([])

    async def next(self) -> list[ReceivedMessage]:
        """Wait for messages, all of one queue. An empty list means the end. Raises RmqError: a broker refuses."""
        while (self._empty or self._filled) and not self._is_closed:
            empty, self._empty = self._empty, []
            await asyncio.gather(*map(self._fill, empty))
            if self._filled:
                return self._earliest()
        while not self._is_closed and (self._followed or not self._stop_at_end or not self._found.empty()):
            found = await self._found.get()
            if isinstance(found, RmqError):
                raise found
            if found:
                return found
        return []

    def _earliest(self) -> list[ReceivedMessage]:
        """Find the lane with the oldest message. Remove the messages of this lane that are not newer than the messages
        of any other lane, and return them.
        """
        *__, lane = heapq.heappop(self._filled)
        until_ms = self._filled[0][0] if self._filled else lane.held[-1].store_timestamp
        taken = list(itertools.takewhile(lambda one: one.store_timestamp <= until_ms, lane.held))
        del lane.held[: len(taken)]
        if lane.held:
            self._keep(lane)
        elif lane.offset < lane.end:
            self._empty.append(lane)
        else:
            self._follow_lane(lane)
        return taken

    def _keep(self, lane: _Lane) -> None:
        queue = lane.queue
        heapq.heappush(self._filled, (lane.held[0].store_timestamp, queue.broker_name, queue.queue_id, lane))

    async def _open(self, queue: MessageQueue) -> None:
        """Create a lane for a queue if it has stored messages after the start and its broker answers. Otherwise follow
        the queue.
        """
        start = self._start.of(queue)
        try:
            if start != Start():
                async with self._asking():
                    low, high = await asyncio.gather(
                        first_offset(self._consumer, queue, start), self._consumer.max_offset(queue)
                    )
                self._empty.append(_Lane(queue, low, high))
                return
        except (RemotingError, NoRoute, PeerRefused):  # following the queue reports the reason
            pass
        self._start_following(queue, start)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Limit concurrent requests for offsets. With many queues the requests take long, so a note reports the
        progress.
        """
        async with self._window:
            yield
        self._asked_count += 1
        if self._asked_count % _QUEUES_PER_NOTE == 0 and self._asked_count < len(self._known):
            self._note(
                _(
                    "{asked:,} of {count:,} queues of {topic} have answered",
                    asked=self._asked_count,
                    count=len(self._known),
                    topic=self._topic,
                )
            )

    async def _fill(self, lane: _Lane) -> None:
        """Pull the next messages of a lane. If there are none, follow its queue."""
        with contextlib.suppress(RemotingError, NoRoute, PeerRefused, BodyError):
            while not lane.held and lane.offset < lane.end:
                async with self._window:
                    pulled = await self._pull(lane.queue, lane.offset, 0)
                lane.held = self._chosen(pulled, lane.end)
                # Without this check, the loop would never end if a broker returned no greater offset.
                if pulled.next_begin_offset <= lane.offset:
                    break
                lane.offset = pulled.next_begin_offset
        if lane.held:
            self._keep(lane)
        else:
            self._follow_lane(lane)

    def _follow_lane(self, lane: _Lane) -> None:
        if not self._stop_at_end:
            self._start_following(lane.queue, Start(offset=lane.offset))
        elif lane.offset < lane.end:
            self._start_following(lane.queue, Start(offset=lane.offset), lane.end)

    def _start_following(self, queue: MessageQueue, start: Start, end: int | None = None) -> None:
        # Add the queue before the task begins, so that the next check for new queues does not follow it a second time.
        self._known.add(queue)
        self._followed.add(queue)
        self._tasks.start(self._follow(queue, start, end), _("reading of {queue}", queue=queue_text(queue)))

    async def _look_for_queues(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(RmqError):  # following the queues reports the reason
                for queue in await self._consumer.queues(self._topic):
                    if queue not in self._known and self._wanted.has_queue(queue):
                        self._start_following(queue, Start(offset=0))

    async def _follow(self, queue: MessageQueue, start: Start, end: int | None) -> None:
        """Put the messages of a queue into `_found`. Stop at the end if there is one."""
        offset: int | None = None
        last: list[ReceivedMessage] | RmqError = []
        while True:
            try:
                if offset is None:
                    async with self._asking():
                        offset = await first_offset(self._consumer, queue, start)
                        if self._stop_at_end and end is None:
                            end = await self._consumer.max_offset(queue)
                if end is not None and offset >= end:
                    break
                pulled = await self._pull(queue, offset, 0 if self._stop_at_end else _SUSPEND_SECONDS)
                offset = await self._take(queue, offset, pulled, end)
                # After a failover, a broker may have fewer messages.
                end = end if end is None else min(end, pulled.max_offset)
            except PeerRefused as error:
                if error.code not in _PASSES:
                    last = self._explained(error)
                    break
                await self._wait(queue, error)
            except (RemotingError, NoRoute, BodyError) as error:
                await self._wait(queue, error)
        await self._found.put(last)
        self._followed.discard(queue)

    async def _pull(self, queue: MessageQueue, offset: int, suspend_seconds: float) -> PullResult:
        wanted = self._wanted
        pulled = await self._consumer.pull(
            queue,
            offset,
            wanted.expression,
            expression_type=wanted.expression_type,
            max_count=_PULL_COUNT,
            wait=0 if queue.broker_name in self._away else suspend_seconds,
        )
        if queue.broker_name in self._away:
            self._away.discard(queue.broker_name)
            self._note(_("broker {broker} answers again", broker=queue.broker_name))
        return pulled

    async def _take(self, queue: MessageQueue, offset: int, pulled: PullResult, end: int | None) -> int:
        if messages := self._chosen(pulled, end):
            await self._found.put(messages)
        if pulled.status is PullStatus.OFFSET_ILLEGAL and pulled.next_begin_offset != offset:
            to = pulled.next_begin_offset
            self._note(
                _(
                    "{queue} has no offset {offset} (any more), continuing at {to}",
                    queue=queue_text(queue),
                    offset=offset,
                    to=to,
                )
            )
        return pulled.next_begin_offset

    def _chosen(self, pulled: PullResult, end: int | None) -> list[ReceivedMessage]:
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
        chosen = [one for one in pulled.messages if one.store_timestamp >= begin_ms and self._wanted.has(one)]
        return [one for one in chosen if one.queue_offset < end] if self._stop_at_end and end is not None else chosen

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
