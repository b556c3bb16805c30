"""One TCP connection, on either side: a chunk in, a list of frames out; replies of a tick leave in one write.

Both peers number their own requests, so a response is told by its flag and found by its opaque among the calls this
side made. A peer that does not read pauses its own connection: while more than `WRITE_BYTES_HIGH` wait to be written
nothing more is read from it, so memory per connection stays bounded. Bytes that are not frames close the connection,
and only it, with one log line. Loop only. Source: remoting.md §1.7, §2.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from typing import Any, cast

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ConnectionLost, ProtocolError, RequestTimedOut
from rmqkit.protocol.command import Body, Command, decode_command, encode_command
from rmqkit.protocol.frame import FRAME_BYTES_MAX, JSON, FrameSplitter
from rmqkit.protocol.record import pack_host
from rmqkit.remoting.address import join_address
from rmqkit.remoting.dispatch import Dispatch

__all__ = ["WRITE_BYTES_HIGH", "Connection"]

WRITE_BYTES_HIGH = 4 << 20
"""Unsent bytes above which the connection is not read until the peer takes some."""

_log = logging.getLogger(__name__)
_OPAQUE_MASK = 0x7FFFFFFF


class Connection(asyncio.Protocol):
    """Frames, requests and responses of one peer.

    Args:
        dispatch: answers the peer's requests.
        on_open, on_close: told when the connection stands and when it is gone.

    Attributes:
        peer: the other side as ``ip:port``.
        peer_host: the same packed as in records (8 or 20 bytes).
        active_ms: monotonic time of the last read or write.
        closed: done when the connection is gone.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        serialize_type: int = JSON,
    ) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self._on_open = on_open
        self._on_close = on_close
        self._serialize_type = serialize_type
        self._splitter = FrameSplitter(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Body] = []
        self._flush_due = False
        self._calls: dict[int, tuple[asyncio.Future[Command], float, Command]] = {}
        self._opaque = 0
        self._sweep_at_ms = float("inf")
        self._sweep: asyncio.TimerHandle | None = None
        self.peer = "?"
        self.peer_host = pack_host("0.0.0.0", 0)
        self.active_ms = clock.monotonic_ms()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # -- what its owner does

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Whether the peer keeps up with what is sent to it."""
        return (
            self.is_open
            and self._transport is not None
            and (self._transport.get_write_buffer_size() < WRITE_BYTES_HIGH)
        )

    def send(self, command: Command) -> None:
        """Send a reply or one-way request with the other output of this tick; nothing happens when closed."""
        if not self.is_open:
            return
        self._unsent.extend(encode_command(command, self._serialize_type))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def call(self, command: Command, timeout_ms: float) -> asyncio.Future[Command]:
        """Send a request; the future holds the response.

        The future raises RequestTimedOut or ConnectionLost. ``command.opaque`` is set here.
        """
        answer: asyncio.Future[Command] = self._loop.create_future()
        if not self.is_open:
            answer.set_exception(ConnectionLost(self.peer, "it is closed"))
            return answer
        self._opaque = (self._opaque + 1) & _OPAQUE_MASK
        command.opaque = self._opaque
        now_ms = self._clock.monotonic_ms()
        self._calls[command.opaque] = (answer, now_ms + timeout_ms, command)
        self._sweep_by(now_ms + timeout_ms, now_ms)
        self.send(command)
        return answer

    def close(self, reason: str = "") -> None:
        """Close after what is queued has been written; `closed` tells when."""
        if self._transport is not None and not self._transport.is_closing():
            if reason:
                _log.info("closing connection of %s: %s", self.peer, reason)
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_HIGH)
        self.peer, self.peer_host = _peer_of(transport.get_extra_info("peername"))
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self.active_ms = self._clock.monotonic_ms()
        self._flush_due = True  # everything answered below leaves in the one write at the end
        try:
            for frame in self._splitter.feed(data):
                command = decode_command(frame)
                if command.is_response:
                    self._settle(command)
                else:
                    self._dispatch.handle(self, command)
        except ProtocolError as error:
            _log.warning("closing connection of %s: %s", self.peer, error)
            self.close()
        finally:
            self._flush()

    def pause_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._sweep is not None:
            self._sweep.cancel()
        reason = str(exc) if exc else "the peer closed it"
        calls, self._calls = self._calls, {}
        for answer, _, _ in calls.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(self.peer, reason))
        self._unsent.clear()
        if not self.closed.done():
            self.closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)

    # -- inside

    def _flush(self) -> None:
        self._flush_due = False
        unsent = self._unsent
        if unsent and self._transport is not None:
            self._unsent = []
            self.active_ms = self._clock.monotonic_ms()
            if len(unsent) == 1:
                self._transport.write(unsent[0])
            else:
                self._transport.writelines(unsent)

    def _settle(self, response: Command) -> None:
        call = self._calls.pop(response.opaque, None)
        if call is not None and not call[0].done():  # an unknown opaque is an answer that came too late
            call[0].set_result(response)

    def _sweep_by(self, at_ms: float, now_ms: float) -> None:
        """Have one timer for all calls: it fires at the earliest deadline."""
        if at_ms < self._sweep_at_ms:
            if self._sweep is not None:
                self._sweep.cancel()
            self._sweep_at_ms = at_ms
            self._sweep = self._loop.call_later(max(0.0, at_ms - now_ms) / 1000.0, self._expire_calls)

    def _expire_calls(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._sweep_at_ms = float("inf")
        expired = [opaque for opaque, (_, deadline_ms, _) in self._calls.items() if deadline_ms <= now_ms]
        for opaque in expired:
            answer, _, command = self._calls.pop(opaque)
            if not answer.done():
                answer.set_exception(RequestTimedOut(self.peer, command.code, 0))
        if self._calls:
            self._sweep_by(min(deadline_ms for _, deadline_ms, _ in self._calls.values()), now_ms)


def _peer_of(peername: Any) -> tuple[str, bytes]:
    if not isinstance(peername, tuple):
        return str(peername or "?"), pack_host("0.0.0.0", 0)
    ip, port = peername[0].partition("%")[0], peername[1]
    address = ipaddress.ip_address(ip)
    if address.version == 6 and address.ipv4_mapped is not None:
        ip = str(address.ipv4_mapped)
    return join_address(ip, port), pack_host(ip, port)
