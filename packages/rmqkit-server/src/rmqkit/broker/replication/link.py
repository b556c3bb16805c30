"""The master's side of the connection of one slave (``HAConnection``). It receives reports and sends frames of the log.

A frame is twelve bytes and a slice of the mapped log. The slice is written without a copy. TLS is recognized by the
first byte, as on the main port: no report begins with 0x16. With ``haTlsEnable`` only TLS is accepted. Without the
setting slaves can use TLS if the broker has a certificate.

Use this module only on the event loop. `rmqkit.broker.replication.master` admits links and decides when they send.
Source: store.md §21.1 to §21.3.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import FrameError, StoreError
from rmqkit.protocol.ha import DATA_BYTES_MAX, Reports, frame_head
from rmqkit.remoting.address import IpAddress, ip_of, join_address
from rmqkit.remoting.bounded_log import BoundedLog
from rmqkit.remoting.tls import CLIENT_HELLO, ServerTls, TlsLayer
from rmqkit.store.message_store import MessageStore

__all__ = ["Link", "LinkOwner"]

_log = logging.getLogger(__name__)
_SECOND_MS = 1000.0
# The maximum number of bytes for a slave in one `Link.send`. Between two calls the loop serves other connections.
_ROUND_BYTES = 1 << 20
_UNSENT_BYTES_MAX = 4 << 20


class LinkOwner(Protocol):
    """The part of a master that a link reports to."""

    log: BoundedLog
    tls: ServerTls | None

    def arrived(self, link: Link) -> None:
        """Admit, refuse or hold a new link."""

    def opened(self, link: Link) -> None:
        """Add an admitted link."""

    def reported(self, link: Link, *, is_first: bool) -> None:
        """Handle a report."""

    def closed(self, link: Link) -> None:
        """Drop a link."""

    def advanced(self) -> None:
        """Send to the links that are writable."""


class Link(asyncio.Protocol):
    """The connection of one slave.

    Attributes:
        acked_offset: the last reported offset, -1 before the first report.
        next_offset: the offset of the next frame, -1 before the first report.
        ip: the IP address of the slave, or None.
        turn, first_turn: the numbers of its newest and its first report among all reports to this master.
        read_ms: the time of the last report, or of the connect.
        looks_begun: the number of member look-ups that had begun when the slave connected.
        is_paused: True while the write buffer is full, because the slave does not read.
        is_lost: True if the log no longer has the data that the slave needs next.
        bytes_per_second: the number of bytes that were sent in the last whole second.
    """

    def __init__(self, master: LinkOwner, store: MessageStore, settings: BrokerSettings, clock: Clock) -> None:
        self._master = master
        self._store = store
        self._settings = settings
        self._clock = clock
        self._is_plain_asyncio = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
        self._transport: asyncio.Transport | None = None
        self._reports = Reports()
        self.is_paused = False
        self._tls: TlsLayer | None = None
        self._is_known_plain = False
        self.read_ms = self._written_ms = self._second_ms = clock.monotonic_ms()
        self._sent_bytes = 0
        self.peer = self.host = "?"
        self.ip: IpAddress | None = None
        self.turn = self.first_turn = self.looks_begun = 0
        self.closed_because = "it closed the connection"
        self.acked_offset = self.next_offset = -1
        self.is_lost = False
        self.bytes_per_second = 0

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # The limit bounds the memory for a slave that does not read: when the socket is full, slices of mapped files
        # are copied into the transport's buffer.
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        peer: Any = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.ip = ip_of(peer[0])
            self.host = str(self.ip or peer[0])
            self.peer = join_address(self.host, peer[1])
        self._master.arrived(self)

    def hold(self) -> None:
        """Pause reading."""
        if self._transport is not None:
            self._transport.pause_reading()

    def admit(self) -> None:
        """Resume reading, and add the link to the master's links."""
        if self._transport is not None and not self._transport.is_closing():
            if not self._transport.is_reading():
                self._transport.resume_reading()
            self._master.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            offset = self._reports.feed(self._plain(data))
        except FrameError as error:
            self.close(str(error), is_wrong=True)
            return
        if offset is None or self._transport is None or self._transport.is_closing():
            return
        is_first = self.acked_offset < 0
        limit = self._store.max_physical_offset if is_first else self.next_offset
        if offset > limit:
            had = "the log ends at" if is_first else "it was sent the log up to"
            self.close(f"it reports offset {offset}, {had} {limit}: its log has another history", is_wrong=True)
            return
        self.read_ms = self._clock.monotonic_ms()
        self.acked_offset = offset
        if is_first:
            # Begin with a whole file for an empty slave, like the reference: its files then begin at the same offsets.
            self.next_offset = offset or self._store.file_start(self._store.dispatched_offset)
        self._master.reported(self, is_first=is_first)

    def _plain(self, data: bytes) -> bytes:
        """Return the slave's data, decrypted if the slave uses TLS. The first byte of the link shows this.

        Raises FrameError: TLS is required and the slave does not speak it, or its TLS data is invalid.
        """
        if self._tls is None and not self._is_known_plain:
            if data[0] == CLIENT_HELLO and self._master.tls is not None:
                self._tls = self._master.tls.layer()
            elif self._settings.ha_tls:
                raise FrameError(
                    "it does not use TLS, but haTlsEnable=true requires it: set haTlsEnable=true at the slave, too"
                )
            self._is_known_plain = self._tls is None
        if self._tls is None:
            return data
        try:
            return self._tls.feed(data)
        finally:
            if (answer := self._tls.outgoing()) and self._transport is not None:
                self._transport.write(answer)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._master.advanced()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is not None:
            self.closed_because = str(exc)
        self._master.closed(self)

    # ---- called by the master

    def send(self) -> bool:
        """Send as much of the log as the slave accepts now. Return True if there is more to send in the next tick."""
        if self._transport is None or self.is_paused or self.is_lost or self.acked_offset < 0:
            return False
        parts: list[bytes | memoryview] = []
        left, end = min(_ROUND_BYTES, self._allowance), self._store.dispatched_offset
        try:
            while left > 0 and self.next_offset < end and (data := self._data(left)):
                assert len(data) <= left, "a frame is not larger than the allowance"
                parts += (frame_head(self.next_offset, len(data)), data)
                self.next_offset += len(data)
                left -= len(data)
        except StoreError as error:
            # Do not close the link: the slave would reconnect without end. The link gets heartbeats and is not in sync.
            self.is_lost = True
            _log.error("cannot send the log to slave %s: %s; empty its store", self.peer, error)
        except OSError as error:
            self.close(f"the log cannot be read: {error}", is_wrong=True)
            return False
        return bool(parts) and self._write(parts) and self.next_offset < end and self._allowance > 0

    def _data(self, size_max: int) -> memoryview:
        """Return the data of the next frame."""
        data = self._store.log_part(self.next_offset, min(size_max, self._settings.ha_batch_bytes, DATA_BYTES_MAX))
        self._sent_bytes += len(data)
        return data

    def check_times(self, now_ms: float) -> None:
        """Close a silent link, measure the rate, and send a heartbeat if it is due."""
        settings = self._settings
        if now_ms - self.read_ms > settings.ha_silent_ms_max:
            self.close(f"no report for {settings.ha_silent_ms_max} ms")
            return
        passed_ms = now_ms - self._second_ms
        if passed_ms >= _SECOND_MS:
            self.bytes_per_second = int(self._sent_bytes * _SECOND_MS / passed_ms)
            self._sent_bytes, self._second_ms = 0, now_ms
        if now_ms - self._written_ms > settings.ha_heartbeat_interval_ms:
            self.beat()

    def beat(self) -> None:
        """Send a heartbeat, unless the slave has not reported yet. Slaves of rmqkit answer with a report."""
        is_idle = self.acked_offset >= 0 and not self.is_paused
        if is_idle and self._transport is not None and not self._transport.is_closing():
            self._write([frame_head(self.next_offset, 0)])

    def close(self, reason: str = "the master stops", *, is_wrong: bool = False) -> None:
        """Abort the link. The slave gets the rest of the data after it reconnects."""
        if self._transport is None or self._transport.is_closing():
            return
        self.closed_because = reason
        if is_wrong:
            # Use a separate source: other connections from the slave's address must not suppress its log lines.
            source = self.host if self.acked_offset < 0 else f"slave {self.host}"
            line = f"slave {self.peer} is refused: {reason}"
            self._master.log.write(logging.ERROR, source, line, self._clock.monotonic_ms())
        self._transport.abort()  # close() would wait for a peer that does not read

    @property
    def _allowance(self) -> int:
        """The number of bytes that can still be sent in this second."""
        if not self._settings.ha_flow_control:
            return _ROUND_BYTES
        return self._settings.ha_bytes_per_second_max - self._sent_bytes

    def _write(self, parts: list[bytes | memoryview]) -> bool:
        """Write frames. Return True if the link is still writable."""
        assert self._transport is not None, "a closed link sends nothing"
        self._written_ms = self._clock.monotonic_ms()
        if self._tls is not None:
            self._tls.send(parts)
            self._transport.write(self._tls.outgoing())
        elif self._is_plain_asyncio:  # its writelines() copies or never pauses, see `rmqkit.remoting.connection`
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        return not self.is_paused
