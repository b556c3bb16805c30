"""An HTTP/2 connection for a gRPC server: frames, streams, flow control, and limits.

It is optimized for many short requests: all frames of one read are handled together, and all answers of a loop
iteration are sent in one write. Header blocks of answers are constants, which need no dynamic table.

A peer can cause much work with few bytes. Therefore there are limits for open streams, bytes of a header block, bytes
of incomplete and of unanswered requests, new streams in one loop iteration, and frames that only make work (Rapid
Reset, floods of PING, SETTINGS, CONTINUATION and empty DATA). `frames` has the format of frames, `stream` a request and
its answer. Source: RFC 9113, RFC 7541.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Unpack

from rmqkit.clock import Clock
from rmqkit.errors import RmqError
from rmqkit.protocol.core import GrpcHeaders
from rmqkit.proxy.transport.frames import (
    ACK,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY,
    HAS_PRIORITY,
    HEAD,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Http2Error,
    StreamError,
    frame,
    unpadded,
)
from rmqkit.proxy.transport.header_blocks import HeaderBlockError, Headers, header_decoder
from rmqkit.proxy.transport.stream import STREAM_WINDOW, Http2Stream, check_request
from rmqkit.remoting.connection import Link, LinkArguments
from rmqkit.remoting.limits import GRPC_CALLS_MAX

__all__ = ["Http2Connection"]

CONNECTION_WINDOW = 4 << 20
# Bytes of complete but unanswered requests; above this limit the peer may send no more.
_ASKED_BYTES_HIGH = 8 << 20
# Bytes of the incomplete requests of one connection.
_INCOMPLETE_BYTES_MAX = 64 << 20
# The approximate memory of a stream without data.
_STREAM_BYTES = 1024
_HEADER_BYTES_MAX = 16_384
_WINDOW_MAX = 0x7FFFFFFF
# Frames that only make work, within `_LABOUR_MS`. Each answered request allows one more frame.
_LABOUR_MAX = 1000
_LABOUR_MS = 10_000.0
# New streams in one loop iteration: each stream costs some 50 us, while other connections wait.
_CALLS_PER_TURN = 128
_FRAMES_PER_TURN = 2048
_RESET_KEPT = 256

_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST = range(1, 7)

_SETTING = struct.Struct(">HI")


class Http2Connection(Link):
    """The streams of one client.

    Args:
        make_stream: returns a new stream of this connection; it accepts the arguments of `Http2Stream`.
        on_read: called after the streams have received the frames of one read.
        read_usual: checks and reads the headers of a usual call; it returns None for other headers.
        streams_max: the number of streams that the client may open at a time.

    Attributes:
        peername: address and port of the client.
        frame_bytes_max: the largest frame that the client accepts.
        pending_bytes: the bytes of answers that wait for the client's windows.
        taken: a future while the client does not read; done when the client reads again.
        initial_window, send_window: number of bytes that can be sent on a new stream, and on all streams together.
    """

    def __init__(
        self,
        make_stream: Callable[[Http2Connection, int, float], Http2Stream],
        *,
        clock: Clock,
        on_read: Callable[[], None] = lambda: None,
        read_usual: Callable[[Headers], GrpcHeaders | None] | None = None,
        streams_max: int = GRPC_CALLS_MAX,
        **link: Unpack[LinkArguments],
    ) -> None:
        super().__init__(clock=clock, **link)
        self.loop = self._loop
        self._on_read = on_read
        self._read_usual = read_usual
        self._streams_max = streams_max
        self.peername = ("0.0.0.0", 0)
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.pending_bytes = 0
        self.taken: asyncio.Future[None] | None = None
        self._make_stream = make_stream
        self._decoder = header_decoder(_HEADER_BYTES_MAX)
        self._streams: dict[int, Http2Stream] = {}
        self._waiting: dict[int, Http2Stream] = {}  # wait for the connection's window
        self._stuck: dict[int, Http2Stream] = {}  # wait for their own window
        self._has_more_window = False
        self._resets: dict[int, None] = {}
        self._left = b""
        self._is_greeted = False
        self._has_settings = False
        self._is_held = False
        self._block: bytearray | None = None
        self._block_of = 0
        self._block_ends_stream = False
        self._last_id = 0
        self.send_window = self.initial_window = 65_535
        self._window = 65_535
        self._unread = 0
        self._asked_bytes = 0
        self._incomplete_bytes = 0
        self._noted_bytes = 0
        self._labour = 0
        self._labour_since_ms = 0.0
        self._calls_left = 0

    # -- Link

    @property
    def unsent_bytes(self) -> int:
        return super().unsent_bytes + self.pending_bytes

    @property
    def frame_since_ms(self) -> float | None:
        """Time when the oldest incomplete request began, or None. Streams of requests are not counted."""
        if self._block is not None or (self._left and not self._is_held):
            return self._left_since_ms
        for stream in self._streams.values():
            if stream.incomplete_bytes and stream.waits_for_whole:
                return stream.since_ms
        return None

    @frame_since_ms.setter
    def frame_since_ms(self, value: float | None) -> None:
        self._left_since_ms = value

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.hops:
            self.peername = str(self.hops[-1]), int(self.peer.rpartition(":")[2])
        settings = (
            (_MAX_STREAMS, self._streams_max),
            (_INITIAL_WINDOW, STREAM_WINDOW),
            (_MAX_HEADER_LIST, _HEADER_BYTES_MAX),
        )
        self.put(frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings)))
        # SETTINGS change only the windows of streams: without this frame the connection's window stays at 65,535 bytes.
        self.put(frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - self._window).to_bytes(4)))
        self._window = CONNECTION_WINDOW

    def plain_received(self, data: bytes) -> None:
        self._take(data)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.active_ms = self._clock.monotonic_ms()
        self._flush_due = True  # all answers made below are sent in one write at the end
        if self._tls is not None:
            try:
                data = self._tls.feed(data)
            except RmqError as error:
                self.cut(str(error))
                return
        self._take(data)
        self.flush()

    def pause_writing(self) -> None:
        # Stop reading from a client that does not read its answers: more requests would only add answers.
        self.taken = self._loop.create_future()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._let_writers_go_on()
        if self._transport is not None and not self._transport.is_closing() and not self._is_held:
            self._transport.resume_reading()

    def close(self, reason: str = "") -> None:
        """Send GOAWAY, which makes the client reconnect, and end all open requests without an answer."""
        if self.is_open:
            self._go_away(ErrorCode.NO_ERROR, reason)
            self._end_all()
        super().close(reason)

    def cut(self, reason: str) -> None:
        self._left, self._block = b"", None
        super().cut(reason)

    def probe(self) -> None:
        """Send PING, to detect a client that does not answer."""
        heard_ms = self.active_ms
        self.put(frame(PING, 0, 0, bytes(8)))
        self.flush()
        self.active_ms = heard_ms  # a write does not prove that the client is alive

    def connection_lost(self, exc: Exception | None) -> None:
        self._left, self._block = b"", None
        self._let_writers_go_on()
        self._end_all()
        super().connection_lost(exc)

    def _end_all(self) -> None:
        streams, self._streams = self._streams, {}
        self._waiting.clear()
        self._stuck.clear()
        self.pending_bytes = 0
        for stream in streams.values():
            stream.close()
            stream.cut()

    def _let_writers_go_on(self) -> None:
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(None)
        self.taken = None

    # -- reading

    def _take(self, data: bytes) -> None:
        """Handle the bytes of a read, up to the bounds of one loop iteration."""
        is_new = not self._left
        if not is_new:
            data = self._left + data
        if self._is_held or not self.is_open:
            self._left = data  # reading is paused, but earlier reads are still delivered
            return
        self._calls_left = _CALLS_PER_TURN
        try:
            try:
                at, self._is_held = self._read_frames(data)
            finally:
                # Call it also if a frame ends the connection: the requests of earlier frames were collected already.
                self._on_read()
        except Http2Error as error:
            self._give_up(error)
            return
        self._left = data[at:] if at < len(data) else b""
        if self._is_held:
            if self._transport is not None:
                self._transport.pause_reading()
            self._loop.call_soon(self._go_on)
        elif self._left and (at or is_new):
            self._left_since_ms = self.active_ms
        if self._has_more_window:
            self._has_more_window = False
            self._send_waiting()
        self._note_incomplete()

    def _go_on(self) -> None:
        """Handle the rest of a read in the next loop iteration."""
        self._is_held = False
        if not self.is_open:
            return
        self._flush_due = True
        self._take(b"")
        self.flush()
        if not self._is_held and self.taken is None and self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def _read_frames(self, data: bytes) -> tuple[int, bool]:
        """Handle the complete frames in ``data``. Return the position of the first frame that was not handled. Also
        return True if the bounds of one loop iteration were reached, or False if this frame is incomplete."""
        at, size = 0, len(data)
        if not self._is_greeted:
            if data[: len(PREFACE)] != PREFACE[:size]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"it begins with {data[:24]!r}, which is not HTTP/2")
            if size < len(PREFACE):
                return 0, False
            self._is_greeted, at = True, len(PREFACE)
        frames_left = _FRAMES_PER_TURN
        while size - at >= 9:
            high, low, kind, flags, stream_id = HEAD.unpack_from(data, at)
            length, stream_id = high << 8 | low, stream_id & 0x7FFFFFFF
            # Checked before the rest of the frame arrives, so that a refused frame is never buffered.
            if length > FRAME_BYTES_MAX:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, over {FRAME_BYTES_MAX}")
            end = at + 9 + length
            if end > size:
                break
            if not self._calls_left or not frames_left:
                return at, True
            frames_left -= 1
            try:
                self._handle(kind, flags, stream_id, data[at + 9 : end])
            except StreamError as error:
                self._end_stream(stream_id, error.code)
            at = end
        return at, False

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        # A frame between the pieces of a header block would be read while the tables of both sides differ.
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block_of):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "another frame arrived within a header block")
        if not self._has_settings and kind != SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"the first frame is of type {kind}, not SETTINGS")
        if kind < len(self._HANDLERS):
            self._HANDLERS[kind](self, flags, stream_id, payload)
        else:
            self._count_labour()  # unknown types are ignored (RFC 9113 §4.1)

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "DATA on stream 0")
        size = len(payload)
        # Count the whole payload, including padding and DATA on closed streams: the peer has subtracted it from its
        # window, which would otherwise remain smaller for ever.
        self._window -= size
        if self._window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        self._unread += size
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_request_whole:
            self._grant()
            if stream is None and stream_id in self._resets:
                return  # the peer sent the frame before it received RST_STREAM
            self._must_be_open(stream_id)
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id}, which has ended")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamError(ErrorCode.FLOW_CONTROL_ERROR)
        if flags & PADDED:
            payload = unpadded(payload)
            # The stream does not read the padding, so let the peer send as many bytes again.
            stream.take(size - len(payload))
        if payload:
            stream.received_bytes += len(payload)
            stream.received(payload)
        elif not flags & END_STREAM:
            self._count_labour()
        if flags & END_STREAM and not stream.is_over:
            self._request_ended(stream)
        self._grant()

    def _request_ended(self, stream: Http2Stream) -> None:
        if 0 <= stream.declared_bytes != stream.received_bytes:
            raise StreamError(ErrorCode.PROTOCOL_ERROR)
        stream.is_request_whole = True
        self.keep(stream, 0)
        stream.asked_bytes = stream.received_bytes
        self._asked_bytes += stream.received_bytes
        stream.ended()

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}, which is not a client's")
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            depends_on = int.from_bytes(payload[:4]) & 0x7FFFFFFF
            payload = payload[5:]
            if depends_on == stream_id:
                self._last_id = max(self._last_id, stream_id)
                self._decode(payload)  # the tables of both sides must stay equal
                raise StreamError(ErrorCode.PROTOCOL_ERROR)
        if flags & END_HEADERS:
            self._header_block(stream_id, payload, bool(flags & END_STREAM))
        else:
            self._block, self._block_of = bytearray(payload), stream_id
            self._block_ends_stream = bool(flags & END_STREAM)
            self._left_since_ms = self.active_ms

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if not payload:
            self._count_labour()
        self._block += payload
        if len(self._block) > 2 * _HEADER_BYTES_MAX:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of more than {2 * _HEADER_BYTES_MAX} bytes")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._header_block(stream_id, block, self._block_ends_stream)

    def _header_block(self, stream_id: int, block: bytes, ends: bool) -> None:
        # Decode first, even for refused or closed streams: all blocks of a connection share one table, and a skipped
        # block would make the later blocks unreadable.
        headers = self._decode(block)
        stream = self._streams.get(stream_id)
        if stream is not None:  # trailers, which gRPC does not use in requests
            if stream.is_request_whole:
                raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which has ended")
            if not ends or any(name[:1] == b":" or name != name.lower() for name, _ in headers):
                raise StreamError(ErrorCode.PROTOCOL_ERROR)
            self._request_ended(stream)
            return
        if stream_id <= self._last_id:
            if stream_id in self._resets:
                return
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which has ended")
        # Set before the stream may be refused: the peer has opened it, so later frames on it are not an error.
        self._last_id = stream_id
        self._calls_left -= 1
        if len(self._streams) >= self._streams_max:
            self._count_labour()
            raise StreamError(ErrorCode.REFUSED_STREAM)
        usual = None if self._read_usual is None else self._read_usual(headers)
        declared = check_request(headers) if usual is None else -1
        stream = self._make_stream(self, stream_id, self.active_ms)
        stream.declared_bytes = declared
        stream.is_request_whole = ends
        # Add the stream before `opened`, which may answer immediately: `_forget` must find the stream.
        self._streams[stream_id] = stream
        if usual is None:
            stream.opened(headers)
        else:
            stream.opened_usually(*usual)
        if stream.is_over:
            return
        if ends:
            self._request_ended(stream)
        else:
            self.keep(stream, 0)

    def _decode(self, block: bytes) -> Headers:
        try:
            return self._decoder.decode(block)
        except HeaderBlockError as error:
            code = ErrorCode.ENHANCE_YOUR_CALM if error.is_too_large else ErrorCode.COMPRESSION_ERROR
            raise Http2Error(code, str(error)) from None

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        more = int.from_bytes(payload) & _WINDOW_MAX
        if not stream_id:
            if not more:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self.send_window += more
            if self.send_window > _WINDOW_MAX:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is over 2^31 - 1")
            self._has_more_window = True
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            # The peer sent the frame before it saw the end of the stream.
            self._must_be_open(stream_id)
            return
        stream.extra_window += more
        if not more:
            raise StreamError(ErrorCode.PROTOCOL_ERROR)
        if stream.extra_window + self.initial_window > _WINDOW_MAX:
            raise StreamError(ErrorCode.FLOW_CONTROL_ERROR)
        if self._stuck.pop(stream_id, None) is not None:
            stream.send_pending(self)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on stream {stream_id}")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._has_settings = True
        if flags & ACK:
            return
        self._count_labour()
        for key, value in _SETTING.iter_unpack(payload):
            if key == _INITIAL_WINDOW:
                if value > _WINDOW_MAX:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value}")
                # The value also moves the windows of open streams, even below zero (RFC 9113 §6.9.2). Therefore a
                # stream stores only its difference from this value.
                self.initial_window = value
                # Update the streams once, at the end of the read: a visit of all streams for each frame would let a
                # peer cause much work.
                self._waiting.update(self._stuck)
                self._stuck.clear()
                self._has_more_window = True
            elif key == _MAX_FRAME:
                if not 16_384 <= value <= 16_777_215:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of up to {value} bytes")
                # Larger frames would only delay other streams.
                self.frame_bytes_max = min(value, 1 << 20)
            elif key == _ENABLE_PUSH and value > 1:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
        self.put(frame(SETTINGS, ACK, 0))

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"PING on stream {stream_id}")
        if len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & ACK:
            self._count_labour()
            self.put(frame(PING, ACK, 0, payload))

    def _peer_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        self._must_be_open(stream_id)
        self._count_labour()
        # Every RST_STREAM is counted: opening and resetting streams is cheap for a peer (Rapid Reset, CVE-2023-44487).
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            stream.cut()

    def _peer_goes(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on stream {stream_id}")

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._count_labour()
        if len(payload) != 5:
            raise StreamError(ErrorCode.FRAME_SIZE_ERROR)
        if int.from_bytes(payload[:4]) & 0x7FFFFFFF == stream_id:
            raise StreamError(ErrorCode.PROTOCOL_ERROR)

    def _must_be_open(self, stream_id: int) -> None:
        """Raise Http2Error if the client has not opened the stream, or is not allowed to open a stream with this
        number."""
        if not stream_id or stream_id > self._last_id or not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} was not opened")

    def _count_labour(self) -> None:
        """Count a frame that only makes work. Raises Http2Error: too many such frames."""
        if self.active_ms - self._labour_since_ms > _LABOUR_MS:
            self._labour, self._labour_since_ms = 0, self.active_ms
        self._labour += 1
        if self._labour > _LABOUR_MAX:
            text = f"more than {_LABOUR_MAX} frames in {_LABOUR_MS / 1000:.0f} s that only make work"
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, text)

    def _give_up(self, error: Http2Error) -> None:
        self._left, self._block = b"", None
        self._go_away(error.code, str(error))
        self.flush()
        self._closed_because = str(error)
        # Not `self.close`: it would send a second GOAWAY with NO_ERROR, and the client would mistake its own error for
        # a restart of the server.
        Link.close(self, str(error))

    def _go_away(self, code: ErrorCode, text: str) -> None:
        debug = text.encode("utf-8", "replace")[:200]
        self.put(frame(GOAWAY, 0, 0, self._last_id.to_bytes(4) + code.to_bytes(4) + debug))

    # -- bytes of requests

    def keep(self, stream: Http2Stream, count: int) -> None:
        """Set the number of bytes of an incomplete request that a stream stores."""
        if stream.waits_for_whole and not stream.is_request_whole:
            count += _STREAM_BYTES
        self._incomplete_bytes += count - stream.incomplete_bytes
        stream.incomplete_bytes = count
        assert self._incomplete_bytes >= 0, "no more bytes are released than were stored"
        if self._incomplete_bytes > _INCOMPLETE_BYTES_MAX and not stream.is_over:
            stream.overrun()
            if not stream.is_over:
                self._end_stream(stream.id, ErrorCode.ENHANCE_YOUR_CALM)

    def _note_incomplete(self) -> None:
        """Report the incomplete bytes of this connection to the limits of all connections."""
        kept = self._incomplete_bytes + len(self._left) + (len(self._block) if self._block is not None else 0)
        if self._limits is not None and kept != self._noted_bytes and self._transport is not None:
            self._limits.note_incomplete(self, kept, is_new=not self._noted_bytes)
            self._noted_bytes = kept

    def _grant(self) -> None:
        """Let the peer send as many bytes as were read, unless too many bytes of requests are unanswered."""
        if self._unread >= CONNECTION_WINDOW // 2 and self._asked_bytes <= _ASKED_BYTES_HIGH:
            self.put(frame(WINDOW_UPDATE, 0, 0, self._unread.to_bytes(4)))
            self._window += self._unread
            self._unread = 0

    # -- writing

    def put(self, data: bytes) -> None:
        """Send a frame with the other frames of this loop iteration."""
        self._unsent.append(data)
        if not self._flush_due:
            self._flush_soon()

    def _send_waiting(self) -> None:
        """Send the answers that wait for the connection's window, in order, while the window has room."""
        while self._waiting and self.send_window > 0:
            stream = self._waiting.pop(next(iter(self._waiting)))
            stream.send_pending(self)

    def answered(self, stream: Http2Stream) -> None:
        """End a stream after its whole answer was sent."""
        self._labour -= self._labour > 0
        if not stream.is_request_whole:
            self._reset(stream.id, ErrorCode.NO_ERROR)  # the rest of the request is not read
        self._forget(stream)

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        """End a stream and send RST_STREAM. The stream's `cut` is not called."""
        self._reset(stream.id, code)
        self._forget(stream)

    def is_in_turn(self, stream: Http2Stream) -> bool:
        """Return True if a stream waits for the connection's window."""
        return stream.id in self._waiting

    def wait_for_window(self, stream: Http2Stream, *, is_own: bool) -> None:
        """Register a stream that waits for its own window (``is_own``), or for the connection's window."""
        (self._stuck if is_own else self._waiting)[stream.id] = stream

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        self.put(frame(RST_STREAM, 0, stream_id, code.to_bytes(4)))
        self._resets[stream_id] = None
        if len(self._resets) > _RESET_KEPT:
            del self._resets[next(iter(self._resets))]

    def _end_stream(self, stream_id: int, code: ErrorCode) -> None:
        self._count_labour()
        self._reset(stream_id, code)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            stream.cut()

    def _forget(self, stream: Http2Stream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        self._waiting.pop(stream.id, None)
        self._stuck.pop(stream.id, None)
        self.pending_bytes -= stream.pending_bytes
        stream.pending_bytes = 0
        self._incomplete_bytes -= stream.incomplete_bytes
        stream.incomplete_bytes = 0
        self._asked_bytes -= stream.asked_bytes
        stream.asked_bytes = 0
        assert self.pending_bytes >= 0 <= self._asked_bytes, "no more bytes are released than were stored"
        stream.close()
        self._grant()

    # The handlers, by the type of a frame.
    _HANDLERS = (
        _data,
        _headers,
        _priority,
        _peer_reset,
        _settings,
        _push_promise,
        _ping,
        _peer_goes,
        _window_update,
        _continuation,
    )
