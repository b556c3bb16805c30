"""The streams below one parent topic: appends, reads, and the creation of the parent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings, check
from rmqkit.errors import ClientError, MessageIllegal, SettingsError
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import lite_topic_fault, topic_fault
from rmqkit.streams.event import LAST, Event, place_of, stream_of
from rmqkit.streams.parent import ensure_parent
from rmqkit.streams.reader import KEYS_KEPT, StreamReader
from rmqkit.streams.writer import StreamWriter
from rmqkit.times import Duration, duration_ms

__all__ = ["Streams", "open"]

_GROUP = "rmqkit-streams"
_EMPTY = b"\n"
_COUNT_MAX = 512


def open(  # noqa: A001 - the name that `rmqkit.streams.open` reads best with
    name_servers: str | Sequence[str] | None,
    parent: str,
    *,
    expire_after: Duration | None = None,
    linger: Duration = 0,
    waiting_max: int = 4096,
    create: bool = True,
    settings: ClientSettings | None = None,
) -> Streams:
    """Open the streams below a parent topic. Use the result with ``async with``, or await it and close it later::

        async with rmqkit.streams.open("127.0.0.1:9876", "Chats", expire_after=3600) as streams:
            ...

    Args:
        name_servers: the same as for a `Producer`.
        parent: the topic below which the streams are. Its ``message.type`` is LITE.
        expire_after: the time after its newest event after which a stream is deleted: seconds, at least 60, or a
            `timedelta`; rounded up to minutes. None: streams are never deleted, or the topic's setting stays.
        linger: how long an event waits for more events of its stream, to share their request.
        waiting_max: number of events of a stream that may wait for a request. Further calls of `Streams.append` wait.
        create: create the parent topic if it is missing, and change its lifetime if it differs.
        settings: settings of the connections, such as TLS and credentials.

    Raises SettingsError: an argument is not valid."""
    fault = topic_fault(parent)
    if fault is not None:
        raise SettingsError(fault)
    minutes: int | None = None
    if expire_after is not None:
        minutes = math.ceil(duration_ms(expire_after, "expire_after") / 60_000)
        if not 1 <= minutes <= 43_200:
            raise SettingsError(f"expire_after={expire_after} must be from one minute to 30 days")
    if waiting_max < 1:
        raise SettingsError(f"waiting_max={waiting_max} must be at least 1")
    runtime = ClientRuntime(name_servers, settings=check(settings or ClientSettings()))
    return Streams(
        runtime,
        parent,
        minutes=minutes,
        linger_ms=duration_ms(linger, "linger"),
        waiting_max=waiting_max,
        create=create,
    )


class Streams:
    """The streams below one parent topic. `open` and `embedded` return it. Use it only on one event loop.

    Attributes:
        parent: the parent topic.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        parent: str,
        *,
        minutes: int | None,
        linger_ms: float,
        waiting_max: int,
        create: bool,
    ) -> None:
        self.parent = parent
        self._runtime = runtime
        self._minutes = minutes
        self._create = create
        self._producer = Producer(_GROUP, settings=ProducerSettings(), runtime=runtime)
        self._writer = StreamWriter(self._producer, linger_ms=linger_ms, waiting_max=waiting_max)
        self._is_open = False

    def __await__(self) -> Any:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Self:
        """Connect, and create the parent topic if it is missing. A second call has no effect.
        Raises NoRoute: no name server answers, or none knows a broker.
        Raises ClientError: the topic exists and is no parent of lite topics, or it is missing and ``create`` is off.
        Raises PeerRefused: the brokers refuse to create the topic."""
        if self._is_open:
            return self
        await self._runtime.start()
        try:
            await self._runtime.reach(0)
            await ensure_parent(self._runtime, self.parent, self._minutes, create=self._create)
            await self._producer.start()
        except BaseException:
            await self._runtime.close()
            raise
        self._is_open = True
        return self

    async def close(self) -> None:
        """Wait until all appended events are stored, and close the connections."""
        if self._is_open:
            self._is_open = False
            await self._writer.close()
            await self._producer.close()
            await self._runtime.close()

    async def append(
        self, stream: str, data: bytes | str, *, headers: Mapping[str, str] | None = None, last: bool = False
    ) -> str:
        """Store an event at the end of a stream, and return its id when it is stored. Several calls at the same time
        store their events in the order of the calls.

        Args:
            stream: the name: 1 to 64 letters, digits, ``-`` and ``_``. The first event creates the stream.
            data: the content, at least one byte.
            headers: names and values that readers get beside the content.
            last: mark the event as the last one of the stream. Readers stop after it.

        Raises MessageIllegal: the name, the content or a header is not allowed; nothing is stored.
        Raises PeerRefused: the broker refuses the event, for example because there are too many streams.
        Raises SendFailed, NoRoute: no broker stored the event in time. It may be stored nevertheless; readers get an
            event once, also if it was sent several times.
        Raises ClientError: the streams are not open."""
        return await self._append(stream, data, headers, "content" if last else None)

    async def finish(self, stream: str) -> str:
        """Store a last event without content: readers stop there. Return its id. Raises the errors of `append`."""
        return await self._append(stream, _EMPTY, None, "empty")

    async def _append(self, stream: str, data: bytes | str, headers: Mapping[str, str] | None, last: str | None) -> str:
        self._check_open()
        properties = dict(headers or {})
        if LAST in properties:
            raise MessageIllegal(f"header {LAST} belongs to rmqkit: choose another")
        if last is not None:
            properties[LAST] = last
        body = data.encode() if isinstance(data, str) else bytes(data)
        if not body:
            raise MessageIllegal(f"an event of stream {stream} has no content: append at least one byte")
        return await self._writer.append(
            Message(topic=self.parent, lite_topic=stream, body=body, properties=properties)
        )

    def read(
        self, stream: str, *, after: str | None = None, new: bool = False, follow: bool = True, count_max: int = 32
    ) -> StreamReader:
        """Iterate over the events of a stream: the stored ones, then new ones as they arrive. The iteration stops after
        the last event of a finished stream. Any number of readers can read a stream at the same time.

        Args:
            after: the id of an event; the iteration begins after it. None: begin at the first stored event.
            new: begin with events that are stored from now on.
            follow: wait for new events. False: stop at the present end.
            count_max: number of events that are fetched together, 1 to 512.

        Raises EventIdIllegal: the id belongs to another stream, or the stream has no such event.
        Raises StreamExpired: events after the id were deleted.
        Raises MessageIllegal: the name of the stream is not allowed. Raises ClientError: the streams are not open, or
            they were closed meanwhile."""
        return self._reader(stream, after, newest=0 if new else None, follows=follow, count_max=count_max)

    def _reader(
        self, stream: str, after: str | None, *, newest: int | None, follows: bool, count_max: int
    ) -> StreamReader:
        self._check_open()
        fault = lite_topic_fault(stream)
        if fault is not None:
            raise MessageIllegal(f"stream {stream!r}: {fault}")
        if not 1 <= count_max <= _COUNT_MAX:
            raise SettingsError(f"count_max={count_max} must be from 1 to {_COUNT_MAX}")
        place = place_of(stream, after) if after else None
        return StreamReader(
            self._runtime,
            self.parent,
            stream,
            after=place,
            newest=newest,
            follows=follows,
            count_max=count_max,
        )

    def read_after(self, event_id: str, *, follow: bool = True) -> StreamReader:
        """Iterate over the events after an event, in the stream that the id names. Raises the errors of `read`."""
        return self.read(stream_of(event_id), after=event_id, follow=follow)

    async def last(self, stream: str) -> Event | None:
        """Return the newest event of a stream, or None if it has no event."""
        newest: Event | None = None
        async for event in self._reader(stream, None, newest=KEYS_KEPT, follows=False, count_max=_COUNT_MAX):
            newest = event
        return newest

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClientError("the streams are not open: use `async with`, or await them first")
