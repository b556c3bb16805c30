"""Brokers that come and go: the requests that are accepted, the brokers to forget, and the brokers to notify.

Apache's name servers accept every registration: one packet replaces a master's address. Here a request has to come from
an address in ``registrationAllowedAddresses``. If users are in force it has to be signed by the brokers' inner user or
the first user. Regardless of the list, a live broker keeps its place (`Claims`):

========================================================  =============================================================
request                                                   is refused while
========================================================  =============================================================
another address has this name and id                      the broker with this name and id is alive
this address has this name and id, or leaves, or has      it is alive, and its connection comes from another machine
these queues of a topic
a negative id                                             a master of that name is alive
========================================================  =============================================================

A broker is alive while the connection over which it registered is open, until it was silent for its time-out. A broker
that restarts has lost its connection, so it is accepted at once, at any address. If a broker's machine vanished, its
place is free after up to 120 s. ``allowBrokerTakeover`` allows a new leader of a group while the former leader is alive
and connected, as with DLedger.

`Unregistration` is the queue of brokers to forget (``BatchUnregistrationService``). Unregister requests, closed
connections and silence put departures into it. One task takes all waiting departures at once, because it has to walk
over every topic: a thousand brokers whose network broke cost one walk. The queue is bounded. A departure that does not
fit is refused (an unregister request) or dropped (the others: the next scan finds them again).

`Notices` sends NOTIFY_MIN_BROKER_ID_CHANGE, one-way, when the lowest id of a group changed. If a broker left, or is
alone, all brokers of the group are notified; if a new lowest id joined, all but this broker. A broker that cannot be
reached is skipped: brokers also look their group up every second.
Loop only. Source: behaviour.md §1.4, §1.8; remoting.md §4.4.
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
    """Judges what brokers say of themselves; ``authentication`` None: nobody has to sign."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, authentication: Authentication | None) -> None:
        self._settings = settings
        self._routes = routes
        self._authentication = authentication

    def refused(self, connection: Connection, command: Command) -> Command | None:
        """The answer to who may not speak for any broker, or None."""
        allowed = self._settings.registration_addresses
        if not allowed.include(connection.hops):
            return self._refuse(
                connection,
                command,
                f"{connection.peer} may not speak for brokers: registrationAllowedAddresses={allowed}; "
                "add its address to that setting of the name server",
            )
        remark = None if self._authentication is None else self._authentication.refusal(connection, command)
        if remark is None:
            return None
        hint = "brokers sign as innerClientAuthenticationCredentials says, the same here and there"
        return self._refuse(connection, command, f"{remark} ({hint})")

    def registration(self, connection: Connection, command: Command, wanted: BrokerRegistration) -> Command | None:
        """The answer to a registration that takes the place of somebody alive, or None."""
        if self._settings.allow_takeover:
            return None
        members = self._routes.members(wanted.broker_name)
        bearer = members.get(wanted.broker_id)
        if bearer not in (None, wanted.address) and (live := self._alive(bearer, connection)) is not None:
            return self._refuse(
                connection,
                command,
                f"{wanted.broker_name} with id {wanted.broker_id} is {bearer} and alive ({_where(live)}): "
                f"{wanted.address} may have its place when it is gone, or with allowBrokerTakeover=true",
            )
        if wanted.broker_id < 0 and self._alive(members.get(MASTER_ID), connection) is not None:
            return self._refuse(
                connection,
                command,
                f"{wanted.broker_name} is {members[MASTER_ID]} and alive: {wanted.broker_id} is no id of another",
            )
        return self.speaks_for(connection, command, [wanted.address])

    def speaks_for(self, connection: Connection, command: Command, addresses: Iterable[str]) -> Command | None:
        """The answer to who speaks for a broker that is alive elsewhere, or None."""
        for address in addresses:
            live = self._alive(address, connection)
            if live is not None and _where(live) != _place(connection) and not self._settings.allow_takeover:
                return self._refuse(
                    connection,
                    command,
                    f"the broker at {address} is alive ({_where(live)}): it speaks for itself; "
                    "wait until it is gone, or set allowBrokerTakeover=true",
                )
        return None

    def addresses_of(self, broker_names: Iterable[str]) -> list[str]:
        return [address for name in broker_names for address in self._routes.members(name).values()]

    def _alive(self, address: str | None, connection: Connection) -> LiveBroker | None:
        """A broker that is alive over another connection than this."""
        for live in () if address is None else self._routes.living(address):
            # Over this very connection it speaks for itself; over a closed one it is as good as gone.
            if live.connection is not connection and getattr(live.connection, "is_open", False):
                return live
        return None

    def _refuse(self, connection: Connection, command: Command, remark: str) -> Command:
        connection.warn(f"refused {request_name(command.code)} of {connection.peer}: {remark}")
        return reply(command, ResponseCode.NO_PERMISSION, remark)


def _where(live: LiveBroker) -> str:
    return _place(live.connection)


def _place(connection: object) -> str:
    """From where a connection comes."""
    return " by way of ".join(getattr(connection, "addresses", ())) or "?"


class Unregistration:
    """Takes departures in batches out of the route table; loop only.
    At most ``capacity`` wait; ``on_change`` is called with each group whose lowest id went away."""

    def __init__(self, routes: RouteTable, *, capacity: int, on_change: Callable[[MemberChange], None]) -> None:
        self._routes = routes
        self._on_change = on_change
        self._waiting: asyncio.Queue[Departure] = asyncio.Queue(capacity)
        self._tasks = Tasks()

    def submit(self, departure: Departure) -> bool:
        """Have a broker forgotten soon; False when the queue is full."""
        try:
            self._waiting.put_nowait(departure)
        except asyncio.QueueFull:
            _log.warning("cannot unregister %s at %s: the queue is full", departure.broker_name, departure.address)
            return False
        return True

    def start(self) -> None:
        self._tasks.start(self._run(), "unregistration")

    async def stop(self) -> None:
        """Take what still waits, and end."""
        await self._tasks.close()
        # A good-bye that was answered with success is kept.
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
    """The addresses to notify of a change."""
    if change.offline_address is not None or len(change.members) == 1:
        return list(change.members.values())
    lowest = min(change.members)
    return [address for broker_id, address in change.members.items() if broker_id != lowest]


class Notices:
    """Sends notices; loop only."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client
        self._tasks = Tasks()

    def send(self, change: MemberChange) -> None:
        """Notify the members of a group soon."""
        assert change.members, "a notice goes to somebody"
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
            _log.warning("cannot tell %s that the lowest broker id is now %d: %s", address, header.min_broker_id, error)
