"""An HTTP/2 stream: a request, its answer, and the flow control of the answer.

Two windows limit the data that a stream sends: its own and the connection's. Data that fits into both windows is sent
immediately. Other data waits, in order, for the window that was too small (`send_pending`). `check_request` checks the
headers that open a stream. `http2` reads the frames of a stream. Source: RFC 9113 §5.2, §6.9, §8.3.
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
# Headers that SDKs send with every call; they need no further check.
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
    """One request and its answer. A subclass reads the request and writes the answer.

    Attributes:
        id: the stream's number.
        since_ms: monotonic time when the stream was opened.
        is_request_whole: True after the peer has sent the whole request.
        waits_for_whole: True if the request is handled when it is whole; False for a stream of requests.
        is_over: True after the stream has ended; nothing can be written then.
        asked_bytes, incomplete_bytes: size of a whole request, and of the stored part of an incomplete request.
        pending_bytes: size of the part of the answer that waits for a window.
        declared_bytes: the size that the headers of the request declare, -1 for none.
        received_bytes: the bytes of the request's body so far.
        receive_window: number of bytes that the peer may send.
        extra_window: number of bytes that can be sent to the peer, in addition to the connection's ``initial_window``.
    """

    __slots__ = (
        "_connection", "_pending", "_tail", "_unread", "_written", "asked_bytes", "declared_bytes", "extra_window",
        "id", "incomplete_bytes", "is_over", "is_request_whole", "pending_bytes", "receive_window", "received_bytes",
        "since_ms", "waits_for_whole",
    )  # fmt: skip

    def __init__(self, connection: StreamOwner, stream_id: int, since_ms: float) -> None:
        self._connection = connection
        # Relative to the initial window of the connection, because the peer may change the initial window at any time.
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

    # -- implemented by subclasses

    def opened(self, headers: Headers) -> None:
        """Handle the request's headers."""

    def opened_usually(self, path: bytes, seconds: float | None, metadata: dict[str, str]) -> None:
        """Handle the request's headers, which ``read_usual`` has checked and read."""

    def received(self, data: bytes) -> None:
        """Handle a part of the request's body."""

    def ended(self) -> None:
        """Handle the whole request."""

    def cut(self) -> None:
        """Stop the work on the request: the client does not wait for the answer any more."""

    def overrun(self) -> None:
        """Answer that the client has too many requests in progress. The connection ends the stream afterwards."""

    # -- called by subclasses

    @property
    def peername(self) -> tuple[str, int]:
        """Address and port of the client."""
        return self._connection.peername

    def keep(self, count: int) -> None:
        """Set the number of stored bytes of the incomplete request; 0 after all bytes were handled."""
        self._connection.keep(self, count)

    def take(self, count: int) -> None:
        """Let the peer send ``count`` more bytes. Without this call a stream stops after `STREAM_WINDOW` bytes."""
        self._unread += count
        if self._unread >= STREAM_WINDOW // 2 and not self.is_request_whole and not self.is_over:
            self._connection.put(frame(WINDOW_UPDATE, 0, self.id, self._unread.to_bytes(4)))
            self.receive_window += self._unread
            self._unread = 0

    @property
    def window(self) -> int:
        """Number of bytes of the answer's body that can be sent immediately."""
        if self._pending is not None:
            return 0
        return min(self.extra_window + self._connection.initial_window, self._connection.send_window)

    def write_headers(self, block: bytes, *, ends: bool = False) -> None:
        """Send headers, unless the stream has ended."""
        if not self.is_over:
            assert len(block) <= FRAME_BYTES_MAX, "every peer accepts a frame of this size"
            self._connection.put(frame(HEADERS, END_HEADERS | END_STREAM if ends else END_HEADERS, self.id, block))
            if ends:
                self._connection.answered(self)

    def write_data(self, data: bytes) -> bool:
        """Send a part of the answer's body as soon as the peer's windows allow it. Return False if a part must wait."""
        if self.is_over:
            return True
        connection = self._connection
        size = len(data)
        window = min(self.extra_window + connection.initial_window, connection.send_window)
        if self._pending is None and size <= window and size <= connection.frame_bytes_max:
            # Subtract from both windows, here and below: the peer adds the bytes to both windows again.
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
        # A stream that waits for the connection's window keeps its place: the streams before it have waited longer.
        if not connection.is_in_turn(self):
            self.send_pending(connection)
        return self._pending is None

    def write_answer(self, head: bytes, data: bytes, tail: bytes) -> None:
        """Send headers, body and trailers of a whole answer."""
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
        """End the answer with trailers, after the part of the body that still waits."""
        if self._pending is None:
            self.write_headers(block, ends=True)
        elif not self.is_over:
            self._tail = block

    @property
    def is_waiting(self) -> bool:
        """Return True if a part of the answer waits for the client to read."""
        return (self._pending is not None and not self.is_over) or self._connection.taken is not None

    async def written(self) -> None:
        """Wait until the answer so far was sent or the stream has ended."""
        if self._pending is not None and not self.is_over:
            if self._written is None:
                self._written = self._connection.loop.create_future()
            await asyncio.shield(self._written)
        elif (taken := self._connection.taken) is not None:
            await asyncio.shield(taken)

    def reset(self, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """End the stream and send RST_STREAM. `cut` is not called."""
        if not self.is_over:
            self._connection.reset(self, code)

    # -- called by the connection

    def close(self) -> None:
        """End the stream and drop the part of the answer that waits."""
        self.is_over = True
        self._pending = self._tail = None
        if self._written is not None and not self._written.done():
            self._written.set_result(None)

    def send_pending(self, connection: StreamOwner) -> None:
        """Send as much as the windows allow, and register the rest at the window that was too small."""
        pending = self._pending
        assert pending, "the stream waits for a window"
        while pending:
            own = self.extra_window + connection.initial_window
            # No piece is empty (gRPC sends at least five bytes): an empty piece would look like an empty window.
            size = min(own, connection.send_window, connection.frame_bytes_max, len(pending[0]))
            if size <= 0:
                # The stream's own window comes first: otherwise each update of the connection's window would call a
                # stream that cannot use it.
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
    """Return the declared size of a request, -1 for none. Raises StreamError: HTTP/2 forbids these headers."""
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
