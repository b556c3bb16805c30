"""The master's side of replication: the log goes to the slaves as it grows (``DefaultHAService``, ``HAConnection``).

A slave connects to the HA port and reports how far its log goes; only then it is sent anything. Frames begin at that
offset, for an empty slave at the start of the log file the master is in: older data is not copied.

=======================================  ==========================================================================
a slave that                             is
=======================================  ==========================================================================
keeps up, or is behind                   sent what was dispatched: durable under SYNC_FLUSH, committed otherwise
takes nothing more for the moment        sent nothing more until it does
has all there is                         sent a heartbeat after ``haSendHeartbeatInterval`` without other frames
is silent for ``haHousekeepingInterval`` sent away
reports more than there is, or was sent  sent away: its log has another history than this one
wants what retention has deleted         sent heartbeats only, as by the reference, told of once in the log, and never
                                         counted as in sync: only an empty store can follow from here
=======================================  ==========================================================================

Work is done per frame, never per record: a frame is twelve bytes and a slice of the mapped log that is written without
being copied. What the broker puts in one tick of the loop goes out in one round. A report is what the slave has made
safe, so it counts as a copy of everything before it (*confirm offset*, `HaMaster.confirmed_offset`). The protocol does
not say who a slave is; when one comes back before its old link is known to be dead, the old one no longer counts.

Loop only. Not handled here: who waits for copies (`durability`), how the log is read (`rmqkit.store.replication`).
Source: store.md §21.1 to §21.3, §21.5; behaviour.md §10.3.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, cast

from msgspec import UNSET, UnsetType

from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import FrameError, StoreError
from rmqkit.protocol.bodies.replication import HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.ha import DATA_BYTES_MAX, Reports, frame_head
from rmqkit.remoting.address import join_address
from rmqkit.remoting.server import bind
from rmqkit.store.message_store import MessageStore

__all__ = ["HaMaster", "waits_for_copies"]

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.1
_SECOND_MS = 1000.0
_ROUND_BYTES = 1 << 20
"""What a slave that is behind is sent in one round; in between the loop serves the others."""

_UNSENT_BYTES_MAX = 4 << 20
_MARK_MS_MIN = 2.0
_MARKS_MAX = 2048


def waits_for_copies(settings: BrokerSettings) -> bool:
    """Whether answers of this broker wait for slaves: a SYNC_MASTER's do, unless it is content with its own copy."""
    is_alone_enough = settings.in_sync_replicas <= 1 and (
        settings.min_in_sync_replicas <= 1 or not (settings.acts_as_master and settings.auto_in_sync_replicas)
    )
    return settings.broker_role is BrokerRole.SYNC_MASTER and (settings.all_in_sync_replicas or not is_alone_enough)


