"""Brokers that register and leave: the accepted requests, the brokers to remove, and the brokers to notify.

Apache's name servers accept every registration: one packet replaces a master's address. Here a request must come from
an address in ``registrationAllowedAddresses``. With authentication it must be signed by the brokers' inner user or the
first user. In addition, a live broker cannot be replaced (`Claims`):

========================================================  =============================================================
request                                                   refused while
========================================================  =============================================================
register a name and id that another address has           the broker with this name and id is alive
register or unregister an address, or set queues of its   the broker at this address is alive, and its connection comes
broker                                                    from another machine
register a negative id                                    a master with this name is alive
========================================================  =============================================================

A broker is alive while the connection of its registration is open, unless it has been silent for its timeout. A
restarting broker has lost its connection, so it is accepted immediately, at any address. If a broker's machine fails,
its name and id are free after up to 120 s. ``allowBrokerTakeover`` permits a new leader of a group while the former
leader is alive and connected, as with DLedger.

`Unregistration` is the queue of brokers to remove (``BatchUnregistrationService``). Unregister requests, closed
connections and silent brokers add departures to it. One task processes all waiting departures together, because it has
to walk over every topic: a thousand brokers that lose their network need one walk. The queue is bounded. If it is full,
unregister requests are refused. Other departures are dropped, and the next scan finds these brokers again.

`Notices` sends NOTIFY_MIN_BROKER_ID_CHANGE, one-way, when the lowest id of a group has changed. If a broker has left,
or if the group has one broker, all brokers of the group are notified. If a broker with a new lowest id has joined, the
other brokers are notified. A broker that cannot be reached is skipped: brokers also query their group every second.
Use this module only on the event loop. Source: behaviour.md §1.4, §1.8; remoting.md §4.4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from rmqkit.errors import ConnectFailed
from rmqkit.namesrv.routes import MASTER_ID, BrokerRegistration, Departure, LiveBroker, MemberChange, RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode, request_name
from rmqkit.protocol.command import Command, reply, request
from rmqkit.protocol.schemas.brokers import MinBrokerIdChange
from rmqkit.remoting.authentication import Authentication
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Tasks

_log = logging.getLogger(__name__)


class Claims:
    """The checks of brokers' requests; ``authentication`` is None if signatures are not required."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, authentication: Authentication | None) -> None:
        self._settings = settings
        self._routes = routes
        self._authentication = authentication

    def refused(self, connection: Connection, command: Command) -> Command | None:
        """Return the refusal for a peer that must not send requests of brokers, or None."""
        allowed = self._settings.registration_addresses
        if not allowed.include(connection.hops):
            return self._refuse(
                connection,
                command,
                f"{connection.peer} must not register brokers: registrationAllowedAddresses={allowed}; "
                "add its address to this setting of the name server",
            )
        remark = None if self._authentication is None else self._authentication.refusal(connection, command)
        if remark is None:
            return None
        hint = "set the same innerClientAuthenticationCredentials at name servers and brokers"
        return self._refuse(connection, command, f"{remark} ({hint})")

    def registration(self, connection: Connection, command: Command, wanted: BrokerRegistration) -> Command | None:
        """Return the refusal of a registration that would replace a live broker, or None."""
        if self._settings.allow_takeover:
            return None
        members = self._routes.members(wanted.broker_name)
        bearer = members.get(wanted.broker_id)
        if bearer not in (None, wanted.address) and (live := self._alive(bearer, connection)) is not None:
            return self._refuse(
                connection,
                command,
                f"{wanted.broker_name} with id {wanted.broker_id} is {bearer} and alive ({_where(live)}): "
                f"{wanted.address} can replace it after it has stopped, or with allowBrokerTakeover=true",
            )
        if wanted.broker_id < 0 and self._alive(members.get(MASTER_ID), connection) is not None:
            return self._refuse(
                connection,
                command,
                f"{wanted.broker_name} is {members[MASTER_ID]} and alive: {wanted.broker_id} is not the id of a slave",
            )
        return self.speaks_for(connection, command, [wanted.address])

    def speaks_for(self, connection: Connection, command: Command, addresses: Iterable[str]) -> Command | None:
        """Return the refusal of a request for a broker that is alive on another machine, or None."""
        for address in addresses:
            live = self._alive(address, connection)
            if live is not None and _where(live) != _place(connection) and not self._settings.allow_takeover:
                return self._refuse(
                    connection,
                    command,
                    f"the broker at {address} is alive ({_where(live)}): another machine cannot replace it; "
                    "wait until it has stopped, or set allowBrokerTakeover=true",
                )
        return None

    def addresses_of(self, broker_names: Iterable[str]) -> list[str]:
        return [address for name in broker_names for address in self._routes.members(name).values()]

    def _alive(self, address: str | None, connection: Connection) -> LiveBroker | None:
        """Return a broker with this address that is alive over another connection, or None."""
        for live in () if address is None else self._routes.living(address):
            # A request over the broker's own connection is valid; a broker with a closed connection is not alive.
            if live.connection is not connection and getattr(live.connection, "is_open", False):
                return live
        return None

    def _refuse(self, connection: Connection, command: Command, remark: str) -> Command:
        connection.warn(f"refused {request_name(command.code)} of {connection.peer}: {remark}")
        return reply(command, ResponseCode.NO_PERMISSION, remark)


