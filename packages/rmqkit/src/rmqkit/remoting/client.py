"""The calling side: one pooled connection per address (``NettyRemotingClient``).

Connections are made when first needed and shared by all callers; the peer may send its own requests over them, which
the router answers. A call that times out closes its connection, as the reference does, when it was not the caller's
short budget that ran out. Loop only. Source: remoting.md §2.

`Permits` bounds the calls under way (``clientAsyncSemaphoreValue``) and their bytes. Taking a permit costs a comparison
or two while there are some; beyond that callers wait in one line, so a large call is not overtaken by small ones for
ever. A call larger than all the bytes goes when no other is under way. The n-th pause of a `Backoff` lies between half
of and all of ``first_ms * 2**n``, at most ``most_ms``, so that callers who failed together do not come back together.
Source: behaviour.md §7.6.

`diagnosed` asks an address that closed the connection or did not answer what listens there. It makes a new connection
with a plain request that any server of the protocol answers, and an empty line behind it for servers that read lines;
when that is closed without a word, another one with a TLS ClientHello. Source: remoting.md §1.1, §2.1.

=============================  ===========================================================
what came back                 it is
=============================  ===========================================================
a frame                        a server that takes plain requests
closed; then a TLS record      a server that wants TLS
closed; then closed            nothing we know
anything else                  nothing we know
nothing in time                slow, or waiting: the error that led here says enough
=============================  ===========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import deque
from collections.abc import Callable

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import (
    ConnectFailed,
    ConnectionLost,
    PeerRefused,
    RemotingError,
    RequestTimedOut,
    RmqError,
    TlsMismatch,
    WrongProtocol,
)
from rmqkit.protocol.codes import RequestCode, ResponseCode, request_name
from rmqkit.protocol.command import Command, encode_command
from rmqkit.remoting.address import split_address
from rmqkit.remoting.authentication import Credentials, Signer
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.tls import CLIENT_HELLO, ClientTls, Tls

CLIENT_CALLS_MAX = 65_535


class Permits:
    """So many calls, and bytes in them, may be under way at a time; ``free`` and ``free_bytes`` are what is left."""

    __slots__ = ("_bytes_max", "_waiting", "free", "free_bytes")

    def __init__(self, count: int, bytes_max: int = 0) -> None:
        self.free = count
        self.free_bytes = self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def take_now(self, size: int = 0) -> bool:
        """Take a permit for a call of so many bytes, if there is one and nobody waits."""
        if size > self._bytes_max:
            size = self._bytes_max
        if self.free <= 0 or size > self.free_bytes or self._waiting:
            return False
        self.free -= 1
        self.free_bytes -= size
        return True

    async def take(self, timeout_ms: float | None, size: int = 0) -> bool:
        """Wait for a permit, None: however long; False when none came in time."""
        if self.take_now(size):
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size))
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # given in the same turn of the loop: it would be lost
                return True
            self._go_on()  # those behind may want less
            return False
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            else:
                self._go_on()
            raise
        return True

    def give_back(self, size: int = 0) -> None:
        """End a call of so many bytes: those that wait longest have their turn."""
        if size > self._bytes_max:
            size = self._bytes_max
        self.free += 1
        self.free_bytes += size
        assert self.free_bytes <= self._bytes_max, "a permit is given back once, with the size that was taken"
        if self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            turn, size = self._waiting[0]
            if not turn.done():
                size = min(size, self._bytes_max)
                if self.free <= 0 or size > self.free_bytes:
                    return
                self.free -= 1
                self.free_bytes -= size
                turn.set_result(None)
            self._waiting.popleft()


class Backoff:
    """The pauses of one series of tries."""

    __slots__ = ("_most_ms", "_next_ms")

    def __init__(self, first_ms: float, most_ms: float) -> None:
        assert 0 < first_ms <= most_ms, f"a first pause of {first_ms} ms is not within {most_ms} ms"
        self._next_ms = first_ms
        self._most_ms = most_ms

    def next_ms(self) -> float:
        """Return how long to wait before the next try."""
        bound_ms = self._next_ms
        self._next_ms = min(2 * bound_ms, self._most_ms)
        return bound_ms * random.uniform(0.5, 1.0)


TRY_MS_MIN = 100.0
"""A further try begins only with this much time left: a shorter one fails by its time, which hides the cause."""


class Failures:
    """The failures of one series of tries, and which of them is the cause: the most frequent one, the first of equals.
    The last failure is often only a symptom, as of a try with little time left."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], tuple[RmqError, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def note(self, error: RmqError) -> None:
        """Count a failure; errors of one class, code and peer are equal."""
        kind = (type(error), getattr(error, "code", None), getattr(error, "address", None))
        first, count = self._kinds.get(kind, (error, 0))
        if count or len(self._kinds) < _KINDS_MAX:
            self._kinds[kind] = first, count + 1

    @property
    def cause(self) -> RmqError:
        """The failure to report."""
        assert self._kinds, "a series without a failure has no cause"
        return max(self._kinds.values(), key=lambda one: one[1])[0]  # the first of the largest

    @property
    def others(self) -> list[RmqError]:
        """One failure of each other kind, in their order."""
        cause = self.cause
        return [error for error, _ in self._kinds.values() if error is not cause]


