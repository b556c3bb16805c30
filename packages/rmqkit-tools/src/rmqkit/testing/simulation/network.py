"""The network of a simulation: connections in memory that delay, stall, tear and reset, as the seed says.

A direction of a connection is a stream of bytes: what was written arrives in order, in pieces. Pieces of different
connections, and of the two directions, overtake each other. At most `WINDOW_BYTES` are on their way or unread in one
direction; more bytes wait at the sender, which asyncio's flow control reports to its protocol.

===========  ===========================================================================================================
fault        effect
===========  ===========================================================================================================
stall        nothing from one host arrives at another until a time; afterwards everything arrives, in order
cut          all connections between two hosts are reset, possibly in the middle of a frame
refuse       a host refuses new connections until a time
slow         the delay between two hosts is longer until a time
===========  ===========================================================================================================

A killed process resets its connections. A machine without power says nothing; its peers get a reset when they write
after the machine runs again, as TCP does. Not simulated: TLS, UDP, names.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from rmqkit.testing.simulation.scheduler import Program, Scheduler

__all__ = ["BoundSocket", "Network"]

WINDOW_BYTES = 256 << 10
_READ_BYTES = 256 << 10
_DELAY_SECONDS = 0.0001
_SPLIT_SHARE = 0.05
_RESENDS_SECONDS = 1.0
"""Time after which TCP sends again to a machine that did not answer."""

_FIN = object()
_EOF = object()  # among unsent bytes: a FIN after which the transport still reads
_RESET = object()


class BoundSocket:
    """A reserved port of a simulated host, in place of a socket."""

    def __init__(self, network: Network, process: Program, host: str, port: int) -> None:
        self._network = network
        self._process = process
        self.address = (host, port)
        self.accept: Callable[[Transport], None] | None = None
        self.listens = False

    def listen(self, backlog: int = 0) -> None:
        """Accept connections into the backlog."""
        self.listens = True

    def getsockname(self) -> tuple[Any, ...]:
        return _address(*self.address)

    def close(self) -> None:
        """Free the port."""
        self.listens = False
        self._network.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Server(asyncio.AbstractServer):
    """The result of `create_server`."""

    def __init__(self, sockets: Sequence[BoundSocket]) -> None:
        self.sockets = tuple(sockets)

    def close(self) -> None:
        for one in self.sockets:
            one.close()
        self.sockets = ()

    async def wait_closed(self) -> None:
        """Return at once: accepted connections have owners of their own."""

    async def start_serving(self) -> None:
        """Do nothing: the port accepts connections."""

    async def serve_forever(self) -> None:
        """Wait until the task is cancelled."""
        await asyncio.get_running_loop().create_future()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def is_serving(self) -> bool:
        return any(one.listens for one in self.sockets)


class Transport(asyncio.Transport):
    """One end of a connection.

    Attributes:
        peer: the other end.
        process: the process that has this end.
    """

    def __init__(
        self, network: Network, process: Program, name: str, own: tuple[str, int], other: tuple[str, int]
    ) -> None:
        super().__init__({"sockname": _address(*own), "peername": _address(*other)})
        self._network = network
        self._world = network.world
        self.process = process
        self.name = name
        self.own, self.other = own, other
        self.peer: Transport
        self._protocol: Any = None
        self._chance = self._world.chance("connection", name)
        self._unsent: deque[Any] = deque()
        self._unsent_bytes = 0
        self._flight: deque[tuple[float, Any]] = deque()
        self._flight_bytes = 0
        self._arrives_last = 0.0
        self._received: deque[Any] = deque()
        self._is_reading = True
        self._is_feeding = False
        self._is_closing = False
        self.is_over = False
        self._high, self._low = 64 << 10, 16 << 10
        self._is_writing_paused = False

    # ---- asyncio's interface

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._feed_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        piece = bytes(data)
        self._unsent.append(piece)
        self._unsent_bytes += len(piece)
        self._send()
        if self._unsent_bytes > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._is_closing:
            self._unsent.append(_EOF)
            self._send()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._received.clear()
        self._unsent.append(_FIN)
        self._send()

    def abort(self) -> None:
        if self.is_over:
            return
        self._is_closing = True
        self._drop_unsent()
        self._put_on_its_way(_RESET)
        self._end(None)

    # ---- sending

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _send(self) -> None:
        """Hand bytes to the network while the window has room."""
        while self._unsent and (self._flight_bytes < WINDOW_BYTES or self._unsent[0] in (_FIN, _EOF)):
            piece = self._unsent.popleft()
            if piece is _EOF:
                self._put_on_its_way(_FIN)
                continue
            if piece is _FIN:
                self._put_on_its_way(_FIN)
                self._end(None)
                return
            self._unsent_bytes -= len(piece)
            self._flight_bytes += len(piece)
            if len(piece) > 1 and self._chance.random() < _SPLIT_SHARE:
                place = self._chance.randrange(1, len(piece))
                self._put_on_its_way(piece[:place])
                piece = piece[place:]
            self._put_on_its_way(piece)
        if self._is_writing_paused and self._unsent_bytes <= self._low:
            self._is_writing_paused = False
            self.process.loop.call_soon(self._protocol.resume_writing)

    def _put_on_its_way(self, piece: Any) -> None:
        network = self._network
        arrives = self._world.now + network.delay(self.own[0], self.other[0], self._chance)
        self._arrives_last = max(arrives, self._arrives_last)
        self._flight.append((self._arrives_last, piece))
        if len(self._flight) == 1:
            self._world.at(self._arrives_last, self._arrive)

    def _arrive(self) -> None:
        """Hand over the pieces that are due, and wait for the next one."""
        network, world = self._network, self._world
        until = network.stalled_until(self.own[0], self.other[0])
        if until > world.now:
            world.at(until, self._arrive)
            return
        while self._flight and self._flight[0][0] <= world.now:
            _, piece = self._flight.popleft()
            self.peer._arrived(piece)
        if self._flight:
            world.at(self._flight[0][0], self._arrive)

    def _read_by_peer(self, size: int) -> None:
        self._flight_bytes -= size
        if not self.is_over:
            self._send()

    # ---- receiving

    def _arrived(self, piece: Any) -> None:
        if self.is_over or not self.process.is_alive:
            if piece is not _RESET and piece is not _FIN:
                self._network.reset_later(self)
            return
        self._world.note("data", self.name, zlib.crc32(piece) if isinstance(piece, bytes) else piece is _FIN)
        if piece is _RESET:
            self.reset()
            return
        self._received.append(piece)
        self._feed_soon()

    def _feed_soon(self) -> None:
        if self._received and self._is_reading and not self._is_feeding and not self._is_closing:
            self._is_feeding = True
            self.process.loop.call_soon(self._feed)

    def _feed(self) -> None:
        """Give the protocol what has arrived, as one read."""
        self._is_feeding = False
        if self._is_closing or not self._is_reading or not self._received:
            return
        if self._received[0] is _FIN:
            self._received.clear()
            if not self._protocol.eof_received():
                self.close()
            return
        pieces: list[bytes] = []
        size = 0
        while self._received and self._received[0] is not _FIN and size < _READ_BYTES:
            pieces.append(self._received.popleft())
            size += len(pieces[-1])
        data = b"".join(pieces)
        self._world.network.bytes_read += size
        self.peer._read_by_peer(size)
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            self._feed_buffer(data)
        else:
            self._protocol.data_received(data)
        self._feed_soon()

    def _feed_buffer(self, data: bytes) -> None:
        while data and not self._is_closing:
            buffer = memoryview(self._protocol.get_buffer(len(data)))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self._protocol.buffer_updated(count)

    # ---- the end

    def reset(self) -> None:
        """Close this end with an error, as after a reset by the peer."""
        if self.is_over:
            return
        self._is_closing = True
        self._drop_unsent()
        self._received.clear()
        self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def _end(self, error: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._network.ended(self)
            self.process.loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)

    def tear(self) -> None:
        """Lose a part of the bytes that are on their way."""
        if self._flight:
            kept = self._chance.randrange(len(self._flight))
            arrives, piece = self._flight[kept]
            self._flight = deque(itertools.islice(self._flight, kept))
            if isinstance(piece, bytes) and len(piece) > 1:
                self._flight.append((arrives, piece[: self._chance.randrange(1, len(piece))]))
                if len(self._flight) == 1:
                    self._world.at(arrives, self._arrive)


def _address(host: str, port: int) -> tuple[Any, ...]:
    return (host, port, 0, 0) if ":" in host else (host, port)


class Network:
    """All hosts, ports and connections of a world. Faults are methods."""

    def __init__(self, world: Scheduler) -> None:
        self.world = world
        self.bytes_read = 0
        self._bound: dict[tuple[str, int], BoundSocket] = {}
        self._open: dict[Transport, None] = {}
        self._numbers: dict[tuple[str, str], itertools.count[int]] = {}
        self._ports = itertools.count(40000)
        self._stalls: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], tuple[float, float]] = {}
        self._refusals: dict[str, float] = {}

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._open) // 2

    # ---- faults

    def stall(self, source: str, target: str, seconds: float) -> None:
        """Let nothing arrive from a host at another for a time."""
        self.world.note("stall", source, target, f"{seconds:.3f}")
        self._stalls[source, target] = self.world.now + seconds

    def slow(self, source: str, target: str, delay_seconds: float, seconds: float) -> None:
        """Delay everything from a host to another, for a time."""
        self.world.note("slow", source, target, f"{delay_seconds:.3f} {seconds:.3f}")
        self._slow[source, target] = self.world.now + seconds, delay_seconds

    def refuse(self, host: str, seconds: float) -> None:
        """Let a host refuse new connections for a time."""
        self.world.note("refuse", host, f"{seconds:.3f}")
        self._refusals[host] = self.world.now + seconds

    def cut(self, host: str, other: str) -> None:
        """Reset all connections between two hosts, in the middle of what is on its way."""
        self.world.note("cut", host, other)
        for one in list(self._open):
            if {one.own[0], one.other[0]} == {host, other}:
                one.tear()
                self.world.after(self.delay(host, other, one._chance), one.reset)

    def heal(self) -> None:
        """End all faults."""
        self._stalls.clear()
        self._slow.clear()
        self._refusals.clear()
        for transport in list(self._open):
            if transport._flight:
                transport._arrive()

    # ---- for transports and loops

    def delay(self, source: str, target: str, chance: random.Random) -> float:
        """Return the time that a piece takes between two hosts."""
        until, more = self._slow.get((source, target), (0.0, 0.0))
        spread = chance.random()
        base = _DELAY_SECONDS * (0.5 + spread + 50 * spread**32)
        return base + (more if until > self.world.now else 0.0)

    def stalled_until(self, source: str, target: str) -> float:
        """Return the time until which nothing arrives."""
        return self._stalls.get((source, target), 0.0)

    def bind(self, process: Program, host: str, port: int) -> BoundSocket:
        """Reserve a port. Raises OSError: it is in use, or the host is another machine's."""
        own = process.machine.host
        if host not in ("0.0.0.0", "::", "", own):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return self.reserve(process, own, port)

    def reserve(self, process: Program, host: str, port: int) -> BoundSocket:
        """Reserve a port of an address. Raises OSError: it is in use."""
        port = port or next(self._ports)
        if (host, port) in self._bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        bound = self._bound[host, port] = BoundSocket(self, process, host, port)
        return bound

    def release(self, bound: BoundSocket) -> None:
        if self._bound.get(bound.address) is bound:
            del self._bound[bound.address]

    def serve(self, process: Program, protocol_factory: Callable[[], Any], bound: Sequence[BoundSocket]) -> _Server:
        def accept(transport: Transport) -> None:
            protocol = protocol_factory()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            transport._feed_soon()

        for one in bound:
            one.accept = accept
        return _Server(bound)

    async def connect(self, process: Program, protocol_factory: Callable[[], Any], host: str, port: int) -> Any:
        """Open a connection. Raises OSError: nobody listens there."""
        own = process.machine.host
        numbers = self._numbers.setdefault((process.machine.name, f"{host}:{port}"), itertools.count())
        name = f"{process.machine.name}>{host}:{port}#{next(numbers)}"
        chance = self.world.chance("connect", name)
        bound = self._bound.get((host, port))
        for source, target in ((own, host), (host, own)):
            await asyncio.sleep(self.delay(source, target, chance))
            while (until := self.stalled_until(source, target)) > self.world.now:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(until - self.world.now)
            if target == host:
                while not self._is_up(host):  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(_RESENDS_SECONDS)
                bound = self._bound.get((host, port))
                if bound is None or not bound.listens or self._refusals.get(host, 0.0) > self.world.now:
                    bound = None
        if bound is None or bound.accept is None or not bound.listens:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return self.connected(process, bound, name, protocol_factory, own, host)

    def connected(
        self,
        process: Program,
        bound: BoundSocket,
        name: str,
        protocol_factory: Callable[[], Any],
        own_host: str,
        host: str,
    ) -> tuple[Transport, Any]:
        """Connect a process to a port that accepts connections. ``own_host``, ``host``: the addresses of both ends."""
        own, other = (own_host, next(self._ports)), (host, bound.address[1])
        near = Transport(self, process, f"{name}+", own, other)
        far = Transport(self, bound._process, f"{name}-", other, own)
        near.peer, far.peer = far, near
        self._open[near] = self._open[far] = None
        protocol = protocol_factory()
        near.set_protocol(protocol)
        protocol.connection_made(near)
        assert bound.accept is not None, "the port accepts connections"
        bound._process.loop.call_soon(bound.accept, far)
        return near, protocol

    def _is_up(self, host: str) -> bool:
        machine = next((one for one in self.world.machines.values() if one.host == host), None)
        return machine is None or any(process.is_alive for process in machine.processes) or not machine.is_dark

    def ended(self, transport: Transport) -> None:
        self._open.pop(transport, None)

    def reset_later(self, transport: Transport) -> None:
        """Answer data for an end that is gone with a reset, as soon as its machine runs."""
        peer, world = transport.peer, self.world

        def answer() -> None:
            if not self._is_up(transport.own[0]):
                world.after(_RESENDS_SECONDS, answer)
            else:
                peer._arrived(_RESET)

        world.after(self.delay(transport.own[0], transport.other[0], transport._chance), answer)

    def process_ended(self, process: Program, *, is_silent: bool) -> None:
        """Close the ports of a killed process, and reset its connections if its machine still runs."""
        for bound in [one for one in self._bound.values() if one._process is process]:
            bound.close()
        for transport in [one for one in self._open if one.process is process]:
            transport.is_over = True
            self.ended(transport)
            if not is_silent:
                transport._put_on_its_way(_RESET)
