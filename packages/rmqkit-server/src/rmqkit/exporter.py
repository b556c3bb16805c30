"""Metrics of requests, and the port from which Prometheus reads metrics. The port serves only ``GET /metrics``.

The port has limits: `_CONNECTIONS_MAX` connections, `_HEAD_BYTES_MAX` for the head of a request, one request per
connection, and `_SECONDS_MAX` for reading a request and writing its answer. At the limit of connections, a new
connection replaces the oldest connection that has sent no request, so that idle connections do not block Prometheus.
Values are gathered on the loop. A thread writes the text.

A `MeteredConnection` measures the time until answers; a server uses it in place of a plain connection while metrics are
exported. The time of a request begins with the read of the request (`Connection.active_ms`). If requests are answered
in the same loop iteration, their time stops with the one write of all these answers: the connection reads no clock for
each request. If a request is answered later, the connection stores the request and its time by opaque. Answers that are
sent as encoded frames (`send_frame`) are counted by the code that makes these frames. Use this module only on the event
loop.
Source: behaviour.md §9.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmqkit import extras
from rmqkit.clock import Clock
from rmqkit.metrics import CONTENT_TYPE, Gathered, Histogram, RpcLatency, exposition
from rmqkit.protocol.command import RESPONSE, Command, Frame, decode_command
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.listening import ListeningPort
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tasks import Tasks

_CONNECTIONS_MAX = 16
_HEAD_BYTES_MAX = 8 << 10
_SECONDS_MAX = 30.0
_LAG_SECONDS = 0.1
_END = b"\r\n\r\n"

Gather = Callable[[], Awaitable[Gathered]]

_log = logging.getLogger(__name__)


class Exporter:
    """The port for Prometheus. ``address``: the address of the port, as ``host:port``; set by `bind`."""

    def __init__(self) -> None:
        self._gather: Gather
        self._common: Mapping[str, str]
        self._requests = Tasks()
        self._silent: dict[asyncio.StreamWriter, None] = {}
        self._tasks = Tasks()
        self._port: ListeningPort | None = None
        self.address = ""

    async def bind(self, host: str, port: int) -> None:
        """Bind the port, without serving it yet; 0 means a free port.
        Raises ListenFailed: the port is in use, or the address is not local. Raises ExtraMissing."""
        with extras.needed("server", "metricsExporterType=PROM"):
            import prometheus_client  # noqa: F401 - writes the text of the first answer
        self._port = await ListeningPort.bind(self._protocol, host, port)
        self.address = join_address(advertised_ip(host), self._port.number)

    async def serve(self, gather: Gather, common: Mapping[str, str], lag_ms: Histogram, clock: Clock) -> None:
        """Start to answer requests, and to measure the lag of the event loop. Raises ListenFailed.
        ``gather``: returns the current values. ``common``: the labels of every sample."""
        assert self._port is not None, "bind comes before serve"
        self._gather, self._common = gather, common
        self._tasks.start(_watch_lag(lag_ms, clock), "event loop lag")
        await self._port.open()

    async def close(self) -> None:
        """Stop listening, and cancel the active requests."""
        if self._port is not None:
            self._port.close()
        await self._requests.close()
        await self._tasks.close()

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_HEAD_BYTES_MAX), self._connected)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._requests) >= _CONNECTIONS_MAX and self._silent:
            silent = next(iter(self._silent))
            del self._silent[silent]
            silent.transport.abort()  # the read in its task then fails, and the task ends
            self._silent[writer] = None
            self._requests.start(self._serve(reader, writer), "metrics request")
        elif len(self._requests) < _CONNECTIONS_MAX:
            self._silent[writer] = None
            self._requests.start(self._serve(reader, writer), "metrics request")
        else:
            writer.write(_response("503 Service Unavailable", b"too many connections\n"))
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_SECONDS_MAX):
                    writer.write(await self._read(reader, writer))
                    await writer.drain()
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        # The reader's limit bounds the size of the head. The caller bounds the time.
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return _response("431 Request Header Fields Too Large", b"the request is too large\n")
        except asyncio.IncompleteReadError:
            return b""
        finally:
            self._silent.pop(writer, None)
        return await self._answer(head)

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path, _, version = rest.partition(b"\r")[0].rpartition(b" ")
        if not version.startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this is no HTTP/1 request\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if path.partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        try:
            text = await asyncio.to_thread(exposition, await self._gather(), self._common)
        except Exception:  # noqa: BLE001 - the outer edge of a request: logged once, answered as a failure
            _log.exception("cannot collect the metrics")
            return _response("500 Internal Server Error", b"cannot collect the metrics; see the log\n")
        return _response("200 OK", text, f"Content-Type: {CONTENT_TYPE}\r\n")


async def _watch_lag(lag_ms: Histogram, clock: Clock) -> None:
    """Measure the delay of a timer of the event loop, repeatedly, until the task is cancelled."""
    while True:
        due_ms = clock.monotonic_ms() + _LAG_SECONDS * 1000
        await asyncio.sleep(_LAG_SECONDS)
        lag_ms.observe(max(0.0, clock.monotonic_ms() - due_ms))


def _response(status: str, body: bytes, headers: str = "Content-Type: text/plain\r\n") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("ascii") + body


_HELD_MAX = 100_000
_NOTED_MAX = 2048
_FOLDED_AT = 512
_CODE_BITS = 16
_CODE_MAX = (1 << _CODE_BITS) - 1
_NOBODY: tuple[None, float] = (None, 0.0)


@dataclass(slots=True)
class Meter:
    """The latencies of a server's requests. ``also``: functions by request code, which are called with request, answer
    and milliseconds."""

    latency: RpcLatency = field(default_factory=RpcLatency)
    also: Mapping[int, Callable[[Command, Command, float], None]] = field(default_factory=dict)

    noted: dict[int, list[float]] = field(default_factory=dict)
    """Milliseconds of successful answers to requests that are not in ``also``, by request code << 16 | response code.
    `fold` adds them to ``latency``, because adding many values together is much cheaper than adding each value."""

    def answered(self, request: Command, answer: Command, ms: float, is_held: bool, result: str) -> None:
        self.latency[request.code, answer.code, is_held, result].observe(ms)
        if request.code in self.also:
            self.also[request.code](request, answer, ms)
        elif not is_held and result == "success" and 0 <= answer.code <= _CODE_MAX and len(self.noted) < _NOTED_MAX:
            self.noted.setdefault(request.code << _CODE_BITS | answer.code, [])

    def gather(self) -> Mapping[tuple[str, ...], float | Histogram]:
        """Return the values of ``rocketmq_rpc_latency``."""
        self.fold()
        return self.latency.gather()

    def fold(self) -> None:
        """Add the milliseconds in ``noted`` to ``latency``."""
        for key, several in self.noted.items():
            if several:
                self.latency[key >> _CODE_BITS, key & _CODE_MAX, False, "success"].observe_all(several)
                several.clear()


class MeteredConnection(Connection):
    """A connection that measures the time until its answers."""

    __slots__ = ("_answered", "_held", "_meter", "_noted", "_request")
    # Slots, because CPython stores only a limited number of attributes inline: with more, all attributes are slow.

    def __init__(self, *arguments: Any, meter: Meter, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._meter = meter
        self._noted = meter.noted
        self._request: Command | None = None
        self._answered: list[list[float]] = []
        self._held: dict[int, tuple[Command, float]] = {}

    def send(self, command: Command) -> None:
        Connection.send(self, command)
        request = self._request
        if request is not None and request.opaque == command.opaque and command.flag & RESPONSE:
            self._request = None
            noted = self._noted.get(request.code << _CODE_BITS | command.code)
            if noted is not None and self._unsent:  # the answer was accepted, so the connection is open
                if not self._answered:
                    self._loop.call_soon(self._count_answered, self.active_ms)
                self._answered.append(noted)
            else:
                self._count_answer(request, command, self.active_ms, is_held=False)
        elif command.flag & RESPONSE:
            request, since_ms = self._held.pop(command.opaque, _NOBODY)
            if request is not None:
                self._count_answer(request, command, since_ms, is_held=True)

    def _count_answer(self, request: Command, answer: Command, since_ms: float, *, is_held: bool) -> None:
        result = "success" if self.is_open else "write_channel_failed"
        self._meter.answered(request, answer, self._clock.monotonic_ms() - since_ms, is_held, result)

    def _count_answered(self, since_ms: float) -> None:
        """Count the answers of one read after they were written. Counting after each write would make sends slower."""
        ms = self.active_ms - since_ms
        for noted in self._answered:
            noted.append(ms)
        if len(self._answered[0]) >= _FOLDED_AT:
            self._meter.fold()
        self._answered.clear()

    def on_one_way_reply(self, request: Command, answer: Command) -> None:
        self._meter.answered(request, answer, self._clock.monotonic_ms() - self.active_ms, False, "oneway")

    def _handle(self, frame: Frame) -> None:
        command = decode_command(frame)
        if command.flag & RESPONSE:
            self._settle(command)
            return
        self._request = command
        self._router.handle(self, command)
        if self._request is not None:
            self._keep()

    def _keep(self) -> None:
        """Store the request that was handled but not answered: it is answered later, or never."""
        request, self._request = self._request, None
        if request is not None and not request.is_one_way:
            if len(self._held) >= _HELD_MAX:
                self._held.pop(next(iter(self._held)))  # the oldest, most likely never answered
            self._held[request.opaque] = request, self.active_ms


def lane_values(lanes: Mapping[str, tuple[int, int]], servers: Sequence[RemotingServer]) -> Gathered:
    """Return the requests and the limit of each lane, and the connections of servers that share their limits."""
    return {
        **(servers[0].limits.gather() if servers else {}),
        "rmqkit_lane_requests": {(name,): requests for name, (requests, _) in lanes.items()},
        "rmqkit_lane_requests_max": {(name,): requests_max for name, (_, requests_max) in lanes.items()},
        "rmqkit_connections": {(): sum(len(server.connections) for server in servers)},
    }
