"""The master's side of replication: it sends the growing log to slaves (``DefaultHAService``, ``HAConnection``).

A slave connects to the HA port and reports the end of its log. The master sends nothing before the report. Frames begin
at the reported offset. For an empty slave they begin at the start of the master's current log file: older data is not
copied.

=======================================  ==========================================================================
the slave                                action of the master
=======================================  ==========================================================================
needs data                               sends the dispatched data: durable with SYNC_FLUSH, otherwise committed
does not read                            waits until the slave reads again
has all data                             sends a heartbeat after ``haSendHeartbeatInterval`` without other frames
is silent for haHousekeepingInterval     closes the link
reports an offset after the end of the   closes the link: the slave's log has another history
log, or after the sent data
needs data that retention has deleted    sends only heartbeats, like the reference, and logs this once. The slave
                                         never counts as in sync: only a slave with an empty store can follow
=======================================  ==========================================================================

The work is per frame, never per record (`link`). Data that the broker stores in one loop tick is sent together.
A report confirms that the slave has stored the data (`copies`).

The protocol does not identify slaves. A link from an address that is neither listed nor the address of a member is
closed without a read (`members`). `copies` decides which links from one address count. When a slave connects, the other
links from its machine get a heartbeat: slaves of rmqkit answer with a report, and Apache's slaves report every
``haSendHeartbeatInterval``. While no slave is wanted or known, the port listens on loopback, so that only this machine
can connect. The port listens on its whole address if the broker is a SYNC_MASTER or in an acting-master group, or if
allowed or known slaves are on other machines.

Use this module only on the event loop. `durability` holds the answers that wait for copies, `rmqkit.store.replica`
reads the log.
Source: store.md §21.1 to §21.3, §21.5; behaviour.md §10.3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rmqkit.broker.replication.copies import SlaveCopies
from rmqkit.broker.replication.link import Link
from rmqkit.broker.replication.members import AskMembers, Members
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.clock import Clock
from rmqkit.errors import SettingsError
from rmqkit.remoting.address import IpAddress, ip_of
from rmqkit.remoting.bounded_log import BoundedLog
from rmqkit.remoting.listening import ListenFailed, ListeningPort
from rmqkit.remoting.tasks import Tasks
from rmqkit.remoting.tls import ServerTls, TlsMode
from rmqkit.store.message_store import MessageStore

__all__ = ["HaMaster"]

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 0.1
# The maximum number of links that wait for the look-up of members. Further links are closed.
_WAITING_MAX = 64

_WARNED_HOSTS_MAX = 256


class HaMaster:
    """The HA port of a master, and its links to slaves.

    Attributes:
        copies: the slaves' copies of the log.
        members: the brokers of this name that name servers know.
        links: the admitted links.
        waiting: the links that wait until the members are known.

    Args:
        on_acked: called when a slave connected, disconnected or reported, at most once per read.
        ask_members: requests the brokers of this name from the name servers; None without name servers.
        tls: makes the TLS side of links; None: all links are plain.
        need_signatures: True if only addresses with signed requests are members (`signed`).
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
        self.members = Members(
            clock,
            ask_members,
            self._looked,
            own=own,
            linked=self._linked,
            is_any_left_out=self.is_any_left_out,
            need_signatures=need_signatures,
        )
        self.waiting: list[Link] = []
        self._warned_hosts: set[str] = set()
        self._turn = 0
        self.links: list[Link] = []
        self._is_round_due = False
        self._next_check: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self.copies = SlaveCopies(store, settings, clock, self.members, self.links)
        self.log = BoundedLog(_log)

    async def start(self, bind_address: str, port: int) -> int:
        """Listen for slaves. Return the port. Port 0: listen on a free port.
        Raises ListenFailed: the port is in use or the address is not this machine's."""
        self._port = await ListeningPort.bind(self._link, bind_address, port)
        number, address = self._port.number, ip_of(self._port.sockets[0].getsockname()[0])
        if self._is_wanted or (address is not None and address.is_loopback):
            await self._port.open()
        elif address is not None and address.is_unspecified:
            loopback = "127.0.0.1" if address.version == 4 else "::1"
            self._local_port = await ListeningPort.bind(self._link, loopback, number)
            await self._local_port.open()
        self.members.start()
        return number

    async def close(self) -> None:
        """Stop listening and close every link. The kernel still delivers data that was written before."""
        if self._next_check is not None:
            self._next_check.cancel()
        if self._port is None:
            return
        await self.members.close()
        await self._tasks.close()
        ports = [port for port in (self._port, self._local_port) if port is not None]
        for port in ports:
            port.close()
        for link in (*self.links, *self.waiting):
            link.close()
        for port in ports:
            await port.wait_closed()
        self._port = self._local_port = None

    def addresses_changed(self) -> None:
        """Admit and close links according to the new ``haAllowedAddresses``."""
        self._warned_hosts.clear()
        for link in list(self.links):
            if not self._is_allowed(link.ip):
                link.close("haAllowedAddresses no longer includes its address")
        self._looked()
        self.members.look_soon()

    def signed(self, address: IpAddress) -> None:
        """Record that a client at an address signed a request as the inner user or a super user."""
        self.members.signed(address)

    def advanced(self, _arrivals: object = ()) -> None:
        """Send new data in the next tick of the loop. The broker calls this whenever the dispatched offset has
        moved."""
        if self.links and not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._round)

    # ---- links

    @property
    def _is_wanted(self) -> bool:
        """Return True if a slave on another machine is wanted or known."""
        settings, allowed = self._settings, self._settings.ha_addresses
        if not (allowed.has_members and self.members.are_asked_for):
            return not allowed.is_local
        is_set = settings.broker_role is BrokerRole.SYNC_MASTER or settings.acts_as_master
        return is_set or not allowed.is_local or self.members.is_any_known

    def _is_allowed(self, address: IpAddress | None) -> bool:
        allowed = self._settings.ha_addresses
        if address is None:
            return False
        return allowed.include(address) or (
            allowed.has_members and self.members.are_asked_for and self.members.count_at(address) > 0
        )

    def _looked(self) -> None:
        """Admit or refuse the waiting links after a look-up of the members or a change of the allowed addresses."""
        for link in list(self.waiting):
            # Refuse a link only by a look-up that began after it connected: the slave may have registered just before.
            is_allowed = self._is_allowed(link.ip)
            if is_allowed or link.looks_begun < self.members.looks_ended:
                self.waiting.remove(link)
                if is_allowed:
                    link.admit()
                else:
                    self._refuse(link)
        for link in self.links:
            if not self.copies.count_at(link.ip) and link.looks_begun < self.members.looks_ended:
                self._warn_once(
                    link,
                    "%s receives the log, but sends do not wait for this copy: haAllowedAddresses=%s does not name it, "
                    "and name servers know of no other broker %s there",
                )
        if self.links:
            self._on_acked()
        if self._is_wanted and self._port is not None and not self._port.is_open and not len(self._tasks):
            self._tasks.start(self._listen_everywhere(self._port), "HA port")

    async def _listen_everywhere(self, port: ListeningPort) -> None:
        """Listen on the whole address that `start` bound. If this fails, the next look-up of members tries again."""
        if self._local_port is not None:
            self._local_port.close()  # its links stay
            await self._local_port.wait_closed()
        try:
            await port.open()
        except ListenFailed as error:
            _log.error("the HA port: %s", error)
        else:
            _log.info("the HA port is open to other machines, because slaves are expected or known")

    def _refuse(self, link: Link) -> None:
        """Close the connection of a peer that is not a slave. Log this once for each address."""
        link.close("it is neither allowed nor a member")
        unsigned = (
            ", or it did not sign as innerClientAuthenticationCredentials says" if self.members.need_signatures else ""
        )
        self._warn_once(
            link,
            "%s is refused at the HA port: haAllowedAddresses=%s does not name it, and name servers know of no other "
            f"broker %s there{unsigned}; if it is a slave, add its address to that setting",
        )

    def _warn_once(self, link: Link, warning: str) -> None:
        """Log a warning about the address of a link, once for each address."""
        if link.host not in self._warned_hosts and len(self._warned_hosts) < _WARNED_HOSTS_MAX:
            self._warned_hosts.add(link.host)
            _log.warning(warning, link.peer, self._settings.ha_addresses, self._settings.broker_name)

    def _link(self) -> Link:
        return Link(self, self._store, self._settings, self._clock)

    def arrived(self, link: Link) -> None:
        """Admit or refuse a new link, or let it wait for a look-up of the members."""
        if not any(port.is_open for port in (self._port, self._local_port) if port is not None):
            link.close()  # the port closed while it accepted the link
            return
        assert link not in self.links, "a new link is not listed"
        asks = self.members.are_asked_for
        link.looks_begun = self.members.looks_begun
        if asks and link.ip is not None and self._count_from(link.ip) >= self.members.count_at(link.ip):
            self.members.look_soon()
        if self._is_allowed(link.ip):
            link.admit()
        elif asks and link.ip is not None and self._settings.ha_addresses.has_members:
            if len(self.waiting) >= _WAITING_MAX:
                self._refuse(link)
                return
            link.hold()
            self.waiting.append(link)
        else:
            self._refuse(link)

    def _linked(self) -> set[IpAddress | None]:
        return {link.ip for link in self.links}

    def is_any_left_out(self) -> bool:
        """Return True if an address has more links than can count as copies."""
        return any(self._count_from(ip) > self.copies.count_at(ip) for ip in self._linked() if ip is not None)

    def _count_from(self, address: IpAddress) -> int:
        return sum(link.ip == address for link in self.links)

    def opened(self, link: Link) -> None:
        """Add an admitted link. Its slave has not reported yet."""
        assert link not in self.links, "a link is listed once"
        assert link not in self.waiting, "an admitted link does not wait"
        self.links.append(link)
        self.copies.mark_growth()
        if self._next_check is None:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)

    def reported(self, link: Link, *, is_first: bool) -> None:
        """Handle the report of a slave."""
        assert link in self.links, "reports come from admitted links"
        assert link.acked_offset <= self._store.max_physical_offset, "a slave's offset is at most the end of the log"
        self._turn += 1
        link.turn = self._turn
        if is_first:
            link.first_turn = self._turn
            _log.info(
                "slave %s has the log up to %d, sending it from %d", link.peer, link.acked_offset, link.next_offset
            )
            self.advanced()
            for other in self.links:
                if other.ip == link.ip and other is not link:
                    other.beat()  # an answer shows that it is another slave: the new link then counts sooner
        self._on_acked()

    def closed(self, link: Link) -> None:
        """Remove a closed link."""
        if link in self.waiting:
            self.waiting.remove(link)
        if link in self.links:
            self.links.remove(link)
            _log.info("slave %s disconnected: %s", link.peer, link.closed_because)
            self._on_acked()

    def _round(self) -> None:
        # Reset before the first `send`: it may call `advanced`, which has to schedule another `_round`.
        self._is_round_due = False
        self.copies.mark_growth()
        is_more = [link.send() for link in self.links]
        if any(is_more):
            self.advanced()

    def _check_times(self) -> None:
        """Send heartbeats, close silent links, and start the next second of flow control. This runs periodically."""
        self._next_check = None
        now_ms = self._clock.monotonic_ms()
        for link in list(self.links):
            link.check_times(now_ms)
        if self.links:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)
            self.advanced()
        self.copies.forget_growth()