class HaMaster:
    """Listens for slaves and sends them the log.

    Args:
        on_acked: told when slaves came, went or have more of the log; at most once per read.
    """

    def __init__(
        self, store: MessageStore, settings: BrokerSettings, clock: Clock, on_acked: Callable[[], object]
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._on_acked = on_acked
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._links: list[_Link] = []
        self._is_round_due = False
        self._look: asyncio.TimerHandle | None = None
        self._growth = _Growth()

    async def start(self, bind_address: str, port: int) -> int:
        """Listen for slaves; returns the port (a free one for 0).
        Raises ListenFailed: the port is taken or the address is not this machine's."""
        self._server = await bind(self._link, bind_address, port)
        await self._server.start_serving()
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut every link; what was written before is still delivered by the kernel."""
        if self._look is not None:
            self._look.cancel()
        if self._server is None:
            return
        self._server.close()
        for link in list(self._links):
            link.close()
        await self._server.wait_closed()
        self._server = None

    def advanced(self) -> None:
        """Send what was dispatched, in the next tick of the loop; to be called whenever that is more than before."""
        if self._links and not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._round)

    # ---- how far the copies are

    def replicated_offset(self, copies: int) -> int:
        """Physical offset up to which there are so many copies of the log, the master's own among them; -1 for none."""
        if copies <= 1:
            return self._store.max_physical_offset
        acked = sorted((link.acked_offset for link in self._links if link.counts), reverse=True)
        return acked[copies - 2] if len(acked) > copies - 2 else -1

    def in_sync_count(self) -> int:
        """Brokers that are less than ``haMaxGapNotInSync`` behind, this one among them."""
        return 1 + sum(self._is_in_sync(link) for link in self._links)

    def confirmed_offset(self) -> int:
        """Physical offset up to which there are the copies that a SYNC_MASTER's answers wait for."""
        needed = self.needed_copies()
        if self._settings.all_in_sync_replicas:
            needed = max(needed, self.in_sync_count())
        return self.replicated_offset(needed)

    def needed_copies(self) -> int:
        """How many copies those are; an acting-master group may make do with fewer."""
        settings = self._settings
        if settings.acts_as_master and settings.auto_in_sync_replicas:
            return max(min(settings.in_sync_replicas, self.in_sync_count()), settings.min_in_sync_replicas)
        return settings.in_sync_replicas

    @property
    def lacks_replicas(self) -> bool:
        """Whether sends are refused because too few brokers are in sync, as they are in an acting-master group only."""
        return self._settings.acts_as_master and self.needed_copies() > self.in_sync_count()

    def status(self) -> HaRuntimeInfo:
        """What GET_BROKER_HA_STATUS answers."""
        end = self._store.max_physical_offset
        connections = [
            HaConnectionInfo(
                addr=link.peer,
                slave_ack_offset=link.acked_offset,
                diff=end - link.acked_offset,
                in_sync=self._is_in_sync(link),
                transferred_byte_in_second=link.bytes_per_second,
                transfer_from_where=link.next_offset,
                lag_ms=self._lag_ms(link),
            )
            for link in self._links
        ]
        return HaRuntimeInfo(
            master=True,
            master_commit_log_max_offset=end,
            in_sync_slave_nums=self.in_sync_count() - 1,
            ha_connection_info=connections,
        )

    def _is_in_sync(self, link: _Link) -> bool:
        behind_bytes = self._store.max_physical_offset - link.acked_offset
        return link.acked_offset >= 0 and not link.is_lost and behind_bytes < self._settings.ha_gap_bytes_max

    def _lag_ms(self, link: _Link) -> int | UnsetType:
        """The age of the oldest data that a slave has not acknowledged, where that is known."""
        if link.acked_offset >= self._store.dispatched_offset:
            return 0
        grew_ms = self._growth.grew_ms(link.acked_offset)
        return UNSET if grew_ms is None else int(self._clock.monotonic_ms() - grew_ms)

    # ---- links

    def _link(self) -> _Link:
        return _Link(self, self._store, self._settings, self._clock)

    def opened(self, link: _Link) -> None:
        """A link stands; its slave has yet to report."""
        self._links.append(link)
        if self._server is None or not self._server.is_serving():
            link.close()  # it was accepted while the port closed
            return
        self._growth.mark(self._store.dispatched_offset, self._clock.monotonic_ms())
        if self._look is None:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_round)

    def reported(self, link: _Link, *, is_first: bool) -> None:
        """A slave has said how far it is."""
        if is_first:
            for other in self._links:
                other.counts = other.counts and (other is link or other.host != link.host)
            _log.info(
                "slave %s has the log up to %d, is sent it from %d", link.peer, link.acked_offset, link.next_offset
            )
            self.advanced()
        self._on_acked()

    def closed(self, link: _Link) -> None:
        """A link is gone."""
        if link in self._links:
            self._links.remove(link)
            _log.info("slave %s is gone: %s", link.peer, link.closed_because)
            self._on_acked()

    def _round(self) -> None:
        self._is_round_due = False
        self._growth.mark(self._store.dispatched_offset, self._clock.monotonic_ms())
        is_more = [link.send() for link in self._links]
        if any(is_more):
            self.advanced()

    def _look_round(self) -> None:
        """What is due by time: heartbeats, silent slaves, the next second's allowance."""
        self._look = None
        now_ms = self._clock.monotonic_ms()
        for link in list(self._links):
            link.look(now_ms)
        if self._links:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_round)
            self._growth.forget(min(link.acked_offset for link in self._links))
            self.advanced()
        else:
            self._growth = _Growth()


