"""The client side of the transport: one pooled connection per address (``NettyRemotingClient``).

A connection is made at its first use, and all callers share it. The peer may send its own requests over the connection,
which the router handles. A call that times out closes its connection, as in the reference, unless the timeout was short
or the peer has sent data recently. Use this module only on the event loop. Source: remoting.md §2.

`Permits` limits the running calls (``clientAsyncSemaphoreValue``) and their bytes. While permits are free, taking a
permit costs one or two comparisons. Otherwise callers wait in one queue, so that small calls cannot overtake a large
call for ever. A call larger than the limit of bytes starts when no other call is running.

The n-th pause of a `Backoff`, counted from 0, is a random time between half of ``first_ms * 2**n`` and all of it, at
most ``most_ms``. Callers that failed together therefore do not retry together. Source: behaviour.md §7.6.

`diagnosed` examines an address that closed the connection or did not respond. It connects again and sends a plain
request that every server of the protocol answers, with an empty line for servers that read lines. If the peer closes
this connection without a response, `diagnosed` sends a TLS ClientHello over another connection.
Source: remoting.md §1.1, §2.1.

=============================  ===========================================================
response                       meaning
=============================  ===========================================================
a frame                        a server that accepts plain requests
closed; then a TLS record      a server that requires TLS
closed; then closed            an unknown protocol
other bytes                    an unknown protocol
no response in time            a slow or waiting server: the first error is reported
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
    """A limit for the number of running calls and for their bytes.
    ``free``: the number of further calls. ``free_bytes``: the number of further bytes."""

    __slots__ = ("_bytes_max", "_waiting", "free", "free_bytes")

    def __init__(self, count: int, bytes_max: int = 0) -> None:
        self.free = count
        self.free_bytes = self._bytes_max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def take_now(self, size: int = 0) -> bool:
        """Take a permit for a call of ``size`` bytes. Return False if no permit is free or other callers wait."""
        if size > self._bytes_max:
            size = self._bytes_max
        if self.free <= 0 or size > self.free_bytes or self._waiting:
            return False
        self.free -= 1
        self.free_bytes -= size
        return True

    async def take(self, timeout_ms: float | None, size: int = 0) -> bool:
        """Wait for a permit, without a limit if the timeout is None. Return False if no permit was free in time."""
        if self.take_now(size):
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size))
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # granted in the same tick as the timeout
                return True
            self._go_on()  # the next callers may need fewer bytes
            return False
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            else:
                self._go_on()
            raise
        return True

    def give_back(self, size: int = 0) -> None:
        """Return the permit of a call of ``size`` bytes, and grant permits to the callers that have waited longest."""
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
    """The pauses between the attempts of one operation."""

    __slots__ = ("_most_ms", "_next_ms")

    def __init__(self, first_ms: float, most_ms: float) -> None:
        assert 0 < first_ms <= most_ms, f"the first pause {first_ms} ms is positive and at most {most_ms} ms"
        self._next_ms = first_ms
        self._most_ms = most_ms

    def next_ms(self) -> float:
        """Return the pause before the next attempt."""
        bound_ms = self._next_ms
        self._next_ms = min(2 * bound_ms, self._most_ms)
        return bound_ms * random.uniform(0.5, 1.0)


TRY_MS_MIN = 100.0
"""The minimum remaining time for a further attempt. A shorter attempt would time out and hide the cause of the
failure."""


class Failures:
    """The failures of one series of attempts.

    `cause` is the most frequent failure, or the first of equally frequent failures. The last failure is often only a
    symptom, such as the timeout of a short attempt.
    """

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], tuple[RmqError, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def note(self, error: RmqError) -> None:
        """Count a failure. Errors of the same class, code and peer are one kind."""
        kind = (type(error), getattr(error, "code", None), getattr(error, "address", None))
        first, count = self._kinds.get(kind, (error, 0))
        if count or len(self._kinds) < _KINDS_MAX:
            self._kinds[kind] = first, count + 1

    @property
    def cause(self) -> RmqError:
        """The failure to report."""
        assert self._kinds, "there is at least one failure"
        return max(self._kinds.values(), key=lambda one: one[1])[0]  # `max` returns the first of equal items

    @property
    def others(self) -> list[RmqError]:
        """One failure of each kind other than the `cause`, in the order of their first occurrence."""
        cause = self.cause
        return [error for error, _ in self._kinds.values() if error is not cause]


_KINDS_MAX = 16
_PATIENCE_S = 1.0
_TLS_ALERT = 0x15
_SHOWN_BYTES = 24
_TRUST = "trust its signer with --tls-ca (tls.client.trustCertPath), or show a certificate with --tls-cert (…certPath)"


async def diagnosed(error: ConnectionLost | RequestTimedOut, address: str, *, is_encrypted: bool) -> RemotingError:
    """Return an error that names the fault of a peer, or the given error if the fault cannot be found."""
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
    return WrongProtocol(address, "it closes the connection after a request")


async def _said_to(address: str, request: bytes) -> bytes:
    """Return the first bytes of the peer's response, or no bytes if the peer closes the connection.
    Raises TimeoutError, OSError: the peer does not respond."""
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
    """A client that calls peers by address.

    Args:
        router: handles requests that peers send over these connections. By default there are no handlers.
        on_close: called after a pooled connection has closed.
        tls: encrypts every connection. None means plain connections.
        credentials: the user that signs every request.

    Attributes:
        is_encrypted: True if connections are encrypted.
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
        Raises RequestTimedOut: no response arrived within ``timeout_ms``, including the time to connect.
        Raises ConnectionLost: the connection closed before the response arrived."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        # Sign before waiting: the signature stays valid for minutes, and does not cover the opaque.
        if self._signer is not None:
            self._signer.sign(command)
        if not self._permits.take_now() and not await self._permits.take(timeout_ms):
            raise _timed_out(address, command, timeout_ms)
        try:
            response = await self._call(address, command, deadline_ms, timeout_ms)
            if response.code == ResponseCode.GO_AWAY:
                self._connections.pop(address, None)  # the peer closes this connection after its running calls
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
            # If the peer has sent data recently, it is slow only with this request. Keep the connection for other
            # calls.
            is_quiet = self._clock.monotonic_ms() - connection.heard_ms >= _QUIET_MS
            if is_quiet and left_ms > max(_CLOSE_AFTER_MS_MIN, timeout_ms / 4):
                connection.close(f"no answer to {request_name(command.code)}")
                connection.abort()  # `close` would wait for ever for a peer that reads nothing
            raise _timed_out(address, command, timeout_ms) from None

    async def send_one_way(self, address: str, command: Command, timeout_ms: float) -> None:
        """Send a one-way request, which gets no response. Wait while too many bytes are unwritten.
        Raises ConnectFailed: the address cannot be reached, or the peer reads nothing within ``timeout_ms``."""
        assert command.is_one_way, "the request is one-way"
        if self._signer is not None:
            self._signer.sign(command)
        connection = await self.connection(address, timeout_ms)
        connection.send(command)
        try:
            await connection.drain(timeout_ms)
        except TimeoutError:
            raise ConnectFailed(address, f"connected, but it has read nothing for {timeout_ms:.0f} ms") from None

    async def connection(self, address: str, timeout_ms: float = CONNECT_TIMEOUT_MS) -> Connection:
        """Return the open connection to an address, or connect.
        Raises ConnectFailed: the address cannot be reached in time, or this client is closed."""
        connection = self.connected(address)
        if connection is not None:
            return connection
        if self._closed:
            raise ConnectFailed(address, "this client is closed", "make a new one")
        # All callers share one attempt, so that a thousand calls at the start make only one connection.
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.ensure_future(self._connect(address))
            self._connecting[address] = task
            task.add_done_callback(lambda done: self._connected(address, done))
        try:
            async with asyncio.timeout(timeout_ms / 1000.0):  # wait_for() may lose a cancellation
                return await asyncio.shield(task)
        except TimeoutError:
            if task.done() and not task.cancelled() and task.exception() is None:  # in the tick of the timeout
                return task.result()
            raise ConnectFailed(address, f"no connection within {timeout_ms:.0f} ms") from None

    def connected(self, address: str) -> Connection | None:
        """Return the open connection to an address, or None."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.is_open else None

    async def close(self) -> None:
        """Close every connection. Running calls raise ConnectionLost."""
        self._closed = True  # set it first, so that no call connects while this method waits
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
        """Close the connection to an address that is no longer needed."""
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
            number = error.errno or 0  # negative after a failed name look-up
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
            connection.abort()  # it was made in the tick in which this client was closed
        else:
            self._connections[address] = connection

    def _lost(self, address: str, connection: Connection) -> None:
        if self._connections.get(address) is connection:  # otherwise it was replaced or dropped
            del self._connections[address]
        if self._on_close is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self._on_close(address, connection)


def expect_success(response: Command, address: str) -> Command:
    """Return the response if its code is SUCCESS. Raises PeerRefused: the response has another code."""
    if response.code != ResponseCode.SUCCESS:
        raise PeerRefused(response.code, response.remark, address)
    return response


def _timed_out(address: str, command: Command, timeout_ms: float) -> RequestTimedOut:
    return RequestTimedOut(address, command.code, timeout_ms, request_name(command.code))
