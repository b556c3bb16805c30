"""The sources of a replay: a topic at its brokers, or the log of a store.

A source has *lanes*: the queues of a topic, or one lane for the log. Each lane has a next offset and an end. A source
always yields the selected messages in the same order. A replay requests the lanes when it begins. Messages that are
stored later are not read. This includes messages that a replay sends to its own source.

Source: behaviour.md §4, store.md §3.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from rmqkit.admin.messages.sending import OnWait, Silence
from rmqkit.admin.replay.selection import FOREVER_MS, Selection
from rmqkit.client.consumer.pull import PullConsumer, PullResult
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import BodyError, NoRoute, RemotingError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue, queue_text
from rmqkit.remoting.client import Backoff, Failures
from rmqkit.sentences import _
from rmqkit.store.offline import check as fsck
from rmqkit.store.offline.findings import Finding
from rmqkit.store.settings import StoreSettings

LOG = "log"
PATIENCE_MS = ProducerSettings().send_timeout_ms
"""The time for which a replay waits for a broker. It equals the send timeout of a producer."""

_PAUSE_MS, _PAUSE_MS_MAX = 20.0, 2000.0
_PULL_COUNT = 64
_EXAMINED_COUNT = 1024
_CLOCK_STEP_MS = 60_000
"""The largest step back of a broker's clock that is tolerated between two messages of a queue."""

Lanes = dict[str, tuple[int, int]]
"""The next offset and the end of each lane. For the log, the offset is physical, and the end is a store time in ms."""


class Picked(Struct):
    """A selected message, its lane, and the next offset of the lane (the same for all messages of an inner batch)."""

    message: ReceivedMessage
    lane: str
    next_offset: int

    @property
    def place(self) -> str:
        """The lane and the offset of the message. In a log, the queue offset is added, because the messages of an inner
        batch have the same physical offset."""
        if self.lane == LOG:
            return f"{LOG}:{self.message.physical_offset}:{self.message.queue_offset}"
        return f"{self.lane}:{self.message.queue_offset}"


class TopicSource:
    """The messages of a topic at its brokers, queue by queue.

    Args:
        on_wait: a function that is called if a broker does not answer.
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
        """Return a lane for each queue of the topic. Raises NoRoute: there is no such topic."""
        queues = await self._consumer.queues(self._topic)
        return {queue_text(queue): await self._bounds(queue) for queue in queues}

    async def _bounds(self, queue: MessageQueue) -> tuple[int, int]:
        consumer, begin_ms = self._consumer, self._selection.begin_ms
        first = consumer.search_offset(queue, begin_ms / 1000) if begin_ms else consumer.min_offset(queue)
        low, high = await asyncio.gather(first, consumer.max_offset(queue))
        return low, high

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Yield the selected messages.
        Raises RemotingError: a broker did not answer within `PATIENCE_MS`. Raises PeerRefused: a broker refused a pull.
        Raises BodyError: the body of a message is damaged."""
        end_ms = (self._selection.end_ms or FOREVER_MS) + _CLOCK_STEP_MS
        for lane, (offset, end) in lanes.items():
            broker_name, __, queue_id = lane.rpartition(":")
            queue = MessageQueue(self._topic, broker_name, int(queue_id))
            while offset < end:
                pulled = await self._pull(queue, offset)
                for damaged in pulled.unreadable:
                    place = _(
                        "message {id} at offset {offset} of {queue}",
                        id=damaged.msg_id,
                        offset=damaged.queue_offset,
                        queue=queue,
                    )
                    raise BodyError(
                        _("{place} cannot be unpacked: replay the messages before and after it", place=place)
                    )
                for message in pulled.messages:
                    if message.store_timestamp > end_ms:
                        end = min(end, message.queue_offset)
                    if offset <= message.queue_offset < end and self._is_selected(message):
                        yield Picked(message, lane, message.queue_offset + 1)
                # A pull from the same offset again would be an endless loop.
                if pulled.next_begin_offset <= offset:
                    break
                offset = pulled.next_begin_offset

    async def _pull(self, queue: MessageQueue, offset: int) -> PullResult:
        """Return the result of a pull, with retries for `PATIENCE_MS`. Raise the most frequent error of the tries."""
        loop, backoff, failures = asyncio.get_running_loop(), Backoff(_PAUSE_MS, _PAUSE_MS_MAX), Failures()
        deadline = loop.time() + PATIENCE_MS / 1000
        with Silence(lambda: self._on_wait(_("broker {broker}", broker=queue.broker_name), PATIENCE_MS)):
            while True:
                try:
                    return await self._consumer.pull(queue, offset, self._selection.tags, max_count=_PULL_COUNT)
                except (RemotingError, NoRoute) as error:
                    failures.note(error)
                    if loop.time() >= deadline:
                        raise failures.cause from None
                await asyncio.sleep(backoff.next_ms() / 1000)


class StoreSource:
    """The messages in the log of a store. If a broker uses the store, messages stored after the start are ignored.

    Args:
        on_damage: a function that is called for bytes that are not a record, and for messages with a damaged body. The
            source skips them.
    """

    def __init__(
        self, root: Path, selection: Selection, settings: StoreSettings | None, on_damage: Callable[[Finding], None]
    ) -> None:
        self._root = root
        self._selection = selection
        self._settings = settings
        self._on_damage = on_damage

    async def lanes(self) -> Lanes:
        return {LOG: (0, SYSTEM_CLOCK.now_ms() if fsck.is_held(self._root, read_only=True) else FOREVER_MS)}

    async def read(self, lanes: Lanes) -> AsyncIterator[Picked]:
        """Yield the selected messages of the log. Raises StoreError, OSError: there is no readable store."""
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
