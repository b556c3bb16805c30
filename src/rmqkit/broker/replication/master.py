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
wants what retention has deleted         sent heartbeats only, as by the reference, logged once, and never
                                         counted as in sync: only an empty store can follow from here
=======================================  ==========================================================================

Work is done per frame, never per record: a frame is twelve bytes and a slice of the mapped log that is written without
being copied. What the broker puts in one tick of the loop goes out in one round. A report is what the slave has made
safe, so it counts as a copy of everything before it (*confirm offset*, `HaMaster.confirmed_offset`).

The protocol does not say who a slave is. Who is neither listed nor a member is sent away unheard (`ha_members`), and
of the links from one address those that came first count:

=================================  ====================================================================================
a link                             counts
=================================  ====================================================================================
is the first of its address        unless it is silent for two ``haSendHeartbeatInterval`` and a later one is not
came later, from the same address  when all before it that count have reported since it came: they are other slaves of
                                   one machine; and no more count than members are at that address
=================================  ====================================================================================

So a slave that comes back before its old link is known to be dead is no second copy, and nobody takes its place by
coming after it. The others of its machine are sent a heartbeat as it comes: slaves of ours answer that with a report,
Apache's report by themselves every ``haSendHeartbeatInterval``.
While no slave is wanted or known, only this machine can connect: the port listens on loopback, and on
its whole address as soon as it is a SYNC_MASTER's, in an acting-master group, or allowed or known slaves are elsewhere.

TLS is known by the first byte, as on the main port: no report begins with 0x16. With ``haTlsEnable`` nothing else is
taken; without, slaves may use it when the broker has a certificate.

Loop only. Not handled here: who waits for copies (`durability`), how the log is read (`rmqkit.store.replica`).
Source: store.md §21.1 to §21.3, §21.5; behaviour.md §10.3.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

from msgspec import UNSET, UnsetType

from rmqkit.broker.replication.members import AskMembers, Members
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import FrameError, SettingsError, StoreError
from rmqkit.protocol.ha import DATA_BYTES_MAX, Reports, frame_head
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.remoting.address import IpAddress, ip_of, join_address
from rmqkit.remoting.bounded_log import BoundedLog
from rmqkit.remoting.listening import ListenFailed, ListeningPort
from rmqkit.remoting.tasks import Tasks
from rmqkit.remoting.tls import CLIENT_HELLO, ServerTls, TlsLayer, TlsMode
from rmqkit.store.message_store import MessageStore

__all__ = ["HaMaster", "waits_for_copies"]

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 0.1
_SECOND_MS = 1000.0
# What a slave that is behind is sent in one round; in between the loop serves the others.
_ROUND_BYTES = 1 << 20

_UNSENT_BYTES_MAX = 4 << 20
_MARK_MS_MIN = 2.0
_MARKS_MAX = 2048
# Links that wait until the name servers were asked who they are; more are sent away.
_WAITING_MAX = 64

_WARNED_HOSTS_MAX = 256
_SILENT_HEARTBEATS = 2


def waits_for_copies(settings: BrokerSettings) -> bool:
    """Whether answers of this broker wait for slaves: a SYNC_MASTER's do, unless it is content with its own copy."""
    is_alone_enough = settings.in_sync_replicas <= 1 and (
        settings.min_in_sync_replicas <= 1 or not (settings.acts_as_master and settings.auto_in_sync_replicas)
    )
    return settings.broker_role is BrokerRole.SYNC_MASTER and (settings.all_in_sync_replicas or not is_alone_enough)


