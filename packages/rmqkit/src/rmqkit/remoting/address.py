"""Addresses as RocketMQ writes them, ``host:port`` with or without brackets around IPv6, and sets of addresses.

The *hops* of a request are the address of its peer and, if a load balancer reports it, the address of the client.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence

from rmqkit.errors import SettingsError


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.
    Raises ValueError: the host cannot be a valid name, or the port is not a number from 0 to 65535."""
    host, _, port = text.strip().rpartition(":")  # split at the last colon, because a bare IPv6 host contains colons
    if not _is_host(host) or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address {text!r} must be host:port, for example 127.0.0.1:9876")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_host(text: str) -> bool:
    """Return True if a host name is valid. Use the resolver's check (IDNA) only if necessary, because its import is
    slow."""
    if text.isascii():
        return all(0 < len(label) < 64 for label in text.removesuffix(".").split("."))
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def split_addresses(text: str) -> list[str]:
    """Return the addresses in a ``host:port;host:port`` list, in order.
    Raises ValueError: an address is invalid, or the list is empty."""
    addresses = [part.strip() for part in text.split(";") if part.strip()]
    for address in addresses:
        split_address(address)
    if not addresses:
        raise ValueError("the list of name servers is empty: give host:port;host:port")
    return addresses


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_ip(host: str) -> str:
    """Return the IP address at which other machines reach a listener on ``host``. For a wildcard host, return the
    address of this machine. No packet is sent: the kernel reports the source address that a packet would have.
    Raises SettingsError: the host name is unknown."""
    if host not in ("", "0.0.0.0", "::"):
        try:
            return str(socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0])
        except (socket.gaierror, UnicodeError) as error:
            cause = getattr(error, "strerror", error)
            raise SettingsError(f"cannot listen on {host}: {cause}; use one of this machine's") from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


_LOOPBACK = "loopback"


_NAMED = {_LOOPBACK: ("127.0.0.0/8", "::1/128"), "any": ("0.0.0.0/0", "::/0"), "none": ()}


class AdminAddresses:
    """The addresses from which one kind of request is allowed, parsed from the text of a setting.
    The text consists of ``loopback``, ``any``, ``none``, addresses and networks (``10.1.0.0/16``), separated by commas
    or semicolons. Behind a proxy on this machine, every client appears local, unless the proxy reports the client's
    address with the PROXY protocol and ``proxyProtocolAddresses`` includes the proxy's own address.
    Raises ValueError: a part is invalid. The error names the part."""

    __slots__ = ("_networks", "_text")

    def __init__(self, text: str = _LOOPBACK) -> None:
        self._text = text.strip()
        parts = list(filter(None, re.split(r"[\s,;]+", self._text)))
        if not parts:
            raise ValueError("must contain loopback, any, or addresses and networks such as 10.1.0.0/16")
        self._networks = [_network(text) for part in parts for text in _NAMED.get(part.lower(), (part,))]

    def __str__(self) -> str:
        return self._text

    @property
    def is_local(self) -> bool:
        """Return True if only addresses of this machine are included."""
        return all(network.is_loopback for network in self._networks)

    def include(self, hops: Sequence[IpAddress]) -> bool:
        """Return True if there are hops and all of them are included."""
        return bool(hops) and all(any(hop in network for network in self._networks) for hop in hops)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text} is neither loopback, any, an address nor a network such as 10.1.0.0/16") from None


def ip_of(host: str) -> IpAddress | None:
    """Return the IP address in a host text of a socket, or None if it is not an address. An IPv4 address that is mapped
    to IPv6 is returned as IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


async def resolved(address: str) -> set[IpAddress]:
    """Return the IP addresses of ``host:port``. The set is empty if the name is unknown."""
    try:
        host, port = split_address(address)
        if (literal := ip_of(host)) is not None:
            return {literal}
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError):
        return set()
    return {literal for entry in found if (literal := ip_of(str(entry[4][0]))) is not None}
