"""Where `rmq replay` takes messages from: a topic at its brokers, or the log of a store.

A source has *lanes*, queues or the one log, each from an offset up to an end, and gives the selected messages of its
lanes in an order that is always the same. Lanes are asked for when a replay begins: what is stored later, such as what
a replay puts into its own source, is not read. Source: behaviour.md §4, store.md §3.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from rmqkit.admin.sending import OnWait, Silence
from rmqkit.admin.tail import queue_text
from rmqkit.client.consumer.pull import PullConsumer, PullResult
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import NoRoute, RemotingError, SettingsError
from rmqkit.filter.sql92 import ExpressionRejected, compile_expression
from rmqkit.filter.tags import matches_tags, subscription
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import NOT_OF_APPLICATIONS, SYSTEM_TOPICS
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.client import Backoff
from rmqkit.store.offline import check as fsck
from rmqkit.store.offline.findings import Finding
from rmqkit.store.settings import StoreSettings

__all__ = ["PATIENCE_MS", "Lanes", "Picked", "Selection", "StoreSource", "TopicSource"]

LOG = "log"
PATIENCE_MS = ProducerSettings().send_timeout_ms
"""How long a broker that is away is waited for: as long as for its sends."""

_PAUSE_MS, _PAUSE_MS_MAX = 20.0, 2000.0
_PULL_COUNT = 64
_EXAMINED_COUNT = 1024
_FOREVER_MS = 1 << 62
_CLOCK_STEP_MS = 60_000
"""Brokers' clocks may go back so far between two messages of a queue."""

Lanes = dict[str, tuple[int, int]]
"""Next offset and end of each lane; the offset in the log is physical, and its end a store time in ms."""


class Selection(Struct, frozen=True):
    """Which messages; without a topic all of a store but those of the system, of retries and dead letters. Times are
    bounds of ``storeTimestamp`` in ms; ``tags`` is ``A || B``, ``sql`` an SQL92 text; one of ``keys`` is enough."""

    topic: str | None = None
    begin_ms: int = 0
    end_ms: int | None = None
    keys: tuple[str, ...] = ()
    tags: str = "*"
    sql: str = ""

    def test(self) -> Callable[[ReceivedMessage], bool]:
        """Whether a message is selected. Raises SettingsError: an expression cannot be understood."""
        try:
            tags = subscription(self.topic or "*", self.tags)
            expression = compile_expression(self.sql) if self.sql else None
        except (ValueError, ExpressionRejected) as error:
            raise SettingsError(f"replay: {error}") from None
        keys, end_ms = set(self.keys), _FOREVER_MS if self.end_ms is None else self.end_ms

        def is_selected(message: ReceivedMessage) -> bool:
            topic = message.topic
            is_of_topic = (
                topic == self.topic
                if self.topic is not None
                else topic not in SYSTEM_TOPICS and not topic.startswith(NOT_OF_APPLICATIONS)
            )
            return (
                is_of_topic
                and self.begin_ms <= message.store_timestamp <= end_ms
                and (not keys or not keys.isdisjoint((message.msg_id, *message.keys)))
                and matches_tags(tags, message.tags)
                and (expression is None or expression.matches(encode_properties(message.properties)))
            )

        return is_selected


class Picked(Struct):
    """A selected message, its lane, and where the lane goes on behind it; all of an inner batch go on at one place."""

    message: ReceivedMessage
    lane: str
    next_offset: int

    @property
    def place(self) -> str:
        """Lane and offset; of an inner batch's member with its number in the queue."""
        if self.lane == LOG:
            return f"{LOG}:{self.message.physical_offset}:{self.message.queue_offset}"
        return f"{self.lane}:{self.message.queue_offset}"


class TopicSource:
    """A topic at its brokers, queue by queue.

    Args:
        on_wait: told of a broker that does not answer.
    """

    def __init__(
        self,
        consumer: PullConsumer,
        topic: str,
        selection: Selection,
        on_wait: OnWait = lambda who, up_to_ms: None,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._selection = selection
        self._on_wait = on_wait
        self._is_selected = selection.test()

    async def lanes(self) -> Lanes:
        """Raises NoRoute: there is no such topic."""
        queues = await self._consumer.queues(self._topic)
        return {queue_text(queue): await self._bounds(queue) for queue in queues}

    async def _bounds(self, queue: MessageQueue) -> tuple[int, int]:
        consumer, begin_ms = self._consumer, self._selection.begin_ms
        first = consumer.search_offset(queue, begin_ms) if begin_ms else consumer.min_offset(queue)
        low, high = await asyncio.gather(first, consumer.max_offset(queue))
        return low, high

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Raises RemotingError, PeerRefused: a broker does not give its messages, tried for `PATIENCE_MS`."""
        end_ms = (self._selection.end_ms or _FOREVER_MS) + _CLOCK_STEP_MS
        for lane, (offset, end) in lanes.items():
            broker_name, _, queue_id = lane.rpartition(":")
            queue = MessageQueue(self._topic, broker_name, int(queue_id))
            while offset < end:
                pulled = await self._pull(queue, offset)
                for message in pulled.messages:
                    if message.store_timestamp > end_ms:
                        end = min(end, message.queue_offset)
                    if offset <= message.queue_offset < end and self._is_selected(message):
                        yield Picked(message, lane, message.queue_offset + 1)
                if pulled.next_begin_offset <= offset:
                    break
                offset = pulled.next_begin_offset

    async def _pull(self, queue: MessageQueue, offset: int) -> PullResult:
        """A pull, tried again for as long as a producer would try to send."""
        loop, backoff = asyncio.get_running_loop(), Backoff(_PAUSE_MS, _PAUSE_MS_MAX)
        deadline = loop.time() + PATIENCE_MS / 1000
        with Silence(lambda: self._on_wait(f"broker {queue.broker_name}", PATIENCE_MS)):
            while True:
                try:
                    return await self._consumer.pull(queue, offset, self._selection.tags, max_count=_PULL_COUNT)
                except (RemotingError, NoRoute):
                    if loop.time() >= deadline:
                        raise
                await asyncio.sleep(backoff.next_ms() / 1000)


class StoreSource:
    """The log of a store, whose broker may be at work: then only what was stored when the replay began.

    Args:
        on_damage: told of what is no record, and of messages whose body changed on the disk: these are left out.
    """

    def __init__(
        self, root: Path, selection: Selection, settings: StoreSettings | None, on_damage: Callable[[Finding], None]
    ) -> None:
        self._root = root
        self._selection = selection
        self._settings = settings
        self._on_damage = on_damage

    async def lanes(self) -> Lanes:
        return {LOG: (0, SYSTEM_CLOCK.now_ms() if fsck.is_held(self._root, read_only=True) else _FOREVER_MS)}

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Raises StoreError, OSError: there is no readable store."""
        is_selected = self._selection.test()
        ((offset, end_ms),) = lanes.values()
        messages = fsck.dump(
            self._root,
            self._settings,
            begin_ms=self._selection.begin_ms,
            end_ms=end_ms,
            begin_offset=offset,
            read_only=True,
            verify_crc=True,
            on_damage=self._on_damage,
        )
        while some := await asyncio.to_thread(lambda: list(itertools.islice(messages, _EXAMINED_COUNT))):
            for message in some:
                if is_selected(message):
                    yield Picked(message, LOG, message.physical_offset + message.store_size)
