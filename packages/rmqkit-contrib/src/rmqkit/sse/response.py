"""An ASGI response that sends one stream as server-sent events.

The place of the first event is the first of these that is given: the header ``Last-Event-ID``, the query parameter
``last_event_id``, the argument ``after``. A browser's ``EventSource`` sends the header when it connects again. It
cannot set headers for its first connection, which is the use of the other two.

Status, in the order of the checks. After all but 200 a browser stops: it does not connect again by itself.

===  ==================================================================================================================
400  the name of the stream is not allowed, or the id is not one of the stream; the body has the reason
410  the events after the id were deleted: the stream expired
204  the id is that of the last event of a finished stream: no event follows
200  events follow, or the broker has not answered within `_START_SECONDS`; a browser would give up after a 503
===  ==================================================================================================================

Frames of 200: the pause before the next connection, then one frame for each event. Its type is the event's header
``event``, if it has one. The last frame of a finished stream has the type ``end``. If the reader finds an error after
the status was sent, the last frame has the type ``expired`` or ``refused``, with the reason. When the browser connects
again, it gets the status 410 or 400.

A browser that reads slowly delays the next request for events. At most one batch of events waits for it, so its memory
is bounded. If the server accepts no data for ``stalled_after`` seconds, the response stops without its end. When the
browser disconnects, the response stops, and the answer of a request that the broker still holds is ignored.

Not handled here: CORS, authentication and compression belong to the application and its middlewares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

from rmqkit.errors import EventIdIllegal, MessageIllegal, SettingsError, StreamExpired
from rmqkit.remoting.tasks import Tasks
from rmqkit.sse.frames import END, PING, content_frame, frame, retry_frame
from rmqkit.sse.shutdown import OPEN
from rmqkit.streams import Event, StreamReader, Streams
from rmqkit.times import Duration, duration_ms

if TYPE_CHECKING:
    from starlette.background import BackgroundTask
    from starlette.responses import Response
else:
    try:
        from starlette.responses import Response
    except ImportError:  # without the framework, the response is an ASGI application as well
        Response = object

__all__ = ["EventStreamResponse"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_START_SECONDS = 5.0
_QUERY = "last_event_id"
_TYPE = "event"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}
"""The last one turns off the buffer of nginx."""


class EventStreamResponse(Response):
    """A response with the events of a stream, stored and new ones, until the stream is finished::

        @app.get("/chats/{chat}")
        async def follow(chat: str) -> EventStreamResponse:
            return EventStreamResponse(streams, chat)

    Return it from an endpoint of FastAPI or Starlette, or call it as an ASGI application:
    ``await EventStreamResponse(streams, name)(scope, receive, send)``.

    Args:
        streams: open streams.
        stream: the name of the stream.
        after: the id of an event after which to begin, if the browser names no event.
        new: begin with events that are stored from now on, if neither the browser nor ``after`` names an event.
        data: a function that returns the content for the browser. Without it: the content of the event.
        ping: time without an event after which a comment is sent: seconds, at least 1, or a `timedelta`. Keep it below
            the time-outs of proxies.
        retry: the pause before a browser connects again.
        stalled_after: time after which the response stops if the browser reads nothing: at least 1 second.
        headers: more headers of the response.
        background: a task of Starlette that runs after the response.

    Raises SettingsError, TimeIllegal: an argument is not valid.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Streams,
        stream: str,
        *,
        after: str | None = None,
        new: bool = False,
        data: Callable[[Event], str | bytes] | None = None,
        ping: Duration = 15,
        retry: Duration = 2,
        stalled_after: Duration = 60,
        headers: Mapping[str, str] | None = None,
        background: BackgroundTask | None = None,
    ) -> None:
        self.status_code = 200
        self.background = background
        named = _HEADERS | {name.lower(): value for name, value in (headers or {}).items()}
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        self._streams = streams
        self._stream = stream
        self._after = after
        self._is_new = new
        self._data = data
        self._ping_seconds = _seconds(ping, "ping")
        self._retry_ms = duration_ms(retry, "retry")
        self._stalled_seconds = _seconds(stalled_after, "stalled_after")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises PeerRefused: the broker refuses the read. Raises ClientError: the streams are not
        open."""
        try:
            after = _last_event_id(scope) or self._after
            reader = self._streams.read(self._stream, after=after, new=self._is_new)
        except (EventIdIllegal, MessageIllegal) as error:
            await _answer(send, 400, str(error))
        else:
            await self._serve(reader, receive, send, has_body=scope["method"] != "HEAD")
        if self.background is not None:
            await self.background()

    async def _serve(self, reader: StreamReader, receive: Receive, send: Send, *, has_body: bool) -> None:
        tasks = Tasks()
        try:
            starting = tasks.own(reader.start(), "start of an event stream")
            gone = tasks.own(_until_disconnect(receive), "disconnect of an event stream")
            OPEN.add(gone)
            gone.add_done_callback(OPEN.discard)
            await asyncio.wait({starting, gone}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not gone.cancelled():
                gone.result()
                return
            refusal = _refusal(starting) if starting.done() else None
            if refusal is not None:
                await _answer(send, *refusal)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if has_body:
                await self._send_body(self._chunks(reader, starting), tasks, gone, send)
            else:
                await send({"type": "http.response.body"})
        except _Gone:
            return
        finally:
            await tasks.close()

    async def _send_body(
        self, chunks: AsyncIterator[bytes], tasks: Tasks, gone: asyncio.Task[None], send: Send
    ) -> None:
        await self._send(send, retry_frame(self._retry_ms))
        while True:
            following = tasks.own(_next(chunks), "next events of an event stream")
            while not following.done():
                done, _ = await asyncio.wait(
                    {following, gone}, timeout=self._ping_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if gone in done and not gone.cancelled():
                    gone.result()
                    return
                if gone in done:  # the server stops
                    await self._send(send, b"", more_body=False)
                    return
                if not done:
                    await self._send(send, PING)
            chunk = following.result()
            if chunk is None:
                await self._send(send, b"", more_body=False)
                return
            await self._send(send, chunk)

    async def _send(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        """Send a part of the body. Raises _Gone: the browser is gone, or the server did not accept the data in time."""
        try:
            async with asyncio.timeout(self._stalled_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        except OSError:  # a TimeoutError is one, too
            raise _Gone from None

    async def _chunks(self, reader: StreamReader, starting: asyncio.Task[bool]) -> AsyncIterator[bytes]:
        """Yield the frames of each batch of events. The last chunk has the reason why no event follows."""
        try:
            if not await starting:
                yield frame(b"", event_type=END)
            async for batch in reader.batches():
                yield b"".join(map(self._frame, batch))
        except StreamExpired as error:
            yield frame(str(error).encode(), event_type="expired")
        except EventIdIllegal as error:
            yield frame(str(error).encode(), event_type="refused")

    def _frame(self, event: Event) -> bytes:
        if event.is_last and not event.data:
            return frame(b"", event_id=event.id, event_type=END)
        data = event.data if self._data is None else self._data(event)
        content = data.encode() if isinstance(data, str) else data
        framed = content_frame(content, event_id=event.id, event_type=event.headers.get(_TYPE, ""))
        return framed + frame(b"", event_type=END) if event.is_last else framed


class _Gone(Exception):
    """The browser takes no more data."""


def _seconds(value: Duration, name: str) -> float:
    seconds = duration_ms(value, name) / 1000
    if seconds < 1:
        raise SettingsError(f"{name}={value} must be at least 1 second")
    return seconds


def _last_event_id(scope: Scope) -> str | None:
    """Return the id that a request names: that of the header, else that of the query."""
    for name, value in scope["headers"]:
        if name == b"last-event-id" and value:
            return str(value.decode("latin-1"))
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(_QUERY)
    return values[-1] if values else None


def _refusal(starting: asyncio.Task[bool]) -> tuple[int, str] | None:
    """Return the status and the text if no event can follow. Raises the other errors of the start."""
    try:
        return None if starting.result() else (204, "")
    except StreamExpired as error:
        return 410, str(error)
    except EventIdIllegal as error:
        return 400, str(error)


async def _answer(send: Send, status: int, text: str) -> None:
    body = f"{text}\n".encode() if text else b""
    headers = [(b"cache-control", b"no-store")]
    if body:
        headers += [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _until_disconnect(receive: Receive) -> None:
    """Read the rest of the request, and wait until the browser disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