class _Link(asyncio.Protocol):
    """The connection of one slave.

    Attributes:
        acked_offset: what it reported last, -1 before it did.
        next_offset: where the next frame begins, -1 before.
        counts: whether its reports are a copy that no other link stands for.
        is_lost: whether the log no longer has what it needs next.
        bytes_per_second: what it was sent in the last whole second.
    """

    def __init__(self, master: HaMaster, store: MessageStore, settings: BrokerSettings, clock: Clock) -> None:
        self._master = master
        self._store = store
        self._settings = settings
        self._clock = clock
        self._is_plain_asyncio = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
        self._transport: asyncio.Transport | None = None
        self._reports = Reports()
        self._is_paused = False
        self._read_ms = self._written_ms = self._second_ms = clock.monotonic_ms()
        self._sent_bytes = 0
        self.peer = self.host = "?"
        self.closed_because = "it closed the connection"
        self.acked_offset = self.next_offset = -1
        self.counts = self.is_lost = False
        self.bytes_per_second = 0

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        peer: Any = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.host, self.peer = str(peer[0]), join_address(peer[0].removeprefix("::ffff:"), peer[1])
        self._master.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            offset = self._reports.feed(data)
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
        self._read_ms = self._clock.monotonic_ms()
        self.acked_offset, self.counts = offset, True
        if is_first:
            self.next_offset = offset or self._store.file_start(self._store.dispatched_offset)
        self._master.reported(self, is_first=is_first)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._master.advanced()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is not None:
            self.closed_because = str(exc)
        self._master.closed(self)

    # ---- what the master does

    def send(self) -> bool:
        """Send what is there, so much as the slave takes; whether there is more for the next round."""
        if self._transport is None or self._is_paused or self.is_lost or self.acked_offset < 0:
            return False
        parts: list[bytes | memoryview] = []
        left, end = min(_ROUND_BYTES, self._allowance), self._store.dispatched_offset
        try:
            while left > 0 and self.next_offset < end and (data := self._data(left)):
                parts += (frame_head(self.next_offset, len(data)), data)
                self.next_offset += len(data)
                left -= len(data)
        except StoreError as error:
            self.is_lost = True
            _log.error("slave %s cannot be sent the log: %s; empty its store", self.peer, error)
        except OSError as error:
            self.close(f"the log cannot be read: {error}", is_wrong=True)
            return False
        return bool(parts) and self._write(parts) and self.next_offset < end and self._allowance > 0

    def _data(self, size_max: int) -> memoryview:
        """What the next frame holds."""
        data = self._store.log_part(self.next_offset, min(size_max, self._settings.ha_batch_bytes, DATA_BYTES_MAX))
        self._sent_bytes += len(data)
        return data

    def look(self, now_ms: float) -> None:
        """Do what is due at a time."""
        settings = self._settings
        if now_ms - self._read_ms > settings.ha_silent_ms_max:
            self.close(f"no report for {settings.ha_silent_ms_max} ms")
            return
        passed_ms = now_ms - self._second_ms
        if passed_ms >= _SECOND_MS:
            self.bytes_per_second = int(self._sent_bytes * _SECOND_MS / passed_ms)
            self._sent_bytes, self._second_ms = 0, now_ms
        is_idle = self.acked_offset >= 0 and not self._is_paused
        if is_idle and now_ms - self._written_ms > settings.ha_heartbeat_interval_ms:
            self._write([frame_head(self.next_offset, 0)])

    def close(self, reason: str = "the master stops", *, is_wrong: bool = False) -> None:
        """Cut the link; what the slave did not take yet it asks for when it comes back."""
        if self._transport is None or self._transport.is_closing():
            return
        self.closed_because = reason
        if is_wrong:
            _log.error("slave %s is sent away: %s", self.peer, reason)
        self._transport.abort()

    @property
    def _allowance(self) -> int:
        """Bytes that may be sent in this second."""
        if not self._settings.ha_flow_control:
            return _ROUND_BYTES
        return self._settings.ha_bytes_per_second_max - self._sent_bytes

    def _write(self, parts: list[bytes | memoryview]) -> bool:
        """Write some frames; whether the slave takes more."""
        assert self._transport is not None, "a closed link sends nothing"
        self._written_ms = self._clock.monotonic_ms()
        if self._is_plain_asyncio:  # its writelines() copies or never pauses, see `rmqkit.remoting.connection`
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        return not self._is_paused


class _Growth:
    """When the log grew, to within 2 ms; marks are set further apart when there are many, as a slave is far behind."""

    __slots__ = ("_apart_ms", "_end", "_starts", "_times_ms")

    def __init__(self) -> None:
        self._apart_ms = _MARK_MS_MIN
        self._end = -1
        self._starts: list[int] = []
        self._times_ms: list[float] = []

    def mark(self, end: int, now_ms: float) -> None:
        """The log ends at an offset now."""
        start, self._end = self._end, end
        starts, times_ms = self._starts, self._times_ms
        if start in (-1, end) or (times_ms and now_ms - times_ms[-1] < self._apart_ms):
            return
        if len(starts) == _MARKS_MAX:
            del starts[1::2], times_ms[1::2]
            self._apart_ms *= 2
        starts.append(start)
        times_ms.append(now_ms)

    def grew_ms(self, offset: int) -> float | None:
        """When the byte at an offset came, or a little before; None when nothing was marked yet."""
        at = bisect_right(self._starts, offset) - 1
        return None if at < 0 else self._times_ms[at]

    def forget(self, offset: int) -> None:
        """Keep what is needed for offsets from here on."""
        keep = bisect_right(self._starts, offset) - 1
        if keep > 0:
            del self._starts[:keep], self._times_ms[:keep]
        if len(self._starts) <= _MARKS_MAX // 8:
            self._apart_ms = _MARK_MS_MIN
