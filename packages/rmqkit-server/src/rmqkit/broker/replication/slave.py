"""The slave's side of replication: it appends the log of its master (``HAClient``, ``DefaultHAClient``).

The states of the link to the master's HA port::

    connect -> topics copied -> histories compared -> log flushed -> first report: the log's end
            -> frames appended, reported, dispatched; periodic reports -> closed -> pause -> connect

========================  ==============================================================================
event                     action
========================  ==============================================================================
frames                    appended unchanged. All frames of one read are reported together: the log's end,
                          or with SYNC_FLUSH the end of the flushed log, after the flush
heartbeat                 its offset is checked like the offset of a frame, and the log's end is reported again
nothing sent for          the offset is reported again
haSendHeartbeatInterval
nothing received for      the link is closed
haHousekeepingInterval
the offset is not the     the link is closed, and opened again after a pause that doubles from 0.5 to 5 s
log's end, or the bytes
are not frames
the disk refuses          the link is closed and opened again in the same way. Nothing more is reported
========================  ==============================================================================

Before it follows, the slave compares its log with the master's log (`log_comparison`). If the logs diverge, or if the
frames do not continue its log, the slave stops permanently and serves no messages (`HaSlave.is_diverged`). A file
``diverged`` in the store records this for later starts until a comparison finds equal logs. Otherwise a restarted slave
would serve a diverged log after its master is gone. Without the master's main address (``haMasterAddress`` and no name
server) the slave checks only the heads of records. The memory is bounded by the 4 MiB of a read. A crash loses no
record that was reported with SYNC_FLUSH. `protocol.ha` decodes frames, `store.replica` has the log, `tables` copies the
tables. Use this module only on the event loop, except `HaSlave.flushed`. Source: store.md §21; behaviour.md §10.1,
§10.2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from rmqkit.broker.replication.log_comparison import LogComparison
from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import ConnectFailed, FrameError, LogDiverged, RmqError, SettingsError, StoreError
from rmqkit.protocol.ha import LINK_BUFFER_BYTES, Frame, encode_report, split_frames
from rmqkit.protocol.schemas.brokers import HaClientInfo
from rmqkit.remoting.address import split_address
from rmqkit.remoting.client import CONNECT_TIMEOUT_MS, RemotingClient
from rmqkit.remoting.tasks import Tasks, keep_doing
from rmqkit.remoting.tls import ClientTls
from rmqkit.store.files import write_durably
from rmqkit.store.message_store import MessageStore
from rmqkit.system import disk

__all__ = ["HaSlave"]

_PAUSE_MS_MIN = 500.0
_PAUSE_MS_MAX = 5000.0
_FOR_GOOD_MS = 86_400_000.0
_BULK_BYTES, _FEW_BYTES = 4 << 20, 64 << 10
# The pause before the type of a new topic is requested again (`SlaveSync.is_batch_topic`).
_TOPIC_SECONDS = 0.005

# The time between a read and the dispatch. It lets the slave send the report first, and dispatch later data together. A
# slave that is behind collects up to `_BULK_BYTES`: one dispatch of 4 MiB costs a quarter less than four of 1 MiB.
_DISPATCH_SECONDS, _CATCH_UP_SECONDS = 0.001, 0.01

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Master:
    """The addresses of a master. ``main_address``: the address of its main port; None while it is unknown."""

    ha_address: str
    main_address: str | None


class HaSlave:
    """The replication of a master's log at one slave.

    Args:
        store: the slave's store, opened with ``is_replica``.
        client: the client for requests to the master's main port.
        address: the slave's own address, for log lines.
        flushes: True if only flushed data is reported (SYNC_FLUSH). Then `flushed` has to be called.
        prepare: awaited for every link. It copies the topics, which the dispatch needs, and does not raise.
        tls: the TLS settings for links with ``haTlsEnable``.

    Attributes:
        divergence: the error that stopped this slave permanently, or None.

    Raises SettingsError: ``haTlsEnable`` without ``tls``.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        client: RemotingClient,
        *,
        address: str,
        flushes: bool,
        prepare: Callable[[], Awaitable[None]] | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._address = address
        self._flushes = flushes
        self._prepare = prepare
        if settings.ha_tls and tls is None:
            raise SettingsError("haTlsEnable=true at a slave needs tls.enable=true in the file that tls.config names")
        self._tls = tls.context if settings.ha_tls and tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._master: _Master | None = None
        self._link: _Link | None = None
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._durable_moved = asyncio.Event()
        self._buffer = memoryview(b"")
        self._dispatch_handle: asyncio.Handle | None = None
        self._pause_ms = _PAUSE_MS_MIN
        self._last_warning = ""
        self.divergence: LogDiverged | None = None
        self._mark = store.root / "diverged"
        self._is_marked = disk.exists(self._mark)
        self._comparison = LogComparison(store, client, address)
        self._was_compared = False

    def follow(self, ha_address: str, master_address: str | None) -> None:
        """Start to follow the master at these addresses. Do nothing if they are unchanged.
        ``haMasterAddress`` takes precedence over ``ha_address``. ``master_address`` None: use the known address."""
        known = self._master.main_address if self._master is not None else None
        master = _Master(self._settings.ha_master_address or ha_address, master_address or known)
        if self._master is not None and master.ha_address != self._master.ha_address and self._link is not None:
            self._link.end(f"the master is at {master.ha_address} now")
        if master != self._master:
            self._master = master
            self._pause_ms = _PAUSE_MS_MIN
            self._wake.set()
        if not len(self._tasks):
            self._tasks.start(keep_doing(self._round, wake=self._wake, name="replication"), "replication")

    async def close(self) -> None:
        await self._tasks.close()
        if self._dispatch_handle is not None:
            self._dispatch_handle.cancel()

    @property
    def is_diverged(self) -> bool:
        """True if the log has data that the master's log does not have. Then no messages are served."""
        return self.divergence is not None or self._comparison.ahead_from is not None

    @property
    def may_serve(self) -> bool:
        """True if messages can be served: the log matches the master's log, or the comparison was not possible."""
        return not (self.is_diverged or self._is_marked) and (self._master is None or self._was_compared)

    @property
    def is_following(self) -> bool:
        """True if a link is open and its frames are appended."""
        return self._link is not None and self._link.has_begun

    def status(self) -> HaClientInfo:
        """Return a slave's answer to GET_BROKER_HA_STATUS."""
        status = HaClientInfo(max_offset=self._store.max_physical_offset)
        status.master_addr = None if self._master is None else self._master.ha_address
        if self._link is not None:
            passed_ms = self._clock.now_ms() - self._clock.monotonic_ms()
            status.last_read_timestamp = int(self._link.read_ms + passed_ms)
            status.last_write_timestamp = int(self._link.wrote_ms + passed_ms)
            status.transferred_byte_in_second = self._link.rate()
        return status

    # ---- the links, one after the other

    async def _round(self) -> float:
        """Open a link and wait until it closes. Return the pause until the next link in ms."""
        if self.divergence is not None:
            return _FOR_GOOD_MS
        master = self._master
        assert master is not None, "follow() has set the master"
        ended: object
        try:
            ended = await self._follow_master(master)
        except LogDiverged as error:
            self._stop_for_good(error)
            return _FOR_GOOD_MS
        except (RmqError, OSError) as error:
            ended = error
            if self.is_diverged:
                self._remember(error)
        self._was_compared = True  # serve even if the comparison failed: the master may be gone
        if str(ended) != self._last_warning:
            _log.warning("replication from %s: %s; trying again", master.ha_address, ended)
            self._last_warning = str(ended)
        pause_ms, self._pause_ms = self._pause_ms, min(self._pause_ms * 2, _PAUSE_MS_MAX)
        return pause_ms

    async def _follow_master(self, master: _Master) -> object:
        """Connect and append frames until the link closes. Return or raise the reason for the close."""
        self._dispatch()  # retry queues that the disk refused
        if self.divergence is not None:  # the dispatch found the divergence
            raise self.divergence
        self._check_disk()
        # Cut a partial record that a crash left: the master would continue after it.
        end = self._store.replica.cut_torn_tail()
        link = await self._connect(master.ha_address)
        try:
            if self._prepare is not None:
                await self._prepare()
            if master.main_address is not None:
                await self._comparison.compare(master.main_address)
                disk.remove(self._mark, missing_ok=True)
                self._is_marked = False
            self._was_compared = True
            # The first report confirms a copy of all earlier data, so with SYNC_FLUSH the data has to be on the disk.
            await self._flushed_to(end)
            assert self._store.max_physical_offset == end, "nothing is appended before the first report"
            if self._master != master:
                return "the master is another one by now"
            self._link = link
            link.begin(end)
            _log.info("following %s from physical offset %d on", master.ha_address, end)
            await self._watch(link)
            if isinstance(link.ended, BaseException):
                raise link.ended
            return link.ended
        finally:
            self._link = None
            link.abort()

    async def _connect(self, address: str) -> _Link:
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise ConnectFailed(address, str(error), "correct haMasterAddress") from None
        self._buffer = self._buffer or memoryview(bytearray(LINK_BUFFER_BYTES))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000):
                _, link = await self._loop.create_connection(
                    lambda: _Link(self._append_frames, self._clock, self._buffer), host, port, ssl=self._tls
                )
        except ssl.SSLError as error:
            raise ConnectFailed(address, f"TLS failed: {error.reason or error}", "compare haTlsEnable there") from error
        except (TimeoutError, OSError) as error:
            number = error.errno or 0
            raise ConnectFailed(address, os.strerror(number) if number > 0 else str(error) or "no answer") from error
        return link

    async def _watch(self, link: _Link) -> None:
        """Report periodically until the link is closed. Close a silent link."""
        settings = self._settings
        while not link.closed.done():
            now_ms = self._clock.monotonic_ms()
            silent_ms = now_ms - link.read_ms
            if silent_ms >= settings.ha_silent_ms_max:
                link.end(f"no data came for {silent_ms:.0f} ms (haHousekeepingInterval {settings.ha_silent_ms_max})")
                return
            if now_ms - link.wrote_ms >= settings.ha_heartbeat_interval_ms:
                link.report(self._reportable)
            due_ms = min(link.wrote_ms + settings.ha_heartbeat_interval_ms, link.read_ms + settings.ha_silent_ms_max)
            await asyncio.wait((link.closed,), timeout=max(1.0, due_ms - now_ms) / 1000)

    # ---- received data

    @property
    def _reportable(self) -> int:
        return self._store.durable_offset if self._flushes else self._store.max_physical_offset

    def _append_frames(self, link: _Link, frames: list[Frame]) -> None:
        """Append the frames of one read.
        Raises StoreError, OSError: the link has to be closed."""
        store = self._store
        end = store.max_physical_offset
        is_longer = False
        for offset, data in frames:
            # An empty log accepts any first offset: the master begins at the start of one of its files.
            if end and offset != end:
                raise StoreError(
                    f"the master continues at {offset}, but the own log ends at {end}: it may be the log of another "
                    "master"
                )
            if data:
                store.replica.append(offset, data)
                end = offset + len(data)
                is_longer = True
        self._check_disk()
        assert not is_longer or store.max_physical_offset == end, "the log ends at the end of the last frame"
        if not is_longer:
            if frames:
                link.report(self._reportable)  # answer the heartbeat: the master closes silent links
            return
        self._pause_ms, self._last_warning = _PAUSE_MS_MIN, ""
        if self._flushes:
            store.request_flush()  # `_flushed` reports the data when it is on the disk
            return
        link.report(end)  # before the dispatch: producers at the master wait for the report
        behind_bytes = store.dispatch_behind_bytes
        if behind_bytes >= _BULK_BYTES:
            self._dispatch()
        else:
            self._dispatch_soon(_DISPATCH_SECONDS if behind_bytes < _FEW_BYTES else _CATCH_UP_SECONDS)

    def flushed(self, durable_offset: int, error: OSError | None) -> None:
        """Report the flushed data. The flush thread calls this after each flush."""
        try:
            self._loop.call_soon_threadsafe(self._flushed, error)
        except RuntimeError:
            _log.debug("a flush ended after the event loop")

    def _flushed(self, error: OSError | None) -> None:
        self._durable_moved.set()
        link = self._link
        if error is not None:
            if link is not None:
                link.end(error)
            return
        if self._flushes and link is not None and self._store.durable_offset != link.reported:
            link.report(self._store.durable_offset)
        self._dispatch_soon(_DISPATCH_SECONDS)

    async def _flushed_to(self, end: int) -> None:
        """Wait until the log is on the disk up to ``end``, if SYNC_FLUSH is set. Raises OSError: the disk refused."""
        while self._flushes and self._store.durable_offset < end:
            self._check_disk()
            self._durable_moved.clear()  # before the request: a flush may end before the wait begins
            self._store.request_flush()
            await self._durable_moved.wait()

    def _check_disk(self) -> None:
        """Raise the failure of the store's disk, if there is one. Raises OSError: the disk refuses."""
        failure = self._store.failure
        if failure is not None and not isinstance(failure, BlockingIOError):
            raise failure

    def _dispatch_soon(self, seconds: float) -> None:
        if self._dispatch_handle is None:
            self._dispatch_handle = self._loop.call_later(seconds, self._dispatch)

    def _dispatch(self) -> None:
        """Make received data readable, for a few milliseconds per call. The loop reads the link in between."""
        if self._dispatch_handle is not None:
            self._dispatch_handle.cancel()
            self._dispatch_handle = None
        try:
            if self._store.dispatch():
                self._dispatch_soon(0)
            elif isinstance(self._store.failure, BlockingIOError):
                self._dispatch_soon(_TOPIC_SECONDS)
        except LogDiverged as error:
            self._stop_for_good(error)
        except OSError as error:  # invalid data at the log's end cannot be cut off
            if self._link is not None:
                self._link.end(error)

    def _stop_for_good(self, error: LogDiverged) -> None:
        if self.divergence is None:
            self.divergence = error
            master = "its master" if self._master is None else self._master.ha_address
            _log.error("slave %s no longer follows %s: %s", self._address, master, error)
            self._remember(error)
        if self._link is not None:
            self._link.end(error)

    def _remember(self, why: Exception) -> None:
        """Write the file ``diverged`` into the store, because after a restart the master may be gone."""
        if not self._is_marked:
            self._is_marked = True
            try:
                write_durably(self._mark, f"{why}\n".encode())
            except OSError as error:
                _log.error("cannot write %s; after a restart, this log may be served: %s", self._mark, error)