class HaMaster:
    """Listens for slaves and sends them the log.

    Args:
        on_acked: called when slaves came, went or have more of the log; at most once per read.
        ask_members: asks the name servers for the brokers of this name; None where there are none.
        tls: gives links their TLS side; None: all are plain.
        need_signatures: whether only those are members from whose address requests are signed (`signed`).
    Raises SettingsError: ``haTlsEnable`` without a certificate.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: BrokerSettings,
        clock: Clock,
        on_acked: Callable[[], object],
        *,
        ask_members: AskMembers | None = None,
        tls: ServerTls | None = None,
        need_signatures: bool = False,
    ) -> None:
        self.tls = None if tls is None or tls.mode is TlsMode.DISABLED else tls
        if settings.ha_tls and self.tls is None:
            raise SettingsError(
                "haTlsEnable=true at a master needs a certificate: set tls.server.certPath and tls.server.keyPath"
            )
        self._store = store
        self._settings = settings
        self._clock = clock
        self._on_acked = on_acked
        self._loop = asyncio.get_running_loop()
        self._port: ListeningPort | None = None
        self._local_port: ListeningPort | None = None
        own = {settings.broker_ip1, settings.broker_ip2}
        self._members = Members(
            clock,
            ask_members,
            self._looked,
            own=own,
            linked=self._linked,
            is_any_left_out=self._is_any_left_out,
            need_signatures=need_signatures,
        )
        self._waiting: list[_Link] = []
        self._warned_hosts: set[str] = set()
        self._turn = 0
        self._links: list[_Link] = []
        self._is_round_due = False
        self._next_check: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._growth = _Growth()
        self.log = BoundedLog(_log)

    async def start(self, bind_address: str, port: int) -> int:
        """Listen for slaves; returns the port (a free one for 0).
        Raises ListenFailed: the port is taken or the address is not this machine's."""
        self._port = await ListeningPort.bind(self._link, bind_address, port)
        number, address = self._port.number, ip_of(self._port.sockets[0].getsockname()[0])
        if self._is_wanted or (address is not None and address.is_loopback):
            await self._port.open()
        elif address is not None and address.is_unspecified:
            loopback = "127.0.0.1" if address.version == 4 else "::1"
            self._local_port = await ListeningPort.bind(self._link, loopback, number)
            await self._local_port.open()
        self._members.start()
        return number

    async def close(self) -> None:
        """Stop listening and cut every link; what was written before is still delivered by the kernel."""
        if self._next_check is not None:
            self._next_check.cancel()
        if self._port is None:
            return
        await self._members.close()
        await self._tasks.close()
        ports = [port for port in (self._port, self._local_port) if port is not None]
        for port in ports:
            port.close()
        for link in (*self._links, *self._waiting):
            link.close()
        for port in ports:
            await port.wait_closed()
        self._port = self._local_port = None

    def addresses_changed(self) -> None:
        """Let in and send away by ``haAllowedAddresses`` as it is now."""
        self._warned_hosts.clear()
        for link in list(self._links):
            if not self._is_allowed(link.ip):
                link.close("haAllowedAddresses leaves it out now")
        self._looked()
        self._members.look_soon()

    def signed(self, address: IpAddress) -> None:
        """Somebody at an address has signed a request as only a broker or an operator can."""
        self._members.signed(address)

    def advanced(self, _arrivals: object = ()) -> None:
        """Send what was dispatched, in the next tick of the loop; to be called whenever that is more than before."""
        if self._links and not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._round)

    # ---- how far the copies are

    def replicated_offset(self, copies: int) -> int:
        """Physical offset up to which there are so many copies of the log, the master's own among them; -1 for none."""
        if copies <= 1:
            # Not the dispatched offset: a SYNC_MASTER that is content with its own copy would wait for the dispatcher.
            return self._store.max_physical_offset
        # Reports are physical offsets of one and the same log, so the n-th largest is what n slaves have.
        acked = sorted((link.acked_offset for link in self._counting()), reverse=True)
        return acked[copies - 2] if len(acked) > copies - 2 else -1

    def in_sync_count(self) -> int:
        """Brokers that are less than ``haMaxGapNotInSync`` behind, this one among them."""
        return 1 + sum(self._is_in_sync(link) for link in self._counting())

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
        counting = self._counting()
        connections = [
            HaConnectionInfo(
                addr=link.peer,
                slave_ack_offset=link.acked_offset,
                diff=end - link.acked_offset,
                in_sync=link in counting and self._is_in_sync(link),
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

    def _counting(self) -> list[_Link]:
        """The links whose reports are copies, by the rules at the top."""
        silent_since_ms = self._clock.monotonic_ms() - _SILENT_HEARTBEATS * self._settings.ha_heartbeat_interval_ms
        reporting = [link for link in self._links if link.acked_offset >= 0]
        heard = {link.ip for link in reporting if link.read_ms >= silent_since_ms}
        counting: dict[IpAddress | None, list[_Link]] = {}
        for link in reporting:
            if link.read_ms < silent_since_ms and link.ip in heard:
                continue  # most likely the former link of a slave that came back: counted, it would be two copies
            before = counting.setdefault(link.ip, [])
            if all(other.turn > link.first_turn for other in before) and len(before) < self._copies_at(link.ip):
                before.append(link)
        return list(chain.from_iterable(counting.values()))

    def _copies_at(self, address: IpAddress | None) -> int:
        """How many copies may count that come from an address."""
        if address is None:
            return 0
        return max(self._members.count_at(address), int(self._settings.ha_addresses.name(address)))

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

    @property
    def _is_wanted(self) -> bool:
        """Whether a slave on another machine is wanted or known."""
        settings, allowed = self._settings, self._settings.ha_addresses
        if not (allowed.has_members and self._members.are_asked_for):
            return not allowed.is_local
        is_set = settings.broker_role is BrokerRole.SYNC_MASTER or settings.acts_as_master
        return is_set or not allowed.is_local or self._members.is_any_known

    def _is_allowed(self, address: IpAddress | None) -> bool:
        allowed = self._settings.ha_addresses
        if address is None:
            return False
        return allowed.include(address) or (
            allowed.has_members and self._members.are_asked_for and self._members.count_at(address) > 0
        )

    def _looked(self) -> None:
        """The members are known anew, or who is allowed: links that wait for that have their answer."""
        for link in list(self._waiting):
            # A look that began before a link came says nothing of it: the slave may have registered in between.
            is_allowed = self._is_allowed(link.ip)
            if is_allowed or link.looks_begun < self._members.looks_ended:
                self._waiting.remove(link)
                if is_allowed:
                    link.admit()
                else:
                    self._refuse(link)
        for link in self._links:
            if not self._copies_at(link.ip) and link.looks_begun < self._members.looks_ended:
                self._warn_once(
                    link,
                    "%s is sent the log, but is no copy that answers wait for: haAllowedAddresses=%s does not name it, "
                    "and name servers know of no other broker %s there",
                )
        if self._links:
            self._on_acked()
        if self._is_wanted and self._port is not None and not self._port.is_open and not len(self._tasks):
            self._tasks.start(self._listen_everywhere(self._port), "HA port")

    async def _listen_everywhere(self, port: ListeningPort) -> None:
        """Listen on the whole address that `start` bound; the next look at the members tries again if that fails."""
        if self._local_port is not None:
            self._local_port.close()  # its links stay
            await self._local_port.wait_closed()
        try:
            await port.open()
        except ListenFailed as error:
            _log.error("the HA port: %s", error)
        else:
            _log.info("the HA port is open to other machines, because slaves are expected or known")

    def _refuse(self, link: _Link) -> None:
        """Close the connection of a peer that is no slave; logged once for an address."""
        link.close("it is neither allowed nor a member")
        unsigned = (
            ", or it did not sign as innerClientAuthenticationCredentials says" if self._members.need_signatures else ""
        )
        self._warn_once(
            link,
            "%s is refused at the HA port: haAllowedAddresses=%s leaves it out, and name servers know of no other "
            f"broker %s there{unsigned}; if it is a slave, add its address to that setting",
        )

    def _warn_once(self, link: _Link, warning: str) -> None:
        """Warn of an address, once."""
        if link.host not in self._warned_hosts and len(self._warned_hosts) < _WARNED_HOSTS_MAX:
            self._warned_hosts.add(link.host)
            _log.warning(warning, link.peer, self._settings.ha_addresses, self._settings.broker_name)

    def _link(self) -> _Link:
        return _Link(self, self._store, self._settings, self._clock)

    def arrived(self, link: _Link) -> None:
        """A link came: it is let in, sent away, or waits until the name servers were asked who it is."""
        if not any(port.is_open for port in (self._port, self._local_port) if port is not None):
            link.close()  # it was accepted while the port closed
            return
        assert link not in self._links, "a link comes once"
        asks = self._members.are_asked_for
        link.looks_begun = self._members.looks_begun
        if asks and link.ip is not None and self._count_from(link.ip) >= self._members.count_at(link.ip):
            self._members.look_soon()
        if self._is_allowed(link.ip):
            link.admit()
        elif asks and link.ip is not None and self._settings.ha_addresses.has_members:
            if len(self._waiting) >= _WAITING_MAX:
                self._refuse(link)
                return
            link.hold()
            self._waiting.append(link)
        else:
            self._refuse(link)

    def _linked(self) -> set[IpAddress | None]:
        return {link.ip for link in self._links}

    def _is_any_left_out(self) -> bool:
        return any(self._count_from(ip) > self._copies_at(ip) for ip in self._linked() if ip is not None)

    def _count_from(self, address: IpAddress) -> int:
        return sum(link.ip == address for link in self._links)

    def opened(self, link: _Link) -> None:
        """A link is let in; its slave has yet to report."""
        assert link not in self._links, "a link that is listed twice would count as two copies"
        assert link not in self._waiting, "a link that is let in waits no more"
        self._links.append(link)
        self._growth.mark(self._store.dispatched_offset, self._clock.monotonic_ms())
        if self._next_check is None:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)

    def reported(self, link: _Link, *, is_first: bool) -> None:
        """A slave has said how far it is."""
        assert link in self._links, "nothing is read from a link that is not let in"
        assert link.acked_offset <= self._store.max_physical_offset, "a slave has no more than its master"
        self._turn += 1
        link.turn = self._turn
        if is_first:
            link.first_turn = self._turn
            _log.info(
                "slave %s has the log up to %d, sending it from %d", link.peer, link.acked_offset, link.next_offset
            )
            self.advanced()
            for other in self._links:
                if other.ip == link.ip and other is not link:
                    other.beat()  # who answers is another slave, so that this one counts before the next heartbeat
        self._on_acked()

    def closed(self, link: _Link) -> None:
        """A link is gone."""
        if link in self._waiting:
            self._waiting.remove(link)
        if link in self._links:
            self._links.remove(link)
            _log.info("slave %s disconnected: %s", link.peer, link.closed_because)
            self._on_acked()

    def _round(self) -> None:
        # Before anything is sent: `send` calls `advanced` when a peer takes more, which has to ask for another round.
        self._is_round_due = False
        self._growth.mark(self._store.dispatched_offset, self._clock.monotonic_ms())
        is_more = [link.send() for link in self._links]
        if any(is_more):
            self.advanced()

    def _check_times(self) -> None:
        """What is due by time: heartbeats, silent slaves, the next second's allowance."""
        self._next_check = None
        now_ms = self._clock.monotonic_ms()
        for link in list(self._links):
            link.check_times(now_ms)
        if self._links:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)
            self._growth.drop_before(min(link.acked_offset for link in self._links))
            self.advanced()
        else:
            self._growth = _Growth()


