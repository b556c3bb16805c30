"""A stream of HTTP/2: a request, its answer, and what the answer may send.

A stream has two windows for what it sends: its own and the connection's. What fits into both leaves at once. The rest
waits, in the stream's own order, for the window that was too small (`send_pending`). `check_request` checks the headers
that open a stream. The frames of a stream are read by `http2`. Source: RFC 9113 §5.2, §6.9, §8.3.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from rmqkit.proxy.transport.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEAD,
    HEADERS,
    WINDOW_UPDATE,
    ErrorCode,
    StreamError,
    frame,
    frame_start,
)
from rmqkit.proxy.transport.header_blocks import Headers

__all__ = ["STREAM_WINDOW", "Http2Stream", "StreamOwner", "check_request"]

STREAM_WINDOW = 1 << 20
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
# What SDKs send with every call, and what is as it should be: most headers are looked at no further.
_USUAL = frozenset(
    b"content-type user-agent grpc-timeout grpc-encoding grpc-accept-encoding accept-encoding authorization "
    b"x-mq-client-id x-mq-language x-mq-client-version x-mq-protocol x-mq-request-id x-mq-date-time"
    b" x-mq-namespace".split()
)
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))


class StreamOwner(Protocol):
    """The parts of a connection that its streams use; `Http2Connection` describes them."""

    peername: tuple[str, int]
    frame_bytes_max: int
    pending_bytes: int
    initial_window: int
    send_window: int
    taken: asyncio.Future[None] | None
    loop: asyncio.AbstractEventLoop

    def put(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def keep(self, stream: Http2Stream, count: int) -> None: ...

    def answered(self, stream: Http2Stream) -> None: ...

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None: ...

    def is_in_turn(self, stream: Http2Stream) -> bool: ...

    def wait_for_window(self, stream: Http2Stream, *, is_own: bool) -> None: ...


class Http2Stream:
    """One request and its answer; what is done with them is a subclass's.

    Attributes:
        id: the stream's number.
        since_ms: when it was opened, monotonic.
        is_request_whole: whether the peer has sent all.
        waits_for_whole: whether nothing can be done before; False for a stream of requests.
        is_over: whether nothing can be written any more.
        asked_bytes, incomplete_bytes, pending_bytes: of a request that is whole, or not whole; of an answer that waits.
        declared_bytes, received_bytes: the size of the request by its headers, -1 for none, and so far.
        receive_window: how many bytes the peer may send.
        extra_window: how many bytes may be sent to the peer beyond ``initial_window`` of the connection.
    """

    __slots__ = (
        "_connection", "_pending", "_tail", "_unread", "_written", "asked_bytes", "declared_bytes", "extra_window",
        "id", "incomplete_bytes", "is_over", "is_request_whole", "pending_bytes", "receive_window", "received_bytes",
        "since_ms", "waits_for_whole",
    )  # fmt: skip

    def __init__(self, connection: StreamOwner, stream_id: int, since_ms: float) -> None:
        self._connection = connection
        # What it may send beyond the initial window of the connection, which the peer may change at any time.
        self.extra_window = 0
        self.receive_window = STREAM_WINDOW
        self._unread = 0
        self.received_bytes = 0
        self.declared_bytes = -1
        self._pending: deque[bytes] | None = None
        self.pending_bytes = 0
        self._tail: bytes | None = None
        self._written: asyncio.Future[None] | None = None
        self.id = stream_id
        self.since_ms = since_ms
        self.is_request_whole = False
        self.waits_for_whole = True
        self.is_over = False
        self.asked_bytes = 0
        self.incomplete_bytes = 0

    # -- what a subclass does

    def opened(self, headers: Headers) -> None:
        """Take the request's headers."""

    def opened_usually(self, path: bytes, seconds: float | None, metadata: dict[str, str]) -> None:
        """`opened` with headers that ``read_usual`` has checked and read."""

    def received(self, data: bytes) -> None:
        """Take some of the request's body."""

    def ended(self) -> None:
        """Know that the request is whole."""

    def cut(self) -> None:
        """Know that nobody waits for the answer any more."""

    def overrun(self) -> None:
        """Answer that the peer has too much under way; the stream ends in any case."""

    # -- what a subclass uses

    @property
    def peername(self) -> tuple[str, int]:
        """Address and port of the other side."""
        return self._connection.peername

    def keep(self, count: int) -> None:
        """Note that some bytes of the request are kept until there are more; 0 when they are not any more."""
        self._connection.keep(self, count)

    def take(self, count: int) -> None:
        """Let the peer send as much again, as it was read; without it a stream stops at `STREAM_WINDOW`."""
        self._unread += count
        if self._unread >= STREAM_WINDOW // 2 and not self.is_request_whole and not self.is_over:
            self._connection.put(frame(WINDOW_UPDATE, 0, self.id, self._unread.to_bytes(4)))
            self.receive_window += self._unread
            self._unread = 0

    @property
    def window(self) -> int:
        """How many bytes of the answer's body would leave at once."""
        if self._pending is not None:
            return 0
        return min(self.extra_window + self._connection.initial_window, self._connection.send_window)

    def write_headers(self, block: bytes, *, ends: bool = False) -> None:
        """Send headers; nothing happens when it is over."""
        if not self.is_over:
            assert len(block) <= FRAME_BYTES_MAX, "every peer takes a frame of that size"
            self._connection.put(frame(HEADERS, END_HEADERS | END_STREAM if ends else END_HEADERS, self.id, block))
            if ends:
                self._connection.answered(self)

    def write_data(self, data: bytes) -> bool:
        """Send some of the answer's body as soon as the peer's windows allow it; whether they did at once."""
        if self.is_over:
            return True
        connection = self._connection
        size = len(data)
        window = min(self.extra_window + connection.initial_window, connection.send_window)
        if self._pending is None and size <= window and size <= connection.frame_bytes_max:
            # Both windows give, here and below: bytes taken from one alone are never granted again, and in the end
            # everything stands still.
            self.extra_window -= size
            connection.send_window -= size
            connection.put(HEAD.pack(size >> 8, size & 0xFF, DATA, 0, self.id))
            connection.put(data)
            return True
        if self._pending is None:
            self._pending = deque()
        self._pending.append(data)
        self.pending_bytes += size
        connection.pending_bytes += size
        # Who waits for the connection's window keeps its turn: those before it have waited longer.
        if not connection.is_in_turn(self):
            self.send_pending(connection)
        return self._pending is None

    def write_answer(self, head: bytes, data: bytes, tail: bytes) -> None:
        """Headers, body and trailers of an answer that is whole."""
        connection, size = self._connection, len(data)
        window = min(self.extra_window + connection.initial_window, connection.send_window)
        if self.is_over or size > window or size > connection.frame_bytes_max:
            self.write_headers(head)
            self.write_data(data)
            self.write_tail(tail)
            return
        self.extra_window -= size
        connection.send_window -= size
        stream_id = self.id.to_bytes(4)
        connection.put(
            b"".join(
                (
                    *(frame_start(len(head), HEADERS, END_HEADERS), stream_id, head),
                    *(frame_start(size, DATA, 0), stream_id, data),
                    *(frame_start(len(tail), HEADERS, END_HEADERS | END_STREAM), stream_id, tail),
                )
            )
        )
        connection.answered(self)

    def write_tail(self, block: bytes) -> None:
        """End the answer with trailers, behind what waits."""
        if self._pending is None:
            self.write_headers(block, ends=True)
        elif not self.is_over:
            self._tail = block

    @property
    def is_waiting(self) -> bool:
        """Whether something that was sent waits for the client to take it."""
        return (self._pending is not None and not self.is_over) or self._connection.taken is not None

    async def written(self) -> None:
        """Wait until what was sent has left, or nothing can any more."""
        if self._pending is not None and not self.is_over:
            if self._written is None:
                self._written = self._connection.loop.create_future()
            await asyncio.shield(self._written)
        elif (taken := self._connection.taken) is not None:
            await asyncio.shield(taken)

    def reset(self, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """End the stream; nobody is told but the peer."""
        if not self.is_over:
            self._connection.reset(self, code)

    # -- what the connection does

    def close(self) -> None:
        """End the stream: nothing can be written any more."""
        self.is_over = True
        self._pending = self._tail = None
        if self._written is not None and not self._written.done():
            self._written.set_result(None)

    def send_pending(self, connection: StreamOwner) -> None:
        """Send what the windows allow; noted is whose window it waits for, the connection's or its own."""
        pending = self._pending
        assert pending, "only who waits for a window is asked"
        while pending:
            own = self.extra_window + connection.initial_window
            # Pieces have bytes, five at least with gRPC: an empty one would look like a window without room for ever.
            size = min(own, connection.send_window, connection.frame_bytes_max, len(pending[0]))
            if size <= 0:
                # Its own window first: otherwise every update of the connection's window would ask the stream again,
                # which could not use it.
                connection.wait_for_window(self, is_own=own <= 0)
                return
            data = pending.popleft()
            if size < len(data):
                pending.appendleft(data[size:])
                data = data[:size]
            self.extra_window -= size
            connection.send_window -= size
            self.pending_bytes -= size
            connection.pending_bytes -= size
            connection.put(frame(DATA, 0, self.id, data))
        self._pending = None
        if self._written is not None and not self._written.done():
            self._written.set_result(None)
        self._written = None
        if self._tail is not None:
            self.write_headers(self._tail, ends=True)


def check_request(headers: Headers) -> int:
    """The declared size of a request, -1 for none. Raises StreamError: no HTTP/2 request has such headers."""
    declared, pseudo, is_regular = -1, set(), False
    for name, value in headers:
        if name in _USUAL:
            is_regular = True
        elif name[:1] == b":":
            if is_regular or name in pseudo or name not in _PSEUDO:
                raise StreamError(ErrorCode.PROTOCOL_ERROR)
            pseudo.add(name)
        else:
            is_regular = True
            if name in _OF_CONNECTIONS or name != name.lower() or (name == b"te" and value != b"trailers"):
                raise StreamError(ErrorCode.PROTOCOL_ERROR)
            if name == b"content-length":
                if not value.isdigit() or len(value) > 18:
                    raise StreamError(ErrorCode.PROTOCOL_ERROR)
                declared = int(value)
    values: dict[bytes, Any] = dict(headers)
    if not (pseudo >= {b":method", b":scheme", b":path"} and values[b":path"]):
        raise StreamError(ErrorCode.PROTOCOL_ERROR)
    return declared