class _Link(asyncio.BufferedProtocol):
    """One connection to a master's HA port. The master sends nothing before the slave's first report.

    Args:
        on_frames: called with the frames of one read. If it raises an RmqError or OSError, the link is closed.
        buffer: the buffer for reads. One frame fits into it.

    Attributes:
        closed: done when the connection is closed.
        ended: the first reason for the close, as a text or an error.
        reported: the newest offset that was reported.
        read_ms, wrote_ms: the monotonic time of the last read and of the last write.
    """

    def __init__(self, on_frames: Callable[[_Link, list[Frame]], None], clock: Clock, buffer: memoryview) -> None:
        self._on_frames = on_frames
        self._clock = clock
        self._buffer = buffer
        self._filled = 0
        self._transport: asyncio.Transport | None = None
        self._may_write = True
        self._window_ms = self.read_ms = self.wrote_ms = clock.monotonic_ms()
        self._window_bytes = self._rate = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: str | Exception = "the master closed the link"
        self.reported = -1
        self.has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def begin(self, end: int) -> None:
        """Report the end of the slave's log, and accept frames from now on."""
        assert not self.has_begun, "a link begins once"
        self.has_begun = True
        self.read_ms = self._clock.monotonic_ms()
        self.report(end)

    def report(self, offset: int) -> None:
        """Report an offset to the master, unless the link is not writable."""
        assert offset >= self.reported, f"a report of {offset} takes back one of {self.reported}"
        self.wrote_ms = self._clock.monotonic_ms()
        if self._may_write and self._transport is not None:  # otherwise the next report replaces this one
            self.reported = offset
            self._transport.write(encode_report(offset))

    def rate(self) -> int:
        """Return the current rate of received bytes per second."""
        passed_ms = self._clock.monotonic_ms() - self._window_ms
        return self._rate if passed_ms < 2000 else int(self._window_bytes * 1000 / passed_ms)

    def end(self, why: str | Exception) -> None:
        """Abort the link, and store the reason."""
        if not self.closed.done():
            self.ended = why
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    # ---- called by the transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None:
            return
        self.read_ms = now_ms = self._clock.monotonic_ms()
        self._window_bytes += nbytes
        if now_ms - self._window_ms >= 1000:
            self._rate = int(self._window_bytes * 1000 / (now_ms - self._window_ms))
            self._window_ms, self._window_bytes = now_ms, 0
        filled = self._filled + nbytes
        assert filled <= len(self._buffer), "the received bytes fit into the buffer"
        try:
            if not self.has_begun:
                raise FrameError("the master sent data before the first report")
            frames, taken = split_frames(self._buffer[:filled])
            self._on_frames(self, frames)
        except (RmqError, OSError) as error:
            self.end(error)
            return
        self._filled = filled - taken
        # Move a partial frame to the start of the buffer, so that the rest of the frame fits after it.
        if taken and self._filled:
            self._buffer[: self._filled] = self._buffer[taken:filled]

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            if exc is not None:
                self.ended = f"the link broke: {exc}"
            self.closed.set_result(None)
