"""Addresses as RocketMQ writes them: ``host:port``, an IPv6 host in brackets or bare."""

from __future__ import annotations

import ipaddress
import socket

from rmqkit.errors import SettingsError


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``.
    Raises ValueError: no name server could know the host, or the port is not a number from 0 to 65535."""
    host, _, port = text.strip().rpartition(":")
    if not _is_host(host) or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address {text!r} must be host:port, for example 127.0.0.1:9876")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_host(text: str) -> bool:
    """Whether it can be looked up; the resolver's own check (IDNA) is slow to import, and not needed for most."""
    if text.isascii():
        return all(0 < len(label) < 64 for label in text.removesuffix(".").split("."))
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def split_addresses(text: str) -> list[str]:
    """The addresses in a ``host:port;host:port`` list, in order.
    Raises ValueError: one of them is not an address, or there is none."""
    addresses = [part.strip() for part in text.split(";") if part.strip()]
    for address in addresses:
        split_address(address)
    if not addresses:
        raise ValueError("the list of name servers is empty: give host:port;host:port")
    return addresses


def join_address(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_ip(host: str) -> str:
    """The literal address others reach a listener on ``host`` by; a wildcard becomes this machine's own address.
    Nothing is sent: the kernel is only asked which address a packet would leave from.
    Raises SettingsError: the host is a name that nobody knows."""
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
