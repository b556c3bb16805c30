"""The members of a group. They decide which slaves are allowed to follow the master's log, and which copies count.

Answers that wait for copies count a copy if its slave is a member, or if `HaAddresses` contains the address itself (or
``any``). The number of copies that count for an address is at most the number of members with the address. Without name
servers the members are unknown, and all allowed copies count.

Name servers do not verify registrations, so the master restricts which registered brokers are members:

================================================  ==================================================================
a registered broker                               is a member
================================================  ==================================================================
was registered by a machine with another address  never (`rmqkit.broker.registration.Registration.namesakes`)
has a global address                              only if it is in the network (/24, /64) of an address of this broker
has any address, and this broker has users        while the inner user or a super user signs requests from the address:
                                                  slaves copy the tables over the main port
================================================  ==================================================================

The master remembers a member while its link is open, and for ten minutes after a name server last returned it: a link
may break together with the registration. The master requests the members from the name servers every 2 s while no
member is known or a link does not count, and otherwise every 10 s. If an unknown address connects, it requests them
immediately.

Use this module only on the event loop. Source: behaviour.md §10.3; remoting.md §9.7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.remoting.address import IpAddress, ip_of, resolved
from rmqkit.remoting.tasks import Tasks, keep_doing

__all__ = ["AskMembers", "Members"]

_log = logging.getLogger(__name__)

# A function that requests the addresses of the other brokers of this name. It returns None if no name server answered.
AskMembers = Callable[[], Awaitable[set[str] | None]]

_REMEMBERED_MS = 600_000.0
_NOBODY_PAUSE_MS, _PAUSE_MS = 2000.0, 10_000.0
_GAP_MS = 250.0
_UNLIMITED = 1 << 30
_NETWORK_BITS = {4: 24, 6: 64}
_SIGNED_MAX = 1024
_WARNED_MAX = 256


class _Member(Struct):
    hosts: set[IpAddress]
    named_ms: float


class Members:
    """The other brokers of this name that the name servers know.

    Args:
        own: the addresses of this broker. A slave on the same machine may connect from any of them.
        ask: requests the members from the name servers; None without name servers.
        on_look: called after every look-up.
        linked: returns the addresses of the current links. Members with these addresses are not removed.
        is_any_left_out: returns True if a link does not count as a copy.
        need_signatures: True if only addresses that have `signed` are members.

    Attributes:
        need_signatures: True if only addresses that have `signed` are members.
        looks_begun: the number of the last look-up that began.
        looks_ended: the number of the last look-up that ended.
    """

    def __init__(
        self,
        clock: Clock,
        ask: AskMembers | None,
        on_look: Callable[[], object],
        *,
        own: set[str],
        linked: Callable[[], set[IpAddress | None]] = set,
        is_any_left_out: Callable[[], bool] = lambda: False,
        need_signatures: bool = False,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._on_look = on_look
        self._linked = linked
        self._is_any_left_out = is_any_left_out
        self.need_signatures = need_signatures
        self._signed_ms: dict[IpAddress, float] = {}
        self._warned_addresses: set[str] = set()
        self._own = {address for host in ("127.0.0.1", "::1", *own) if (address := ip_of(host)) is not None}
        self._known: dict[str, _Member] = {}
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        self.looks_begun = self.looks_ended = 0

    @property
    def are_asked_for(self) -> bool:
        """Return True if there are name servers."""
        return self._ask is not None

    @property
    def is_any_known(self) -> bool:
        """Return True if another broker of this name is known."""
        return bool(self._known)

    def count_at(self, address: IpAddress) -> int:
        """Return the number of members with an address; without name servers an unlimited number."""
        if self._ask is None:
            return _UNLIMITED
        # A slave on this machine may connect from an address of the machine that is not its registered address.
        wanted = self._own if address in self._own else {address}
        if self.need_signatures and not any(map(self._has_signed, wanted)):
            return 0
        return sum(not wanted.isdisjoint(member.hosts) for member in self._known.values())

    def signed(self, address: IpAddress) -> None:
        """Record that a client at an address signed a request as the inner user or a super user."""
        is_new = not self._has_signed(address)
        self._signed_ms.pop(address, None)  # reinsert it: the dict is in the order of the newest signatures
        self._signed_ms[address] = self._clock.monotonic_ms()
        if len(self._signed_ms) > _SIGNED_MAX:
            del self._signed_ms[next(iter(self._signed_ms))]
        assert len(self._signed_ms) <= _SIGNED_MAX, "the number of stored addresses is limited"
        if is_new and self.need_signatures:
            self.look_soon()

    def _has_signed(self, address: IpAddress) -> bool:
        at_ms = self._signed_ms.get(address)
        return at_ms is not None and self._clock.monotonic_ms() - at_ms <= _REMEMBERED_MS

    def start(self) -> None:
        """Start to request the members periodically."""
        if self._ask is not None:
            self._tasks.start(
                keep_doing(self._refresh, wake=self._wake, name="members of the group", gap_ms=_GAP_MS), "HA members"
            )

    def look_soon(self) -> None:
        """Request the members now, or after the running look-up."""
        self._wake.set()

    async def close(self) -> None:
        await self._tasks.close()

    async def _refresh(self) -> float:
        assert self._ask is not None, "there are name servers"
        self.looks_begun += 1
        try:
            registered = await self._ask()
            now_ms = self._clock.monotonic_ms()
            if registered is not None:  # None: no name server answered, so no member is removed
                for address in registered:
                    if hosts := self._near(address, await resolved(address)):
                        self._known[address] = _Member(hosts, now_ms)
                self._forget_unnamed(now_ms)
        finally:
            # Do this also after a failure: otherwise links would wait for the look-up without end.
            self.looks_ended = self.looks_begun
            self._on_look()
        return _NOBODY_PAUSE_MS if not self._known or self._is_any_left_out() else _PAUSE_MS

    def _near(self, address: str, hosts: set[IpAddress]) -> set[IpAddress]:
        """Return the addresses of a broker that are not global or are in the network of an address of this broker."""
        near = {host for host in hosts if not host.is_global or any(_are_neighbours(host, own) for own in self._own)}
        if hosts and not near and address not in self._warned_addresses and len(self._warned_addresses) < _WARNED_MAX:
            self._warned_addresses.add(address)
            _log.warning(
                "name servers know %s as a broker of this name, at a global address that is not in this broker's "
                "network: it does not count as a member; if it is a slave, add its address to haAllowedAddresses",
                address,
            )
        return near

    def _forget_unnamed(self, now_ms: float) -> None:
        linked = self._linked()
        if not self._own.isdisjoint(linked):
            linked |= self._own
        for address, member in list(self._known.items()):
            if not member.hosts.isdisjoint(linked):
                member.named_ms = now_ms
            elif now_ms - member.named_ms > _REMEMBERED_MS:
                del self._known[address]


def _are_neighbours(one: IpAddress, other: IpAddress) -> bool:
    shift = one.max_prefixlen - _NETWORK_BITS[one.version]
    return one.version == other.version and int(one) >> shift == int(other) >> shift
