"""One page of a topic's messages, the newest or the oldest first. A budget limits the work for a page.

`page` merges the queues of a topic by store time. It stops when it has found enough messages, or at a limit of examined
messages, bytes of bodies, or ms. A `cursor` is a text with the next offset of each queue. The next request continues at
the cursor. Filters are applied here to the pulled messages, because a broker with a filter would read past the budget,
and would not report how many messages it has read.

`rmqkit.admin.pulls.listed` has no budget. It is for programs that need all messages. Both functions read for the group
``TOOLS_CONSUMER``: no client joins this group, and no offset is saved. Source: behaviour.md §4, §8.16.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import shlex
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.pulls import Span, age, pull_request, readers
from rmqkit.client.runtime.routes import subscribe_queues
from rmqkit.errors import ClientError, RmqError, SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.schemas.clients import MessageQueue, queue_text
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _

__all__ = ["BUDGET", "Budget", "Page", "page"]

_PULL_COUNT = 32
_AT_ONCE = 8
_CURSOR_BYTES_MAX = 1 << 20

T = TypeVar("T")


class Budget(Struct, frozen=True, kw_only=True):
    """The limits of a page: examined messages, bytes of their bodies, and ms. The page ends at the first limit."""

    messages: int = 20_000
    body_bytes: int = 64 << 20
    ms: float = 3_000.0


BUDGET = Budget()


class Page(Struct, rename="camel", kw_only=True):
    """Some messages of a topic.

    Attributes:
        messages: the messages in the requested order.
        examined: the number of examined messages.
        total: the number of offsets in the span.
        reached_ms: the store time of the last examined message.
        cursor: the place where the next page begins; empty if all messages were examined.
        stopped: the reason why the page ends: ``end``, ``count``, ``messages``, ``bytes`` or ``time``.
        troubles: the queues that could not be read, each with the reason.
        ends: the end offset of each queue at the start of the page, by ``broker:queue``.
    """

    messages: list[ReceivedMessage]
    examined: int = 0
    total: int = 0
    reached_ms: int | None = None
    cursor: str = ""
    stopped: str = "end"
    troubles: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)


class _Lane(Struct):
    """The unexamined part of a queue: the offsets from ``low`` to before ``high``, and the messages already pulled."""

    queue: MessageQueue
    address: str
    low: int
    high: int
    held: deque[ReceivedMessage] = field(default_factory=deque)


async def page(
    calls: AdminCalls,
    topic: str,
    span: Span,
    *,
    newest_first: bool = True,
    count: int = 50,
    cursor: str = "",
    budget: Budget = BUDGET,
) -> Page:
    """Return the next page of the messages that a span selects.
    Raises UnknownName: there is no such topic. Raises ClientError: the topic has no such readable queue.
    Raises SettingsError: an expression or the cursor is not valid."""
    is_wanted, found = span.test(), Page(messages=[])
    deadline_ms = calls.clock.monotonic_ms() + budget.ms
    lanes = await _lanes(calls, topic, span, found)
    _resume(lanes, cursor, newest_first=newest_first)
    found.total = sum(lane.high - lane.low for lane in lanes)
    reading = _Reading(calls, budget, deadline_ms, newest_first=newest_first, queues=len(lanes))
    found.troubles += await reading.fill(lanes)
    heads = [(reading.rank(lane), number, lane) for number, lane in enumerate(lanes) if lane.held]
    heapq.heapify(heads)
    body_bytes = 0
    while heads:
        __, number, lane = heapq.heappop(heads)
        message = lane.held.popleft()
        reading.step(lane, message)
        found.examined += 1
        found.reached_ms = message.store_timestamp
        body_bytes += len(message.body)
        if is_wanted(message):
            found.messages.append(message)
        found.stopped = _stop(found, count, body_bytes, budget, is_late=calls.clock.monotonic_ms() >= deadline_ms)
        if found.stopped != "end":
            break
        if not lane.held:
            found.troubles += await reading.fill([lane])
        if lane.held:
            heapq.heappush(heads, (reading.rank(lane), number, lane))
    if found.stopped == "end" and reading.is_late and any(lane.low < lane.high for lane in lanes):
        found.stopped = "time"
    if found.stopped != "end":
        found.cursor = _cursor(lanes, newest_first=newest_first)
    return found


def _stop(found: Page, count: int, body_bytes: int, budget: Budget, *, is_late: bool) -> str:
    if len(found.messages) >= count:
        return "count"
    if found.examined >= budget.messages:
        return "messages"
    if body_bytes >= budget.body_bytes:
        return "bytes"
    return "time" if is_late else "end"


class _Reading:
    """A reader of lanes in one direction."""

    def __init__(
        self, calls: AdminCalls, budget: Budget, deadline_ms: float, *, newest_first: bool, queues: int
    ) -> None:
        self._calls = calls
        self._deadline_ms = deadline_ms
        self._newest_first = newest_first
        # If a topic has very many queues, pull few messages from each: otherwise the first pulls exceed the budget.
        self._pull_count = max(1, min(_PULL_COUNT, budget.messages // max(1, 2 * queues)))
        self.is_late = False

    def rank(self, lane: _Lane) -> tuple[int, ...]:
        """Return the sort key of a lane, by its next message."""
        at = age(lane.held[0])
        return tuple(-number for number in at) if self._newest_first else at

    def step(self, lane: _Lane, message: ReceivedMessage) -> None:
        """Move the bound of a lane past an examined message."""
        if self._newest_first:
            lane.high = message.queue_offset
        else:
            lane.low = message.queue_offset + 1

    async def fill(self, lanes: list[_Lane]) -> list[str]:
        """Pull the next messages of each lane. Return a text for each failed queue."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(lane: _Lane) -> str:
            async with turns:
                try:
                    await self._pull(lane)
                except RmqError as error:
                    return _(
                        "queue {queue} on {broker}: {error}",
                        queue=lane.queue.queue_id,
                        broker=lane.queue.broker_name,
                        error=error,
                    )
                return ""

        return [text for text in await asyncio.gather(*map(one, lanes)) if text]

    async def _pull(self, lane: _Lane) -> None:
        while not lane.held and lane.low < lane.high:
            if (left_ms := self._deadline_ms - self._calls.clock.monotonic_ms()) <= 0:
                self.is_late = True
                return
            first = max(lane.low, lane.high - self._pull_count) if self._newest_first else lane.low
            end = min(lane.high, first + self._pull_count)
            header = pull_request(lane.queue, first, "*", self._calls.clock.now_ms(), max_count=end - first)
            pulled = await self._calls.pull(lane.address, header, min(self._calls.timeout_ms, left_ms + 100))
            messages = (
                [] if pulled.status is not PullStatus.FOUND else read_messages(pulled.body, lane.queue.broker_name)
            )
            # A broker may return fewer messages than requested. In the order newest first, pull the rest of the window.
            got = [one for one in messages if first <= one.queue_offset < end]
            while self._newest_first and got and got[-1].queue_offset + 1 < end:
                header = pull_request(lane.queue, got[-1].queue_offset + 1, "*", self._calls.clock.now_ms())
                pulled = await self._calls.pull(lane.address, header, self._calls.timeout_ms)
                body = pulled.body if pulled.status is PullStatus.FOUND else b""
                more = [
                    one
                    for one in read_messages(body, lane.queue.broker_name)
                    if got[-1].queue_offset < one.queue_offset < end
                ]
                if not more:
                    break
                got += more
            lane.held.extend(reversed(got) if self._newest_first else got)
            if not got:  # the messages are deleted, or the offsets have no message (transactions, batches)
                if self._newest_first:
                    lane.high = first
                else:
                    lane.low = max(end, min(pulled.next_begin_offset, lane.high))