class _Link(asyncio.Protocol):
    """The connection of one slave.

    Attributes:
        acked_offset: what it reported last, -1 before it did.
        next_offset: where the next frame begins, -1 before.
        ip: where it comes from; None for what has no address.
        turn, first_turn: which of all reports to this master its newest and its first one were.
        read_ms: when it reported last, or came.
        looks_begun: how often members had been asked for when it came.
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
        # A slave that takes nothing must not hold more than this of the broker's memory: slices of mapped files are
        # copied into the transport's buffer as soon as the socket is full.
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        peer: Any = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.ip = ip_of(peer[0])
            self.host = str(self.ip or peer[0])
            self.peer = join_address(self.host, peer[1])
        self._master.arrived(self)

    def hold(self) -> None:
        """Do not listen to it for now."""
        if self._transport is not None:
            self._transport.pause_reading()

    def admit(self) -> None:
        """Listen to it."""
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
            # An empty slave begins with a whole file, as the reference's does: its own files begin where ours do.
            self.next_offset = offset or self._store.file_start(self._store.dispatched_offset)
        self._master.reported(self, is_first=is_first)

    def _plain(self, data: bytes) -> bytes:
        """What the slave said; its first byte says whether it speaks TLS.
        Raises FrameError: it does not and has to, or what it says is no TLS."""
        if self._tls is None and not self._is_known_plain:
            if data[0] == CLIENT_HELLO and self._master.tls is not None:
                self._tls = self._master.tls.layer()
            elif self._settings.ha_tls:
                raise FrameError("it speaks no TLS, haTlsEnable=true asks for it: set that at the slave, too")
            self._is_known_plain = self._tls is None
        if self._tls is None:
            return data
        try:
            return self._tls.feed(data)
        finally:
            if (answer := self._tls.outgoing()) and self._transport is not None:
                self._transport.write(answer)

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
                assert len(data) <= left, "a slave with flow control is sent more than it is allowed"
                parts += (frame_head(self.next_offset, len(data)), data)
                self.next_offset += len(data)
                left -= len(data)
        except StoreError as error:
            # Closing the link would have the slave come back for ever. It stays, gets heartbeats, and does not count.
            self.is_lost = True
            _log.error("cannot send the log to slave %s: %s; empty its store", self.peer, error)
        except OSError as error:
            self.close(f"the log cannot be read: {error}", is_wrong=True)
            return False
        return bool(parts) and self._write(parts) and self.next_offset < end and self._allowance > 0

    def _data(self, size_max: int) -> memoryview:
        """What the next frame holds."""
        data = self._store.log_part(self.next_offset, min(size_max, self._settings.ha_batch_bytes, DATA_BYTES_MAX))
        self._sent_bytes += len(data)
        return data

    def check_times(self, now_ms: float) -> None:
        """Do what is due at a time."""
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
        """Send a heartbeat, which slaves of ours answer with a report; not before the first report."""
        is_idle = self.acked_offset >= 0 and not self._is_paused
        if is_idle and self._transport is not None and not self._transport.is_closing():
            self._write([frame_head(self.next_offset, 0)])

    def close(self, reason: str = "the master stops", *, is_wrong: bool = False) -> None:
        """Cut the link; what the slave did not take yet it asks for when it comes back."""
        if self._transport is None or self._transport.is_closing():
            return
        self.closed_because = reason
        if is_wrong:
            # A slave that was in order is not silenced by stray connections from its address.
            source = self.host if self.acked_offset < 0 else f"slave {self.host}"
            line = f"slave {self.peer} is refused: {reason}"
            self._master.log.write(logging.ERROR, source, line, self._clock.monotonic_ms())
        self._transport.abort()  # close() would wait for a peer that takes nothing

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
        if self._tls is not None:
            self._tls.send(parts)
            self._transport.write(self._tls.outgoing())
        elif self._is_plain_asyncio:  # its writelines() copies or never pauses, see `rmqkit.remoting.connection`
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
        assert end >= self._end, f"the log shrinks from {self._end} to {end}"
        start, self._end = self._end, end
        starts, times_ms = self._starts, self._times_ms
        if start in (-1, end) or (times_ms and now_ms - times_ms[-1] < self._apart_ms):
            return
        if len(starts) == _MARKS_MAX:
            # Every second one goes, so that memory is bounded and the oldest byte's age stays right to the new
            # distance.
            del starts[1::2], times_ms[1::2]
            self._apart_ms *= 2
        starts.append(start)
        times_ms.append(now_ms)

    def grew_ms(self, offset: int) -> float | None:
        """When the byte at an offset came, or a little before; None when nothing was marked yet."""
        at = bisect_right(self._starts, offset) - 1
        return None if at < 0 else self._times_ms[at]

    def drop_before(self, offset: int) -> None:
        """Keep what is needed for offsets from here on."""
        keep = bisect_right(self._starts, offset) - 1
        if keep > 0:
            del self._starts[:keep], self._times_ms[:keep]
        if len(self._starts) <= _MARKS_MAX // 8:
            self._apart_ms = _MARK_MS_MIN
