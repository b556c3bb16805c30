"""gRPC calls over HTTP/2: paths, message framing, deadlines, statuses, and the endpoint's answers.

A request with one message is handled when it is complete. The messages of a stream are handled when they arrive.
Requests are decoded here: a request that cannot be decoded must end its call, as in other gRPC servers.
Source: gRPC over HTTP/2 (its protocol description), grpc.md §1, §2.1.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Unpack

from rmqkit.clock import Clock
from rmqkit.core import CORE
from rmqkit.proxy.schema.messages import SERVICE, DecodeError, Method
from rmqkit.proxy.service.clients import CallEnded
from rmqkit.proxy.service.endpoint import Endpoint, StreamFailed
from rmqkit.proxy.transport.field_count import FIELDS_MAX, is_within
from rmqkit.proxy.transport.frames import FRAME_BYTES_MAX
from rmqkit.proxy.transport.header_blocks import Headers, header_block, header_decoder
from rmqkit.proxy.transport.http2 import Http2Connection
from rmqkit.proxy.transport.stream import STREAM_WINDOW, Http2Stream
from rmqkit.remoting.connection import LinkArguments
from rmqkit.remoting.limits import GRPC_CALLS_MAX

__all__ = ["GrpcService"]

_MESSAGE_BYTES_MAX = 16 << 20
_TEXT_MAX = 2000
_OK, _INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED, _INTERNAL = 0, 3, 8, 12, 13
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_INFLATED_BY = {b"gzip": 31, b"deflate": 15}
_CONTENT_TYPE = (b"content-type", b"application/grpc")
# ``:status`` 200 is the only header of gRPC in the static table.
_HEAD_BLOCK = b"\x88" + header_block([_CONTENT_TYPE, (b"grpc-accept-encoding", b"identity,deflate,gzip")])
_OK_BLOCK = header_block([(b"grpc-status", b"0")])
# The metadata that the service uses.
_METADATA = [
    (name.encode(), name)
    for name in ("x-mq-client-id", "x-mq-language", "x-mq-client-version", "x-mq-date-time", "authorization")
]
_SHOWN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

_log = logging.getLogger(__name__)

header_decoder(0)  # reports missing packages now, not at the first connection


class _Fault(Exception):
    """A request that is not valid gRPC or is too large: its call ends with a gRPC status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class GrpcService:
    """The shared state of an endpoint's connections. ``calls_max``: the number of calls of a connection at a time."""

    def __init__(self, endpoint: Endpoint, *, calls_max: int = GRPC_CALLS_MAX) -> None:
        self.endpoint = endpoint
        self._calls_max = calls_max
        self.methods = {f"/{SERVICE}/{method.name}".encode(): method for method in endpoint.methods}
        self._read_usual = CORE.read_grpc_call

    def connection(self, *, clock: Clock, **link: Unpack[LinkArguments]) -> Http2Connection:
        """Return a connection whose streams are calls."""
        return Http2Connection(
            partial(_GrpcCall, self),
            clock=clock,
            on_read=self.endpoint.handle_gathered,
            read_usual=self._read_usual,
            streams_max=self._calls_max,
            **link,
        )


