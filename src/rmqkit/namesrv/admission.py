"""Who may change what a name server says: by default only peers on the loopback addresses.

RocketMQ's name server takes administrative requests from anybody who can connect. Here they need an operator's word
(``adminFrom``). The peer's address is all that is looked at: behind a proxy it is the proxy's.
"""

from __future__ import annotations

import ipaddress

from rmqkit.errors import SettingsError
from rmqkit.remoting.address import split_address

__all__ = ["AdminPeers"]

_WORDS = {"loopback": "127.0.0.0/8;::1/128", "any": "0.0.0.0/0;::/0"}


class AdminPeers:
    """The networks that administrative requests may come from.

    Args:
        allowed: ``loopback``, ``any`` or networks separated by semicolons.

    Raises:
        SettingsError: a network cannot be read.
    """

    def __init__(self, allowed: str) -> None:
        texts = [text.strip() for text in _WORDS.get(allowed.strip(), allowed).split(";") if text.strip()]
        try:
            self._networks = [ipaddress.ip_network(text) for text in texts]
        except ValueError as error:
            raise SettingsError(
                f"adminFrom={allowed}: {error}; write loopback, any or networks such as 10.1.0.0/16;10.2.0.7"
            ) from None

    def admits(self, peer: str) -> bool:
        """Whether a peer, ``ip:port``, is in one of the networks."""
        try:
            address = ipaddress.ip_address(split_address(peer)[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)