async def _lanes(calls: AdminCalls, topic: str, span: Span, found: Page) -> list[_Lane]:
    """Return a lane for each selected queue. Only a span with times needs further requests for each queue."""
    asked = await readers(calls, topic)
    wanted = [
        queue
        for queue in subscribe_queues(topic, await calls.route(topic))
        if span.broker in (None, queue.broker_name, asked[queue.broker_name])
        and span.queue_id in (None, queue.queue_id)
    ]
    if not wanted:
        raise ClientError(
            _(
                "topic {topic} has no such queue that may be read; see its queues: rmq topic route {topic}",
                topic=shlex.quote(topic),
            )
        )
    bounds: dict[MessageQueue, tuple[int, int]] = {}
    code, header = RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)
    for name in sorted({queue.broker_name for queue in wanted}):
        try:
            table = await calls.fetch(TopicStatsTable, asked[name], code, header)
        except RmqError as error:
            found.troubles.append(_("broker {name}: {error}", name=name, error=error))
            continue
        bounds |= {queue: (has.min_offset, has.max_offset) for queue, has in table.offset_table.items()}
    found.ends = {queue_text(queue): bounds[queue][1] for queue in sorted(wanted) if queue in bounds}
    lanes = [
        _Lane(queue, asked[queue.broker_name], *bounds[queue])
        for queue in sorted(wanted)
        if queue in bounds and bounds[queue][0] < bounds[queue][1]
    ]
    if span.begin_ms or span.end_ms is not None:
        await _at_most(lanes, lambda lane: _by_time(calls, lane, span))
    for lane in lanes:
        lane.low = max(lane.low, span.begin_offset)
    return [lane for lane in lanes if lane.low < lane.high]


async def _by_time(calls: AdminCalls, lane: _Lane, span: Span) -> None:
    if span.begin_ms:
        lane.low = max(lane.low, await calls.search_offset(lane.address, lane.queue, span.begin_ms))
    if span.end_ms is not None:
        # Add 1, because 4.x brokers may find the nearest message instead of the next one.
        end = 1 + await calls.search_offset(lane.address, lane.queue, span.end_ms + 1)
        lane.high = min(lane.high, end)


async def _at_most(lanes: list[_Lane], asking: Callable[[_Lane], Awaitable[T]]) -> None:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(lane: _Lane) -> None:
        async with turns:
            await asking(lane)

    await asyncio.gather(*map(one, lanes))


def _cursor(lanes: list[_Lane], *, newest_first: bool) -> str:
    """Return the next offset of each queue as text. Queues without further messages are included."""
    at = [(lane.queue.broker_name, lane.queue.queue_id, lane.high if newest_first else lane.low) for lane in lanes]
    return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(at))).decode().rstrip("=")


def _resume(lanes: list[_Lane], cursor: str, *, newest_first: bool) -> None:
    """Move the lanes to the offsets in a cursor. Raises SettingsError: the text is not a cursor."""
    if not cursor:
        return
    try:
        packed = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        text = zlib.decompressobj().decompress(packed, _CURSOR_BYTES_MAX)
        places = {(name, number): at for name, number, at in msgspec.json.decode(text, type=list[tuple[str, int, int]])}
    except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError):
        raise SettingsError(
            _("cursor {cursor}… is not one of this list: begin again without it", cursor=cursor[:20])
        ) from None
    for lane in list(lanes):
        at = places.get((lane.queue.broker_name, lane.queue.queue_id))
        if at is None:
            # The queue was created after the cursor and has only newer messages. Skip it in the order newest first.
            if newest_first:
                lane.high = lane.low
        elif newest_first:
            lane.high = max(lane.low, min(lane.high, at))
        else:
            lane.low = min(lane.high, max(lane.low, at))
