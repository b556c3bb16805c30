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

Work is done per frame, never per record (`link`). What the broker puts in one tick of the loop goes out in one round.
A report is what the slave has made safe: a copy (`copies`).

The protocol does not say who a slave is. Who is neither listed nor a member is sent away unheard (`members`), and
`copies` decides which links from one address count. When a slave comes, the other links of its machine are sent a
heartbeat: slaves of ours answer with a report, Apache's report by themselves every ``haSendHeartbeatInterval``. While
no slave is wanted or known, only this machine can connect: the port listens on loopback, and on its whole address as
soon as it is a SYNC_MASTER's, in an acting-master group, or allowed or known slaves are elsewhere.

Loop only. Not handled here: who waits for copies (`durability`), how the log is read (`rmqkit.store.replica`).
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
# Links that wait until the name servers were asked who they are; more are sent away.
_WAITING_MAX = 64

_WARNED_HOSTS_MAX = 256


class HaMaster:
    """Listens for slaves and sends them the log.

    Attributes:
        copies: the slaves' copies of the log.
        members: the brokers of this name that name servers know.
        links: the links that were let in; `waiting`: those that wait until the members are known.

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
        self.members.start()
        return number

    async def close(self) -> None:
        """Stop listening and cut every link; what was written before is still delivered by the kernel."""
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
        """Let in and send away by ``haAllowedAddresses`` as it is now."""
        self._warned_hosts.clear()
        for link in list(self.links):
            if not self._is_allowed(link.ip):
                link.close("haAllowedAddresses leaves it out now")
        self._looked()
        self.members.look_soon()

    def signed(self, address: IpAddress) -> None:
        """Somebody at an address has signed a request as only a broker or an operator can."""
        self.members.signed(address)

    def advanced(self, _arrivals: object = ()) -> None:
        """Send what was dispatched, in the next tick of the loop; to be called whenever that is more than before."""
        if self.links and not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._round)

    # ---- how far the copies are

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
        """Answer the links that wait for the members or the allowed addresses, after either is known again."""
        for link in list(self.waiting):
            # A look that began before a link came says nothing of it: the slave may have registered in between.
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
                    "%s is sent the log, but is no copy that answers wait for: haAllowedAddresses=%s does not name it, "
                    "and name servers know of no other broker %s there",
                )
        if self.links:
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

    def _refuse(self, link: Link) -> None:
        """Close the connection of a peer that is no slave; logged once for an address."""
        link.close("it is neither allowed nor a member")
        unsigned = (
            ", or it did not sign as innerClientAuthenticationCredentials says" if self.members.need_signatures else ""
        )
        self._warn_once(
            link,
            "%s is refused at the HA port: haAllowedAddresses=%s leaves it out, and name servers know of no other "
            f"broker %s there{unsigned}; if it is a slave, add its address to that setting",
        )

    def _warn_once(self, link: Link, warning: str) -> None:
        """Warn of an address, once."""
        if link.host not in self._warned_hosts and len(self._warned_hosts) < _WARNED_HOSTS_MAX:
            self._warned_hosts.add(link.host)
            _log.warning(warning, link.peer, self._settings.ha_addresses, self._settings.broker_name)

    def _link(self) -> Link:
        return Link(self, self._store, self._settings, self._clock)

    def arrived(self, link: Link) -> None:
        """A link came: it is let in, sent away, or waits until the name servers were asked who it is."""
        if not any(port.is_open for port in (self._port, self._local_port) if port is not None):
            link.close()  # it was accepted while the port closed
            return
        assert link not in self.links, "a link comes once"
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
        """Return True if a link comes from an address that does not count as a copy of the log."""
        return any(self._count_from(ip) > self.copies.count_at(ip) for ip in self._linked() if ip is not None)

    def _count_from(self, address: IpAddress) -> int:
        return sum(link.ip == address for link in self.links)

    def opened(self, link: Link) -> None:
        """A link is let in; its slave has yet to report."""
        assert link not in self.links, "a link that is listed twice would count as two copies"
        assert link not in self.waiting, "a link that is let in waits no more"
        self.links.append(link)
        self.copies.mark_growth()
        if self._next_check is None:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)

    def reported(self, link: Link, *, is_first: bool) -> None:
        """A slave has said how far it is."""
        assert link in self.links, "nothing is read from a link that is not let in"
        assert link.acked_offset <= self._store.max_physical_offset, "a slave has no more than its master"
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
                    other.beat()  # who answers is another slave, so that this one counts before the next heartbeat
        self._on_acked()

    def closed(self, link: Link) -> None:
        """A link is gone."""
        if link in self.waiting:
            self.waiting.remove(link)
        if link in self.links:
            self.links.remove(link)
            _log.info("slave %s disconnected: %s", link.peer, link.closed_because)
            self._on_acked()

    def _round(self) -> None:
        # Before anything is sent: `send` calls `advanced` when a peer takes more, which has to ask for another round.
        self._is_round_due = False
        self.copies.mark_growth()
        is_more = [link.send() for link in self.links]
        if any(is_more):
            self.advanced()

    def _check_times(self) -> None:
        """Do the periodic work: send heartbeats, close links of silent slaves, allow the bytes of the next second."""
        self._next_check = None
        now_ms = self._clock.monotonic_ms()
        for link in list(self.links):
            link.check_times(now_ms)
        if self.links:
            self._next_check = self._loop.call_later(_CHECK_SECONDS, self._check_times)
            self.advanced()
        self.copies.forget_growth()
