"""The value of ``haAllowedAddresses``: the addresses from which a slave is allowed to follow a master's log.

The protocol of the HA port has no handshake and no users. Only the address can be checked, and with TLS the
certificate (`rmqkit.broker.replication.master`).

======================  =======================================================================================
``haAllowedAddresses``  allows
======================  =======================================================================================
``loopback``            programs on this machine
``members``             brokers of the same name, at the addresses that the name servers know (`Members`)
``any``                 every address, as with Apache's brokers
10.1.2.3, 10.1.0.0/16   an address, a network
======================  =======================================================================================

Source: behaviour.md §10.3; remoting.md §9.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rmqkit.remoting.address import AdminAddresses, IpAddress

__all__ = ["HaAddresses"]

_MEMBERS = "members"
_LOOPBACK = "loopback"


class HaAddresses:
    """The value of ``haAllowedAddresses``, parsed from its text.
    Raises ValueError: a part is not an address. The message contains the part."""

    __slots__ = ("_allowed", "_named", "_text", "has_members")

    def __init__(self, text: str = "loopback;members") -> None:
        self._text = text.strip()
        parts = [part.lower() for part in re.split(r"[\s,;]+", self._text) if part]
        if not parts:
            raise ValueError("must name members, loopback, any, or addresses and networks such as 10.1.0.0/16")
        self.has_members = _MEMBERS in parts
        try:
            self._allowed = _addresses(part for part in parts if part != _MEMBERS)
            self._named = _addresses(part for part in parts if part not in (_MEMBERS, _LOOPBACK))
        except ValueError as error:
            raise ValueError(str(error).replace("neither loopback", "neither members, loopback")) from None

    def __str__(self) -> str:
        return self._text

    def include(self, address: IpAddress) -> bool:
        """Return True if a slave is allowed to follow from an address, even if it is not a member."""
        return self._allowed is not None and self._allowed.include([address])

    def name(self, address: IpAddress) -> bool:
        """Return True if the setting itself contains an address, so that its copies count. ``loopback`` does not
        contain an address in this sense."""
        return self._named is not None and self._named.include([address])

    @property
    def is_local(self) -> bool:
        """True if the setting allows only this machine, apart from members."""
        return self._allowed is None or self._allowed.is_local


def _addresses(parts: Iterable[str]) -> AdminAddresses | None:
    text = ";".join(parts)
    return AdminAddresses(text) if text else None
