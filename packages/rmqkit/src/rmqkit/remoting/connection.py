"""A TCP connection of a client or a server. It splits received chunks into frames, and writes all replies of a loop
tick together.

`Link` is the base class for all protocols. It handles the start of an accepted connection (a balancer's preamble, TLS,
and the first plain byte, which identifies the protocol) and combines the output of a loop tick into one write.
`Connection` adds the frames of the remoting protocol.

Each peer numbers its own requests. A flag marks a response, and the opaque of the response identifies its call. A
server stops reading from a peer that does not read: while more than `WRITE_BYTES_HIGH` bytes wait to be written, it
reads nothing from the connection. The memory per connection is therefore bounded. Bytes that are not frames close only
their own connection, with one log line. Use this module only on the event loop.
Source: remoting.md §1.7, §2.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypedDict, Unpack, cast

from msgspec import Struct

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectionLost, ProtocolError, RequestTimedOut
from rmqkit.protocol.codes import request_name
from rmqkit.protocol.command import (
    REQUEST_HEADER_BYTES_MAX,
    RESPONSE,
    Body,
    Command,
    Frame,
    FrameSplitter,
    decode_command,
    encode_command,
)
from rmqkit.protocol.core import Acks, CoreFault, Sends, SendsReader
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.templates import success_frames
from rmqkit.remoting.address import IpAddress, join_address
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.sniffer import ProtocolSniffer
from rmqkit.remoting.tls import TlsLayer

# The number of unsent bytes above which a server stops reading until the peer reads.
WRITE_BYTES_HIGH = 4 << 20
# The minimum number of unsent bytes to report to `Limits`. Most responses are smaller and are sent immediately.
_UNSENT_REPORTED_BYTES = 4 << 10
# The first byte of ``PRI * HTTP/2.0``. A remoting frame with this first byte would have 1.3 GB.
HTTP2_FIRST_BYTE = ord("P")

_log = logging.getLogger(__name__)
_NOWHERE = pack_host("0.0.0.0", 0)
_OPAQUE_MASK = 0x7FFFFFFF
_UNSENT_MAX = 16
# The delay of a timer above which the loop counts as blocked.
_STANDSTILL_MS = 100.0
# The maximum number of further checks for received data before a call ends. A tick reads up to 256 KiB, so this is 16
# MiB.
_LOOKS_MAX = 64


class LinkArguments(TypedDict, total=False):
    """The arguments that a protocol passes to `Link`."""

    on_open: Callable[[Any], None] | None
    on_close: Callable[[Any], None] | None
    sniffer: ProtocolSniffer | None
    limits: Limits | None
    tls: TlsLayer | None


class Link(asyncio.Protocol):
    """One TCP connection of a client or a server.

    Args:
        on_open, on_close: called after the connection has opened, and after it has closed.
        sniffer: detects a preamble and TLS in the first bytes of an accepted connection.
        limits: the limits of all accepted connections together for incomplete frames and unread bytes.
        tls: the TLS layer of a connection that this side opens.

    Attributes:
        peer: the address of the peer as ``ip:port``.
        peer_host: the address of the peer, packed as in records (8 or 20 bytes).
        hops: the addresses of the peer and of the client that a load balancer reports. Empty without TCP.
        addresses: the hops as text, with the client before the load balancer.
        active_ms: monotonic time of the last read or write.
        frame_since_ms: monotonic time of the start of an incomplete frame, or None.
        closed: a future that is done when the connection has closed.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        on_open: Callable[[Any], None] | None = None,
        on_close: Callable[[Any], None] | None = None,
        sniffer: ProtocolSniffer | None = None,
        limits: Limits | None = None,
        tls: TlsLayer | None = None,
    ) -> None:
        self._clock = clock
        self._on_open = on_open
        self._on_close = on_close
        self._sniffer = sniffer
        self._tls = tls
        self._limits = limits
        self._is_unsent_reported = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        # asyncio's own writelines() copies (3.11) or never pauses the writer (3.12.0-3.13.0, CVE-2024-12254).
        self._is_plain_asyncio = isinstance(self._loop, asyncio.BaseEventLoop)
        self._unsent: list[Body] = []
        self._flush_due = False
        self._closed_because = "the peer closed it"
        self.peer = "?"
        self.peer_host = _NOWHERE
        self.hops: list[IpAddress] = []
        self.addresses: tuple[str, ...] = ()
        self.active_ms = clock.monotonic_ms()
        self.frame_since_ms: float | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # -- methods for its owner

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Return True if the peer reads fast enough: fewer than `WRITE_BYTES_HIGH` bytes wait to be written."""
        return (
            self.is_open
            and self._transport is not None
            and (self._transport.get_write_buffer_size() < WRITE_BYTES_HIGH)
        )

    @property
    def unsent_bytes(self) -> int:
        """The number of written bytes that the socket has not accepted yet, because the peer does not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def own_host(self) -> str:
        """The local IP address of the connection, empty without TCP."""
        own = None if self._transport is None else self._transport.get_extra_info("sockname")
        return str(own[0]) if isinstance(own, tuple) else ""

    def flush(self) -> None:
        """Write the collected output. The event loop calls this at the end of a tick."""
        if self._unsent:
            self.active_ms = self._clock.monotonic_ms()
        self._write()

    def _write(self) -> None:
        self._flush_due = False
        unsent = self._unsent
        if self._transport is None:
            return
        if self._tls is not None:
            if unsent:
                self._tls.send(unsent)
                self._unsent = []
            encrypted = self._tls.outgoing()
            unsent = [encrypted] if encrypted else []
        if unsent:
            self._unsent = []
            if len(unsent) == 1:
                self._transport.write(unsent[0])
            elif self._is_plain_asyncio:
                self._transport.write(b"".join(unsent))
            else:
                self._transport.writelines(unsent)
            if self._limits is not None:
                # Measure after the write: bytes that the socket accepted immediately use no memory.
                waiting = self._transport.get_write_buffer_size()
                if waiting >= _UNSENT_REPORTED_BYTES or self._is_unsent_reported:
                    self._is_unsent_reported = waiting >= _UNSENT_REPORTED_BYTES
                    self._limits.note_waiting(self, waiting if self._is_unsent_reported else 0)

    def close(self, reason: str = "") -> None:
        """Close the connection after the queued bytes have been written. `closed` is done then."""
        if self._transport is not None and not self._transport.is_closing():
            if reason:
                _log.info("closing connection of %s: %s", self.peer, reason)
            self._closed_because = reason or "it was closed here"
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately and discard the queued bytes."""
        if self._transport is not None:
            self._transport.abort()

    def cut(self, reason: str) -> None:
        """Close the connection immediately, and free the bytes of the incomplete frame."""
        self.warn(f"closing connection of {self.peer}: {reason}")
        self._closed_because = reason
        self.abort()

    def warn(self, line: str) -> None:
        """Log a fault of the peer. A server logs at most one fault per minute and peer address."""
        if self._limits is None:
            _log.warning("%s", line)
        else:
            self._limits.log.write(logging.WARNING, self.peer.rpartition(":")[0], line, self._clock.monotonic_ms())

    def plain_received(self, data: bytes) -> None:
        """Handle the data that was read before the protocol was detected."""
        raise NotImplementedError(f"{type(self).__name__} takes over no connection")

    def probe(self) -> None:
        """Check that a silent peer still responds, if the protocol has a message for this."""

    def hand_over(self, other: Link) -> None:
        """Move the connection to another protocol, as if that protocol had accepted the connection."""
        transport, self._transport = self._transport, None
        assert transport is not None, "a connection that is handed over is open"
        assert not self._unsent, "nothing was sent before the protocol is known"
        other._tls, self._tls = self._tls, None
        transport.set_protocol(other)
        self.connection_lost(None)  # so that the server counts one connection instead of two
        other.peer, other.peer_host, other.hops, other.addresses = self.peer, self.peer_host, self.hops, self.addresses
        other.connection_made(transport)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)
        if not self.hops:  # a connection that was handed over already has its addresses
            self._name_peer(transport.get_extra_info("peername"))
        if self._tls is not None:
            self.flush()  # the client begins the TLS handshake
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._unsent.clear()
        if not self.closed.done():
            self.closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)

    # -- methods for a protocol on top

    def _flush_soon(self) -> None:
        """Write the collected output at the end of this tick."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def _open(self, sniffer: ProtocolSniffer, data: bytes) -> bytes:
        """Return the first plain bytes of an accepted connection, or no bytes while more data or a certificate is
        needed."""
        opened = sniffer.feed(data)
        if opened is None:
            own = sniffer.waits_for
            if own is not None and self._transport is not None:
                self._transport.pause_reading()
                own.when_settled(self._open_late)
            return b""
        self._sniffer = None  # further reads cost one comparison
        self._tls = opened.tls
        if opened.source is not None and sniffer.believes(self.hops):
            self._name_peer(opened.source)
        return opened.rest if opened.tls is None else opened.tls.feed(opened.rest)

    def _open_late(self) -> None:
        """Continue with the data that was read before the certificate was available."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(b"")

    def _name_peer(self, peername: Any) -> None:
        if not isinstance(peername, tuple):
            self.peer = str(peername or "?")
            return
        address = ipaddress.ip_address(peername[0].partition("%")[0])
        if address.version == 6 and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        self.peer = join_address(str(address), peername[1])
        self.peer_host = pack_host(str(address), peername[1])
        self.hops.append(address)
        self.addresses = str(address), *self.addresses


class RequestHandling(Protocol):
    """The members of a `Router` that a connection uses to handle the requests of its peer."""

    batch: Callable[[], AbstractContextManager[None]] | None
    sends: SendsReader | None

    def remaining(self, connection: Connection, units: list[Frame | Sends | Acks]) -> Iterable[Frame]: ...
    def handle(self, connection: Connection, command: Command) -> None: ...


class _Call(Struct, gc=False):
    """A running call."""

    answer: asyncio.Future[Command]
    deadline_ms: float
    timeout_ms: float
    code: int
    is_put_off: bool = False


class Connection(Link):
    """Frames, requests and responses of one peer.

    Args:
        router: handles the peer's requests.
        always_reads: continue reading while the peer does not read. Clients set this option: if both sides stopped
            reading, each would wait for the other for ever.
        upgrade: called with the first data of a connection that begins like HTTP/2; it takes over the connection.
        link: further arguments of `Link`.

    Attributes:
        user: the user who signed the current request, if signatures are required.
        heard_ms: monotonic time of the last read, -inf before the first read.
    """

    def __init__(
        self,
        router: RequestHandling,
        *,
        clock: Clock = SYSTEM_CLOCK,
        always_reads: bool = False,
        upgrade: Callable[[Connection, bytes], None] | None = None,
        **link: Unpack[LinkArguments],
    ) -> None:
        super().__init__(clock=clock, **link)
        self._router = router
        self._always_reads = always_reads
        self._upgrade = upgrade
        header_bytes_max = None if self._sniffer is None else REQUEST_HEADER_BYTES_MAX
        self._splitter = FrameSplitter(header_bytes_max=header_bytes_max, sends=router.sends)
        self._incomplete_bytes = 0
        self._is_held = False
        self._left: Iterator[Frame] | None = None
        self._later: list[Frame | Sends | Acks] = []
        self._taken: asyncio.Future[None] | None = None
        self._calls: dict[int, _Call] = {}
        self._opaque = 0
        self._sweep_at_ms = float("inf")
        self._sweep_due = 0.0
        self._reads = 0
        self.heard_ms = float("-inf")
        self._sweep: asyncio.TimerHandle | None = None
        self.user: str | None = None

    # -- methods for its owner

    def send(self, command: Command) -> None:
        """Send a reply or one-way request, together with the other output of this tick. If the connection is closed, do
        nothing."""
        if not self.is_open:
            return
        self._unsent.extend(encode_command(command))
        if not self._flush_due:
            self._flush_soon()

    def send_frame(self, *pieces: Body) -> None:
        """Send the pieces of an encoded reply, without joining them. Otherwise this method works like `send`."""
        if self._transport is not None and not self._transport.is_closing():
            self._unsent += pieces
            if not self._flush_due:
                self._flush_soon()

    def send_successes(self, opaques: list[int]) -> None:
        """Send success responses without fields for several requests."""
        self.send_frame(success_frames(opaques))

    def hold(self) -> None:
        """Stop reading, and handle no further request of the peer until `go_on`, to preserve the order of requests."""
        assert not self._is_held, "only one request at a time holds the connection"
        self._is_held = True
        self._pause_reading()

    def go_on(self) -> None:
        """Release the connection. The next tick handles the requests that arrived while the connection was held."""
        assert self._is_held, "the connection is held"
        # Wait for the next tick: the caller may be sending other replies, and handling requests now would change their
        # order.
        self._loop.call_soon(self._go_on)

    def cork(self) -> None:
        """Collect output until the next `flush`, which the caller must call. This saves one tick."""
        self._flush_due = True

    def on_one_way_reply(self, request: Command, answer: Command) -> None:
        """Discard the response to a one-way request, because the peer expects no response."""

    async def drain(self, timeout_ms: float) -> None:
        """Wait until the peer reads fast enough. Senders call this method if they wait for no response.
        Raises TimeoutError: the peer reads nothing in time."""
        if len(self._unsent) >= _UNSENT_MAX:
            await asyncio.sleep(0)
        if self._taken is not None:
            async with asyncio.timeout(timeout_ms / 1000.0):
                await asyncio.shield(self._taken)

    def call(self, command: Command, timeout_ms: float) -> asyncio.Future[Command]:
        """Set the opaque of a request, send the request, and return a future of the response.
        The future raises RequestTimedOut or ConnectionLost."""
        answer: asyncio.Future[Command] = self._loop.create_future()
        if not self.is_open:
            answer.set_exception(ConnectionLost(self.peer, self._closed_because))
            return answer
        # Java reads the opaque as a signed int. Apache's clients count per process, rmqkit counts per connection.
        self._opaque = (self._opaque + 1) & _OPAQUE_MASK
        assert self._opaque not in self._calls, "the opaque is not in use by a running call"
        command.opaque = self._opaque
        now_ms = self._clock.monotonic_ms()
        self.send(command)  # first, because it raises an error if the command cannot be encoded
        self._calls[command.opaque] = _Call(answer, now_ms + timeout_ms, timeout_ms, command.code)
        self._sweep_by(now_ms + timeout_ms, now_ms)
        return answer

    def cut(self, reason: str) -> None:
        """Close the connection immediately, and free the bytes of the incomplete frame."""
        self._splitter = FrameSplitter()  # free the bytes now, before the socket has closed
        self._incomplete_bytes = 0
        super().cut(reason)

    # -- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self.active_ms = self.heard_ms = self._clock.monotonic_ms()
        self._reads += 1
        self._flush_due = True  # `_finish_read` sends all replies in one write
        units: list[Frame | Sends | Acks] = []
        try:
            if self._sniffer is not None:
                data = self._open(self._sniffer, data)
            elif self._tls is not None:
                data = self._tls.feed(data)
            if self._upgrade is not None and data:
                upgrade, self._upgrade = self._upgrade, None
                if data[0] == HTTP2_FIRST_BYTE:
                    upgrade(self, data)
                    return
            units = self._splitter.feed(data)
            # While the connection is held, reading is paused, but data from the kernel or TLS may still arrive.
            if self._is_held:
                self._later.extend(units)
            elif units:
                self._handle_all(units)
        except ProtocolError as error:
            self._give_up(error)
        except CoreFault as error:
            self.cut(f"a fault of the compiled core: {error}")
        finally:
            self._finish_read()
        if self._splitter.buffered_bytes != self._incomplete_bytes:
            self._keep_incomplete(bool(units))

    def pause_writing(self) -> None:
        self._taken = self._loop.create_future()
        if not self._always_reads:
            self._pause_reading()

    def resume_writing(self) -> None:
        self._let_senders_go_on()
        self._resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # first, so that the following calls cannot write
        if self._sweep is not None:
            self._sweep.cancel()
        reason = str(exc) if exc else self._closed_because
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(ConnectionLost(self.peer, reason))
        self._splitter = FrameSplitter()  # free the incomplete frame, even if the connection is still referenced
        self._left, self._later = None, []
        self._let_senders_go_on()
        super().connection_lost(exc)

    # -- internal methods

    def _handle_all(self, units: list[Frame | Sends | Acks]) -> None:
        """Handle the units in order, up to a request that holds the connection."""
        assert not self._is_held, "the connection is not held"
        remaining = self._router.remaining(self, units)
        if not remaining:
            return  # the fast path has handled all units, as for most reads of a busy port
        if remaining is units:  # a single request that is not a plain send
            self._handle(units[0])  # type: ignore[arg-type]
            return
        left = iter(remaining)
        if len(units) == 1 or self._router.batch is None:
            self._handle_left(left)
        # The fast path may handle all units. Open a batch only if a request remains.
        elif (first := next(left, None)) is not None:
            with self._router.batch():
                self._handle(first)
                self._handle_left(left)

    def _handle_left(self, left: Iterator[Frame]) -> None:
        while not self._is_held and (frame := next(left, None)) is not None:
            self._handle(frame)
        if self._is_held:
            self._left = left  # do not iterate further: the fast path would store plain sends too early

    def _go_on(self) -> None:
        """Handle the data that was read while the connection was held."""
        left, self._left, self._is_held = self._left, None, False
        if self._transport is None:
            return
        self._flush_due = True
        try:
            if left is not None:
                self._handle_left(left)
            if self._later and not self._is_held:
                later, self._later = self._later, []
                self._handle_all(later)
        except ProtocolError as error:
            self._give_up(error)
        except CoreFault as error:
            self.cut(f"a fault of the compiled core: {error}")
        finally:
            self._finish_read()
        self._resume_reading()

    def _give_up(self, error: ProtocolError) -> None:
        self.warn(f"closing connection of {self.peer}: {error}")
        self.close()  # this still sends earlier replies
        self._closed_because = str(error)

    def _finish_read(self) -> None:
        """Write the replies immediately, in the tick of the read."""
        if self._unsent or self._tls is not None:
            self._write()
        else:
            self._flush_due = False

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Resume reading, unless the peer must first read replies, or a request holds the connection."""
        is_behind = self._taken is not None and not self._always_reads
        if self._transport is not None and not self._transport.is_closing() and not is_behind and not self._is_held:
            self._transport.resume_reading()

    def _keep_incomplete(self, has_frames: bool) -> None:
        """Record the incomplete frame of the last read.

        ``has_frames``: the last read completed other frames, so the incomplete frame began in this read.
        """
        is_new = has_frames or not self._incomplete_bytes
        self._incomplete_bytes = self._splitter.buffered_bytes
        if not self._incomplete_bytes:
            self.frame_since_ms = None
        elif is_new:
            self.frame_since_ms = self.active_ms
        if self._limits is not None and self._transport is not None:
            self._limits.note_incomplete(self, self._incomplete_bytes, is_new=is_new)

    def _let_senders_go_on(self) -> None:
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        self._taken = None

    def _handle(self, frame: Frame) -> None:
        command = decode_command(frame)
        if command.flag & RESPONSE:
            self._settle(command)
        else:
            self._router.handle(self, command)

    def _settle(self, response: Command) -> None:
        call = self._calls.pop(response.opaque, None)
        if call is not None and not call.answer.done():  # the call may have timed out before
            call.answer.set_result(response)

    def _sweep_by(self, at_ms: float, now_ms: float) -> None:
        """Make the common timer of all calls fire not later than a deadline."""
        if at_ms < self._sweep_at_ms:
            if self._sweep is not None:
                self._sweep.cancel()
            self._sweep_at_ms = at_ms
            delay = max(0.0, at_ms - now_ms) / 1000.0
            self._sweep_due = self._loop.time() + delay
            self._sweep = self._loop.call_later(delay, self._expire_calls)

    def _expire_calls(self) -> None:
        """End the calls that are past their deadline, after reading the data that has already arrived.

        While a loop is blocked, it neither writes requests nor reads responses. The deadline of a call is therefore
        extended once by the time of the blocking. Before a call ends, the loop runs until no more data arrives, because
        the response may wait in the socket.
        """
        late_ms = (self._loop.time() - self._sweep_due) * 1000.0
        now_ms = self._clock.monotonic_ms()
        self._sweep_at_ms = float("inf")
        is_over = False
        for call in self._calls.values():
            if call.deadline_ms > now_ms:
                continue
            if late_ms > _STANDSTILL_MS and not call.is_put_off:
                call.is_put_off = True
                call.deadline_ms = now_ms + min(late_ms, call.timeout_ms)
            else:
                is_over = True
        if is_over:
            self._end_calls(now_ms, self._reads, _LOOKS_MAX)
        elif self._calls:
            self._sweep_by(min(call.deadline_ms for call in self._calls.values()), now_ms)

    def _end_calls(self, until_ms: float, reads: int, looks_left: int) -> None:
        """End the calls with deadlines up to ``until_ms``. While data arrives, wait and read the data first."""
        if looks_left == _LOOKS_MAX or (looks_left and reads != self._reads):
            # Wait for two ticks: a tick handles the data that it reads after the callbacks of this tick.
            look = functools.partial(self._end_calls, until_ms, self._reads, looks_left - 1)
            self._loop.call_soon(self._loop.call_soon, look)
            return
        for opaque in [opaque for opaque, call in self._calls.items() if call.deadline_ms <= until_ms]:
            call = self._calls.pop(opaque)
            if not call.answer.done():
                call.answer.set_exception(
                    RequestTimedOut(self.peer, call.code, call.timeout_ms, request_name(call.code))
                )
        if self._calls:
            earliest_ms = min(call.deadline_ms for call in self._calls.values())
            self._sweep_by(earliest_ms, self._clock.monotonic_ms())
