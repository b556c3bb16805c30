"""The port that Prometheus reads: ``GET /metrics``, and nothing else.

It serves few, small and quick requests: at most `_CONNECTIONS_MAX` at a time, a head of `_HEAD_BYTES_MAX`, one request
per connection, all of it within `_SECONDS_MAX`. Values are gathered on the loop, the text is written in a thread.
Source: behaviour.md §9.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from rmqkit.clock import Clock
from rmqkit.metrics import exposition
from rmqkit.metrics.values import Gathered, Histogram
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.server import bind
from rmqkit.remoting.tasks import Tasks

_CONNECTIONS_MAX = 16
_HEAD_BYTES_MAX = 8 << 10
_SECONDS_MAX = 30.0
_LAG_SECONDS = 0.1
_END = b"\r\n\r\n"

Gather = Callable[[], Awaitable[Gathered]]

_log = logging.getLogger(__name__)


class Exporter:
    """One such port. ``address``: where it is reached, as ``host:port``; set by `bind`."""

    def __init__(self) -> None:
        self._gather: Gather
        self._common: Mapping[str, str]
        self._requests = Tasks()
        self._tasks = Tasks()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def bind(self, host: str, port: int) -> None:
        """Take the port, a free one for 0, without serving it yet.
        Raises ListenFailed: the port is taken or the address is not this machine's."""
        self._server = await bind(self._protocol, host, port)
        self.address = join_address(advertised_ip(host), int(self._server.sockets[0].getsockname()[1]))

    async def serve(self, gather: Gather, common: Mapping[str, str], lag_ms: Histogram, clock: Clock) -> None:
        """Answer requests from now on, and watch the event loop.
        ``gather``: makes the values of the moment. ``common``: the labels that every sample has."""
        assert self._server is not None, "bind comes first"
        self._gather, self._common = gather, common
        self._tasks.start(_watch_lag(lag_ms, clock), "event loop lag")
        await self._server.start_serving()

    async def close(self) -> None:
        """Stop listening and cut what is under way."""
        if self._server is not None:
            self._server.close()
        await self._requests.close()
        await self._tasks.close()

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_HEAD_BYTES_MAX), self._connected)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._requests) < _CONNECTIONS_MAX:
            self._requests.start(self._serve(reader, writer), "metrics request")
        else:
            writer.write(_response("503 Service Unavailable", b"too many connections\n"))
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_SECONDS_MAX):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return _response("431 Request Header Fields Too Large", b"the request is too large\n")
        except asyncio.IncompleteReadError:
            return b""
        method, _, rest = head.partition(b" ")
        path, _, version = rest.partition(b"\r")[0].rpartition(b" ")
        if not version.startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this is no HTTP/1 request\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if path.partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        try:
            text = await asyncio.to_thread(exposition.exposition, await self._gather(), self._common)
        except Exception:  # noqa: BLE001 - the outer edge of a request: told once, answered as a failure
            _log.exception("metrics cannot be gathered")
            return _response("500 Internal Server Error", b"metrics cannot be gathered; see the log\n")
        return _response("200 OK", text, f"Content-Type: {exposition.CONTENT_TYPE}\r\n")


async def _watch_lag(lag_ms: Histogram, clock: Clock) -> None:
    """Ask the loop for a timer again and again, and count how late it is; for ever."""
    while True:
        due_ms = clock.monotonic_ms() + _LAG_SECONDS * 1000
        await asyncio.sleep(_LAG_SECONDS)
        lag_ms.observe(max(0.0, clock.monotonic_ms() - due_ms))


def _response(status: str, body: bytes, headers: str = "Content-Type: text/plain\r\n") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("ascii") + body
