"""A proxy on loopback that simulates network faults: it cuts, delays, throttles, swallows and garbles data.

A broker registers its own address, so the proxy listens on the same port of another loopback address, which the broker
registers instead (``brokerIP1``). The dials are read whenever data arrives. A connection that was once in the black
hole stays dead, as half-open connections do: when one end closes, the other end is not notified.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rmqkit.remoting.address import split_address

READ_BYTES = 65536
_LENGTH_BYTES = 4


@dataclass(slots=True)
class Dials:
    """The faults: `delay_seconds` per chunk and direction, `bytes_per_second` per connection and direction,
    `is_black_hole` swallows all data. For each new connection `garble` returns a function that changes the data to the
    client, and `cut` returns the number of bytes after which the connection breaks."""

    delay_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    is_black_hole: bool = False
    garble: Callable[[], Callable[[bytes], bytes] | None] = lambda: None
    cut: Callable[[], Cut | None] = lambda: None


@dataclass(slots=True)
class Cut:
    """The number of bytes, and their direction, after which a connection breaks. `is_reset`: it is reset, not
    closed.
    """

    to_client: bool
    after_bytes: int
    is_reset: bool = True

    @classmethod
    def any(cls, chance: random.Random, bytes_max: int) -> Cut:
        """Return a random cut, often early, where the small frames are."""
        after_bytes = chance.randrange(1, chance.choice([200, 2000, bytes_max]))
        return cls(chance.random() < 0.5, after_bytes, chance.random() < 0.7)


@dataclass(slots=True)
class FrameCursor:
    """A parser of a stream of frames. `inside` is the number of bytes of the unfinished frame that have passed."""

    inside: int = 0
    _size: int = 0
    _length: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        """Advance by ``data``."""
        while data:
            if len(self._length) < _LENGTH_BYTES:
                part = data[: _LENGTH_BYTES - len(self._length)]
                self._length += part
                self._size = _LENGTH_BYTES + int.from_bytes(self._length)
            else:
                part = data[: self._size - self.inside]
            self.inside += len(part)
            data = data[len(part) :]
            if len(self._length) == _LENGTH_BYTES and self.inside == self._size:
                self.inside = 0
                self._length.clear()


class Proxy:
    """A proxy that listens on one address and forwards to another.

    Attributes:
        dials: may be changed at any time.
        cuts: bytes of the current frame that had passed when a connection was cut, by direction; 0 is between frames.
        connections: number of accepted connections.
    """

    def __init__(self, target: str, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        self.dials = Dials()
        self.cuts: dict[bool, list[int]] = {False: [], True: []}
        self.connections = 0
        self.address = ""
        self._target = split_address(target)
        self._listen = (listen_host, listen_port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accepted, *self._listen)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None, "the proxy is started"
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # also writers that wait for a peer that reads nothing
            writer.transport.abort()
        await asyncio.sleep(0)
        await self._server.wait_closed()

    def break_all(self) -> None:
        """Cut every connection now."""
        for task in self._tasks:
            task.cancel()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        task = asyncio.create_task(self._forward(reader, writer), name="proxy")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self._writers.append(server_writer)
        cut, garble = self.dials.cut(), self.dials.garble()
        ways = [
            self._pump(reader, server_writer, to_client=False, cut=cut),
            self._pump(server_reader, writer, to_client=True, cut=cut, garble=garble),
        ]
        pumps = [asyncio.create_task(way, name="proxy") for way in ways]
        is_reset = cut is not None and cut.is_reset
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for one in (writer, server_writer):
                if is_reset:
                    one.transport.abort()
                else:
                    one.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        to_client: bool,
        cut: Cut | None,
        garble: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Forward until an end closes, or until the cut."""
        cursor, passed, is_dead = FrameCursor(), 0, False
        while chunk := await _read(reader):
            dials = self.dials
            if dials.delay_seconds:
                await asyncio.sleep(dials.delay_seconds)
            if dials.bytes_per_second != float("inf"):
                await asyncio.sleep(len(chunk) / dials.bytes_per_second)
            is_dead = is_dead or dials.is_black_hole
            if is_dead:
                continue
            if garble is not None:
                chunk = garble(chunk)
            if cut is not None and cut.to_client is to_client:
                chunk = chunk[: cut.after_bytes - passed]
                cursor.feed(chunk)
                passed += len(chunk)
            writer.write(chunk)
            await writer.drain()
            if cut is not None and cut.to_client is to_client and passed == cut.after_bytes:
                self.cuts[to_client].append(cursor.inside)
                return
        if is_dead:
            await asyncio.Event().wait()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the received data, or nothing if the peer closed or reset the connection."""
    try:
        return await reader.read(READ_BYTES)
    except ConnectionError:
        return b""