_KINDS_MAX = 16
_PATIENCE_S = 1.0
_TLS_ALERT = 0x15
_SHOWN_BYTES = 24
_TRUST = "trust its signer with --tls-ca (tls.client.trustCertPath), or show a certificate with --tls-cert (…certPath)"


async def diagnosed(error: ConnectionLost | RequestTimedOut, address: str, *, is_encrypted: bool) -> RemotingError:
    """The error that says what is wrong with a peer, or the one given when nothing more is known."""
    reason = error.reason if isinstance(error, ConnectionLost) else ""
    if is_encrypted and "TLS" in reason and "WRONG_VERSION" not in reason:
        return TlsMismatch(address, reason, _TRUST)
    try:
        said = await _said_to(address, b"".join(encode_command(Command(RequestCode.GET_NAMESRV_CONFIG))) + b"\r\n\r\n")
        if said[:1] == b"\0":  # a frame begins with its length, which is below 16 MiB
            return (
                TlsMismatch(address, "it does not encrypt", "leave TLS out (tls.enable=false)")
                if is_encrypted
                else error
            )
        if said:
            return WrongProtocol(address, f"it answers {said[:_SHOWN_BYTES]!r}")
        hello = ClientTls(Tls(verify=False)).layer().outgoing()
        if (await _said_to(address, hello))[:1] in (bytes([CLIENT_HELLO]), bytes([_TLS_ALERT])):
            return error if is_encrypted else TlsMismatch(address, "it wants TLS", "use --tls (tls.enable=true)")
    except (TimeoutError, OSError):
        return error
    return WrongProtocol(address, "it closes the connection when asked")


async def _said_to(address: str, request: bytes) -> bytes:
    """The first bytes an address answers; empty when it closes. Raises TimeoutError, OSError: it does neither."""
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(*split_address(address))
        try:
            writer.write(request)
            with contextlib.suppress(ConnectionResetError):
                return await reader.read(_SHOWN_BYTES)
            return b""
        finally:
            writer.close()


CONNECT_TIMEOUT_MS = 3000
_CLOSE_AFTER_MS_MIN = 100
_QUIET_MS = 1000


