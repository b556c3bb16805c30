"""Who may speak for a broker: register it, renew it, take it away.

Apache's name servers believe everybody: one packet puts another address in a master's place. Here a request has to come
from one of ``registrationAllowedAddresses``; where users are in force it has to be signed by the brokers' inner user or
the first user; and whatever the list says, who is alive keeps its place:

========================================================  =============================================================
somebody says                                             is refused while
========================================================  =============================================================
another address bears this name and id                    the bearer is alive
this address bears this name and id, or leaves, or has    it is alive, and its connection comes from elsewhere
these queues of a topic
a negative id                                             a master of that name is alive
========================================================  =============================================================

Alive is who has a connection open over which it registered, until it was silent for its time-out. A broker that
restarts has lost its connection, so it is let in at once, at whatever address; one whose machine vanished is waited for
up to 120 s. Where a group's leader changes while the former one is alive and connected, as with DLedger,
``allowBrokerTakeover`` lets it. Loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rmqkit.namesrv.routes import MASTER_ID, LiveBroker, Registration, RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.authentication import Authentication
from rmqkit.remoting.connection import Connection

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

    def registration(self, connection: Connection, command: Command, wanted: Registration) -> Command | None:
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
            if live.connection is not connection and getattr(live.connection, "is_open", False):
                return live
        return None

    def _refuse(self, connection: Connection, command: Command, remark: str) -> Command:
        _log.warning("request %d of %s is refused: %s", command.code, connection.peer, remark)
        return reply(command, ResponseCode.NO_PERMISSION, remark)


def _where(live: LiveBroker) -> str:
    return _place(live.connection)


def _place(connection: object) -> str:
    """From where a connection comes."""
    return " by way of ".join(getattr(connection, "addresses", ())) or "?"
