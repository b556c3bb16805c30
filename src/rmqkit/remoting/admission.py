"""Who may change a server: by default only its own machine.

Apache's servers take administrative requests from anybody who can connect; here that needs an operator's word.
"""

from __future__ import annotations

import enum

from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Handler

__all__ = ["AdminFrom", "for_admins"]


class AdminFrom(enum.Enum):
    """Where administrative requests may come from.

    A proxy on this machine that does not say for whom it speaks (the PROXY protocol does) makes everybody local.
    """

    LOOPBACK = "loopback"
    ANY = "any"


def for_admins(handler: Handler, admin_from: AdminFrom) -> Handler:
    """A handler that answers NO_PERMISSION to those who may not administer."""
    if admin_from is AdminFrom.ANY:
        return handler

    def guarded(connection: Connection, command: Command) -> object:
        if connection.is_local:
            return handler(connection, command)
        return reply(
            command,
            ResponseCode.NO_PERMISSION,
            f"{connection.peer} may not change this server: adminFrom=loopback; "
            "ask from its own machine or set adminFrom=any",
        )

    return guarded  # type: ignore[return-value]