def _where(live: LiveBroker) -> str:
    return _place(live.connection)


def _place(connection: object) -> str:
    """Return the addresses of a connection, as text."""
    return " by way of ".join(getattr(connection, "addresses", ())) or "?"


class Unregistration:
    """The removal of departed brokers from the route table, in batches. Use it only on the event loop. At most
    ``capacity`` departures wait; ``on_change`` is called for each group whose lowest id has left."""

    def __init__(self, routes: RouteTable, *, capacity: int, on_change: Callable[[MemberChange], None]) -> None:
        self._routes = routes
        self._on_change = on_change
        self._waiting: asyncio.Queue[Departure] = asyncio.Queue(capacity)
        self._tasks = Tasks()

    def submit(self, departure: Departure) -> bool:
        """Queue the removal of a broker. Return False if the queue is full."""
        try:
            self._waiting.put_nowait(departure)
        except asyncio.QueueFull:
            _log.warning("cannot unregister %s at %s: the queue is full", departure.broker_name, departure.address)
            return False
        return True

    def start(self) -> None:
        self._tasks.start(self._run(), "unregistration")

    async def stop(self) -> None:
        """Process the waiting departures, and stop."""
        await self._tasks.close()
        # The unregister requests of these departures were answered with success.
        self._forget_batch(self._drained())

    async def _run(self) -> None:
        while True:
            first = await self._waiting.get()
            try:
                self._forget_batch([first, *self._drained()])
            except Exception:  # noqa: BLE001 - the task's outer edge: the next scan finds them again
                _log.exception("cannot unregister brokers")

    def _drained(self) -> list[Departure]:
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    def _forget_batch(self, batch: list[Departure]) -> None:
        for change in self._routes.unregister(batch):
            self._on_change(change)


NOTICE_TIMEOUT_MS = 300


def receivers(change: MemberChange) -> list[str]:
    """Return the addresses to notify of a change."""
    if change.offline_address is not None or len(change.members) == 1:
        return list(change.members.values())
    lowest = min(change.members)
    return [address for broker_id, address in change.members.items() if broker_id != lowest]


class Notices:
    """The sender of notices. Use it only on the event loop."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client
        self._tasks = Tasks()

    def send(self, change: MemberChange) -> None:
        """Notify the members of a group soon."""
        assert change.members, "a changed group has members"
        lowest = min(change.members)
        header = MinBrokerIdChange(
            min_broker_id=lowest,
            broker_name=change.broker_name,
            min_broker_addr=change.members[lowest],
            offline_broker_addr=change.offline_address,
            ha_broker_addr=change.ha_address,
        )
        for address in receivers(change):
            self._tasks.start(self._send(address, header), f"notice to {address}")

    async def stop(self) -> None:
        await self._tasks.close()
        await self._client.close()

    async def _send(self, address: str, header: MinBrokerIdChange) -> None:
        notice = request(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, header, one_way=True)
        try:
            await self._client.send_one_way(address, notice, NOTICE_TIMEOUT_MS)
        except ConnectFailed as error:
            _log.warning(
                "cannot notify %s that the lowest broker id is now %d: %s", address, header.min_broker_id, error
            )
