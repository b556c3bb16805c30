"""Who may change a server: by default only its own machine (``adminAllowedAddresses``).

Apache's servers take administrative requests from anybody who can connect; here that needs an operator's word.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, reply
from rmqkit.remoting.connection import Connection, IpAddress
from rmqkit.remoting.dispatch import Handler

__all__ = ["AdminAddresses", "for_admins"]

_LOOPBACK = "loopback"
_NAMED = {_LOOPBACK: ("127.0.0.0/8", "::1/128"), "any": ("0.0.0.0/0", "::/0"), "none": ()}


class AdminAddresses:
    """Where requests of a kind may come from: a setting's value, made from its text.
    The text is ``loopback``, ``any``, ``none``, addresses and networks (``10.1.0.0/16``), separated by commas or
    semicolons. A proxy on this machine that does not say for whom it speaks (the PROXY protocol does, and its address
    has to be one of ``proxyProtocolAddresses``) makes everybody local.
    Raises ValueError: a part is none of these; the text names it."""

    __slots__ = ("_networks", "_text")

    def __init__(self, text: str = _LOOPBACK) -> None:
        self._text = text.strip()
        parts = list(filter(None, re.split(r"[\s,;]+", self._text)))
        if not parts:
            raise ValueError("must name loopback, any, or addresses and networks such as 10.1.0.0/16")
        self._networks = [_network(text) for part in parts for text in _NAMED.get(part.lower(), (part,))]

    def __str__(self) -> str:
        return self._text

    @property
    def is_local(self) -> bool:
        """Whether none of these is another machine."""
        return all(network.is_loopback for network in self._networks)

    def include(self, hops: Sequence[IpAddress]) -> bool:
        """Whether every address on the way of a request is one of these; a peer without an address is not."""
        return bool(hops) and all(any(hop in network for network in self._networks) for hop in hops)


def for_admins(handler: Handler, allowed: AdminAddresses) -> Handler:
    """A handler that answers NO_PERMISSION to those who may not administer."""

    def guarded(connection: Connection, command: Command) -> object:
        if allowed.include(connection.hops):
            return handler(connection, command)
        return reply(
            command,
            ResponseCode.NO_PERMISSION,
            f"{connection.peer} may not change this server: adminAllowedAddresses={allowed}; "
            "ask at 127.0.0.1 on its machine, or add the address to that setting",
        )

    return guarded  # type: ignore[return-value]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text} is neither loopback, any, an address nor a network such as 10.1.0.0/16") from None