class _GrpcCall(Http2Stream):
    """One call, with the interface for the service (`rmqkit.proxy.service.clients.Call`) and for HTTP/2."""

    __slots__ = ("_came", "_deadline", "_has_head", "_inflated_by", "_kept", "_method", "_more", "_parts",
                 "_queued_bytes", "_service", "_task", "_untaken", "_wanted", "metadata")  # fmt: skip

    def __init__(self, service: GrpcService, *stream: Any) -> None:
        super().__init__(*stream)
        self._service = service
        self._method: Method | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._inflated_by = 0
        self._has_head = False
        self._parts: list[bytes] = []
        self._kept = 0
        self._wanted = 0
        self._untaken = 0
        self._queued_bytes = 0
        self._came: deque[bytes] | None = None
        self._more: asyncio.Future[None] | None = None
        self.metadata: dict[str, str] = {}

    # -- called by the service

    def seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._connection.loop.time()

    async def write(self, message: Any) -> None:
        """Send one message of the answer. Raises CallEnded: the client has ended the call, or did not read in time."""
        self._send(message.SerializeToString())
        await self._left()

    async def write_framed(self, frames: list[bytes]) -> int:
        """Send as many of the framed messages as the windows allow, at least one. Return the number of sent messages.
        Raises CallEnded, like `write`: the client has received none of these messages."""
        window, count = self.window, 0
        for one in frames:
            window -= len(one)
            if window < 0:
                break
            count += 1
        count = max(1, count)
        self._send_framed(frames[0] if count == 1 else b"".join(frames[:count]))
        await self._left()
        return count

    async def _left(self) -> None:
        """Wait until the client has read the sent data, if its windows are full. Raises CallEnded."""
        if self.is_waiting:
            try:
                async with asyncio.timeout(self.seconds_left()):
                    await self.written()
            except TimeoutError:
                self.reset()
                raise CallEnded("the client has not taken the answer before the deadline") from None
        if self.is_over:
            raise CallEnded("the client has ended the call, or its connection has closed")

    # -- called by the HTTP/2 connection

    def opened(self, headers: Headers) -> None:
        found = dict(headers)
        if found[b":method"] != b"POST":
            self.write_headers(header_block([(b":status", b"405")]), ends=True)
        elif not found.get(b"content-type", b"").startswith(b"application/grpc"):
            self.write_headers(header_block([(b":status", b"415")]), ends=True)
        elif (method := self._service.methods.get(found[b":path"])) is None:
            self._finish(_UNIMPLEMENTED, f"Method not found: {_text(found[b':path'])}")
        else:
            self.metadata = {key: _text(found[name]) for name, key in _METADATA if name in found}
            try:
                self._read_own_headers(found)
            except _Fault as fault:
                self._finish(fault.code, str(fault))
                return
            self._begin(method)

    def opened_usually(self, path: bytes, seconds: float | None, metadata: dict[str, str]) -> None:
        method = self._service.methods.get(path)
        if method is None:
            self._finish(_UNIMPLEMENTED, f"Method not found: {_text(path)}")
            return
        self.metadata = metadata
        if seconds is not None:
            self._deadline = self._connection.loop.time() + seconds
        self._begin(method)

    def received(self, data: bytes) -> None:
        try:
            self._split(data)
        except _Fault as fault:
            self._parts.clear()
            if self._task is None:
                self._finish(fault.code, str(fault))
            else:
                self._abort(fault)

    def ended(self) -> None:
        method, came = self._method, self._came
        assert method is not None, "an open call has a method"
        if method.streams_requests:
            self._tell()
        elif self._kept or came is None or len(came) != 1:
            count = 0 if came is None else len(came)
            self._finish(_INTERNAL, f"{method.name}: one whole message is wanted, {count} and {self._kept} bytes came")
        elif method.streams_responses:
            self._start(self._receive, method, came.popleft())
        else:
            content = came.popleft()
            is_small = is_within(method.request.DESCRIPTOR, content)
            if not is_small or not self._service.endpoint.answer_at_once(method, self, content, self._answer):
                self._start(self._unary, method, content)

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def overrun(self) -> None:
        self._finish(_RESOURCE_EXHAUSTED, "the incomplete requests of this connection take too much memory")

    # -- inside

    def _begin(self, method: Method) -> None:
        self._method = method
        if method.streams_requests:
            self.waits_for_whole = False
            self._came = deque()
            self._start(self._telemetry, method)

    def _read_own_headers(self, found: dict[bytes, bytes]) -> None:
        """Read deadline and compression. Raises _Fault."""
        timeout = found.get(b"grpc-timeout")
        if timeout is not None:
            number, unit = timeout[:-1], _text(timeout[-1:])
            if not number.isdigit() or len(number) > 8 or unit not in _SECONDS:
                raise _Fault(_INTERNAL, f"Invalid grpc-timeout: {_text(timeout)}")
            self._deadline = self._connection.loop.time() + int(number) * _SECONDS[unit]
        encoding = found.get(b"grpc-encoding", b"identity")
        if encoding != b"identity":
            if encoding not in _INFLATED_BY:
                raise _Fault(_UNIMPLEMENTED, f"Decompressor is not installed for grpc-encoding: {_text(encoding)}")
            self._inflated_by = _INFLATED_BY[encoding]

    def _split(self, data: bytes) -> None:
        """Split received data into messages: a flag, a length, content. Raises _Fault."""
        size = len(data)
        self._untaken += size
        if not self._kept and size > 5 and size - 5 == int.from_bytes(data[1:5]):  # one frame, one message: usual
            self._message(data[0], data[5:])
            self._let_more_come()
            return
        if self._kept:
            self._parts.append(data)
            self._kept += len(data)
            data = b"" if self._kept < self._wanted else b"".join(self._parts)  # join once, not for each frame
        if data:
            self._parts.clear()
            at, size = 0, len(data)
            while size - at >= 5:
                length = int.from_bytes(data[at + 1 : at + 5])
                if length > _MESSAGE_BYTES_MAX:
                    text = f"Received message larger than max ({length} vs. {_MESSAGE_BYTES_MAX})"
                    raise _Fault(_RESOURCE_EXHAUSTED, text)
                if size - at - 5 < length:
                    break
                self._message(data[at], data[at + 5 : at + 5 + length])
                at += 5 + length
            self._kept = size - at
            self._wanted = 5 + int.from_bytes(data[at + 1 : at + 5]) if self._kept >= 5 else 5
            if self._kept:
                self._parts.append(data[at:] if at else data)
        if self._kept or self.incomplete_bytes:
            self.keep(self._kept)
        self._let_more_come()

    def _let_more_come(self) -> None:
        """Let the client send more, unless too many received bytes are not handled yet."""
        if self._queued_bytes <= STREAM_WINDOW:
            self.take(self._untaken)
            self._untaken = 0

    def _message(self, flag: int, content: bytes) -> None:
        """Queue one message. Raises _Fault: unannounced compression, too large, or a second message."""
        if flag:
            if flag != 1 or not self._inflated_by:
                raise _Fault(_INTERNAL, f"a message has the compressed flag {flag} and no grpc-encoding")
            content = _inflate(content, self._inflated_by)
        if self._came is None:
            self._came = deque()
        elif self.waits_for_whole and self._came:
            raise _Fault(_INTERNAL, "more than one message in a request that has one")
        self._came.append(content)
        self._queued_bytes += len(content)
        self._tell()

    def _tell(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _messages(self, method: Method) -> AsyncIterator[Any]:
        """Yield the messages of a stream of requests. Raises _Fault."""
        came = self._came
        assert came is not None, "a stream of requests has a queue"
        while True:
            while came:
                content = came.popleft()
                self._queued_bytes -= len(content)
                self._let_more_come()
                yield _parsed(method, content)
                await asyncio.sleep(0)  # many messages in one read must not block other tasks
            if self.is_request_whole or self.is_over:
                if self._kept:
                    raise _Fault(_INTERNAL, f"{method.name}: the stream ends within a message")
                return
            self._more = self._connection.loop.create_future()
            await self._more

    def _start(self, answering: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        self._task = self._connection.loop.create_task(self._ending(answering, *arguments))

    async def _ending(self, answering: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        """Answer the call, and end it with its status."""
        try:
            await answering(*arguments)
        except _Fault as fault:
            self._finish(fault.code, str(fault))
        except CallEnded as ended:
            _log.info("a call of %s ended before the answer: %s", self.peername[0], ended)
        except Exception:  # noqa: BLE001 - the outer edge of a call: answered and logged once
            assert self._method is not None, "only known methods are started"
            _log.exception("%s of %s failed", self._method.name, self.peername[0])
            self._finish(_INTERNAL, "the server failed: see its log")

    async def _unary(self, method: Method, content: bytes) -> None:
        answer = await self._service.endpoint.unary(method, self, _parsed(method, content))
        self._answer(answer.SerializeToString())

    def _answer(self, content: bytes) -> None:
        self.write_answer(_HEAD_BLOCK, b"\0" + len(content).to_bytes(4) + content, _OK_BLOCK)

    async def _receive(self, method: Method, content: bytes) -> None:
        await self._service.endpoint.receive(method, self, _parsed(method, content), self.write, self.write_framed)
        self._finish(_OK, "")
        self._connection.flush()  # not in the next loop iteration, because the client has waited for long

    async def _telemetry(self, method: Method) -> None:
        try:
            await self._service.endpoint.telemetry(self, self._messages(method), self.write)
        except StreamFailed as error:
            raise _Fault(_INVALID_ARGUMENT if error.is_argument else _INTERNAL, str(error)) from None
        self._finish(_OK, "")

    def _abort(self, fault: _Fault) -> None:
        """End an active call."""
        self._finish(fault.code, str(fault))
        self.cut()

    def _send(self, content: bytes) -> None:
        self._send_framed(b"\0" + len(content).to_bytes(4) + content)

    def _send_framed(self, data: bytes) -> None:
        if not self._has_head:
            self._has_head = True
            self.write_headers(_HEAD_BLOCK)
        self.write_data(data)

    def _finish(self, code: int, text: str) -> None:
        """End the call with a status. An answer without messages has the status in its only block of headers."""
        if code == _OK:
            block = _OK_BLOCK
        else:
            quoted = urllib.parse.quote(text[:_TEXT_MAX], safe=_SHOWN).encode()[: FRAME_BYTES_MAX // 2]
            block = header_block([(b"grpc-status", b"%d" % code), (b"grpc-message", quoted)])
        self.write_tail(block if self._has_head else _HEAD_BLOCK + block)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _parsed(method: Method, content: bytes) -> Any:
    """Decode the message of a request. Raises _Fault."""
    if not is_within(method.request.DESCRIPTOR, content):
        raise _Fault(_RESOURCE_EXHAUSTED, f"{method.name}: Received message with more than {FIELDS_MAX} fields")
    try:
        return method.request.FromString(content)
    except DecodeError as error:
        raise _Fault(_INTERNAL, f"{method.name}: Invalid protobuf byte sequence: {error}") from None


def _inflate(content: bytes, window_bits: int) -> bytes:
    """Decompress a message. Raises _Fault: it is damaged or too large."""
    inflating = zlib.decompressobj(window_bits)
    try:
        # One byte more than the limit distinguishes a message that is too large from a message that is cut off.
        plain = inflating.decompress(content, _MESSAGE_BYTES_MAX + 1)
    except zlib.error as error:
        raise _Fault(_INTERNAL, f"a compressed message cannot be read: {error}") from None
    if len(plain) > _MESSAGE_BYTES_MAX:
        raise _Fault(_RESOURCE_EXHAUSTED, f"Received message larger than max {_MESSAGE_BYTES_MAX}")
    if not inflating.eof:
        raise _Fault(_INTERNAL, "a compressed message is not whole")
    return plain