class RemotingClient:
    """Calls peers by address.

    Args:
        router: answers requests that peers send over our connections; none by default.
        on_close: called when a pooled connection is gone.
        tls: encrypts every connection; None means plain.
        credentials: sign every request.

    Attributes:
        is_encrypted: whether connections are.
    """

    def __init__(
        self,
        router: Router | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_close: Callable[[str, Connection], None] | None = None,
        tls: ClientTls | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._router = router or Router()
        self._clock = clock
        self._on_close = on_close
        self._tls = tls
        self.is_encrypted = tls is not None
        self._signer = None if credentials is None else Signer(credentials, clock)
        self._permits = Permits(CLIENT_CALLS_MAX)
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    async def call(self, address: str, command: Command, timeout_ms: float) -> Command:
        """Send a request and return its response, with any response code.
        Raises ConnectFailed: the address cannot be reached.
        Raises RequestTimedOut: no answer within ``timeout_ms``, the connecting included.
        Raises ConnectionLost: the connection closed first."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        # Before anything is waited for: a signature holds for minutes, and the opaque is no part of what is signed.
        if self._signer is not None:
            self._signer.sign(command)
        if not self._permits.take_now() and not await self._permits.take(timeout_ms):
            raise _timed_out(address, command, timeout_ms)
        try:
            response = await self._call(address, command, deadline_ms, timeout_ms)
            if response.code == ResponseCode.GO_AWAY:
                self._connections.pop(address, None)  # calls under way on it may still be answered; the peer closes it
                response = await self._call(address, command, deadline_ms, timeout_ms)
            return response
        finally:
            self._permits.give_back()

    async def _call(self, address: str, command: Command, deadline_ms: float, timeout_ms: float) -> Command:
        connection = await self.connection(address, deadline_ms - self._clock.monotonic_ms())
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise _timed_out(address, command, timeout_ms)
        try:
            return await connection.call(command, left_ms)
        except RequestTimedOut:
            # A peer that sent something just now is slow with this request only: the calls of others on it go on.
            is_quiet = self._clock.monotonic_ms() - connection.heard_ms >= _QUIET_MS
            if is_quiet and left_ms > max(_CLOSE_AFTER_MS_MIN, timeout_ms / 4):
                connection.close(f"no answer to {request_name(command.code)}")
                connection.abort()  # a peer that takes nothing would keep it for ever, and the calls under way on it
            raise _timed_out(address, command, timeout_ms) from None

    async def send_one_way(self, address: str, command: Command, timeout_ms: float) -> None:
        """Send a request nobody answers (its one-way bit must be set); wait while too many are unwritten.
        Raises ConnectFailed: the address cannot be reached, or takes nothing for so long."""
        assert command.is_one_way, "a request with an answer goes through call()"
        if self._signer is not None:
            self._signer.sign(command)
        connection = await self.connection(address, timeout_ms)
        connection.send(command)
        try:
            await connection.drain(timeout_ms)
        except TimeoutError:
            raise ConnectFailed(address, f"connected, but it has read nothing for {timeout_ms:.0f} ms") from None

    async def connection(self, address: str, timeout_ms: float = CONNECT_TIMEOUT_MS) -> Connection:
        """The open connection to an address, made if need be.
        Raises ConnectFailed: the address cannot be reached in time, or this client is closed."""
        connection = self.connected(address)
        if connection is not None:
            return connection
        if self._closed:
            raise ConnectFailed(address, "this client is closed", "make a new one")
        # One attempt for all who want it: a thousand calls at the start make one connection.
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.ensure_future(self._connect(address))
            self._connecting[address] = task
            task.add_done_callback(lambda done: self._connected(address, done))
        try:
            async with asyncio.timeout(timeout_ms / 1000.0):  # wait_for() may lose a cancellation
                return await asyncio.shield(task)
        except TimeoutError:
            if task.done() and not task.cancelled() and task.exception() is None:  # in the same turn as the timer
                return task.result()
            raise ConnectFailed(address, f"no connection within {timeout_ms:.0f} ms") from None

    def connected(self, address: str) -> Connection | None:
        """The open connection to an address, if there is one."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.is_open else None

    async def close(self) -> None:
        """Close every connection; calls under way get ConnectionLost."""
        self._closed = True  # first: nobody connects any more while the others are waited for
        for task in list(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=1.0)
            for connection in connections:
                connection.abort()
        await self._router.close()

    def drop(self, address: str) -> None:
        """Close the connection to an address that is no longer wanted."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    async def _connect(self, address: str) -> Connection:
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise ConnectFailed(address, str(error), "correct it where it is set") from None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000.0):
                _, connection = await loop.create_connection(lambda: self._new(address), host, port)
        except (TimeoutError, OSError) as error:
            number = error.errno or 0  # of a failed look-up of a name it is negative
            found = os.strerror(number) if number > 0 else error.strerror or str(error)
            reason = found or f"no answer in {CONNECT_TIMEOUT_MS} ms"
            raise ConnectFailed(address, reason) from error
        return connection

    def _new(self, address: str) -> Connection:
        return Connection(
            self._router,
            clock=self._clock,
            on_close=lambda connection: self._lost(address, connection),
            tls=self._tls.layer() if self._tls is not None else None,
            always_reads=True,
        )

    def _connected(self, address: str, task: asyncio.Task[Connection]) -> None:
        self._connecting.pop(address, None)
        if task.cancelled() or task.exception() is not None:
            return
        connection = task.result()
        if self._closed:
            connection.abort()  # it stood in the same turn in which this client was closed
        else:
            self._connections[address] = connection

    def _lost(self, address: str, connection: Connection) -> None:
        if self._connections.get(address) is connection:  # else it was replaced, or dropped
            del self._connections[address]
        if self._on_close is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self._on_close(address, connection)


def expect_success(response: Command, address: str) -> Command:
    """The response itself when its code is SUCCESS. Raises PeerRefused: any other code."""
    if response.code != ResponseCode.SUCCESS:
        raise PeerRefused(response.code, response.remark, address)
    return response


def _timed_out(address: str, command: Command, timeout_ms: float) -> RequestTimedOut:
    return RequestTimedOut(address, command.code, timeout_ms, request_name(command.code))
