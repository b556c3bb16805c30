"""A TCP port of a server. `ListeningPort.bind` reserves the port, and `open` accepts connections.

=========  ==================================================================================================
state      meaning
=========  ==================================================================================================
bound      The port is reserved: `bind` has found no other process that listens on it. Connections are refused.
           A server recovers its store in this state.
open       The kernel and the event loop accept connections.
closed     Connections are refused, and the port is free again.
=========  ==================================================================================================

Two processes can bind one port at the same moment, because both set SO_REUSEADDR. They set this option so that old
connections in TIME_WAIT do not block the port. Only ``listen`` decides which process owns the port. `open` therefore
calls ``listen`` itself and raises the error: ``start_serving()`` of uvloop 0.23 ignores EADDRINUSE.

A bound port must not listen, because the kernel would complete connections. A request would then wait while the store
recovers, and would be executed long after its client has sent it to another broker.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from rmqkit.errors import RmqError
from rmqkit.remoting.address import ip_of, join_address
from rmqkit.remoting.port_users import in_use_by

_BACKLOG = 1024


class ListenFailed(RmqError):
    """A failure to listen on a port."""


@dataclass(slots=True, kw_only=True)
class ListeningPort:
    """One port on every address of a host. Use it only on the event loop.

    Attributes:
        protocol: makes the protocol of each accepted connection.
        host: the host as configured, for errors.
        number: the number of the port.
        sockets: one socket for each address of the host.
        is_open: True while connections are accepted.
    """

    protocol: Callable[[], asyncio.BaseProtocol]
    host: str
    number: int
    sockets: list[socket.socket]
    is_open: bool = False
    _servers: list[asyncio.Server] = field(default_factory=list)

    @classmethod
    async def bind(cls, protocol: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> ListeningPort:
        """Reserve a port without accepting connections. Port 0 means any free port.
        Raises ListenFailed: another process listens on the port, or the address does not belong to this machine."""
        loop = asyncio.get_running_loop()
        try:
            resolve = partial(socket.getaddrinfo, host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            needs_name_service = bool(host) and ip_of(host) is None
            found = await loop.run_in_executor(None, resolve) if needs_name_service else resolve()
            with ExitStack() as bound:
                sockets: list[socket.socket] = []
                for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
                    # For port 0, all addresses use the number that the system chose for the first address.
                    number = sockets[0].getsockname()[1] if sockets else port
                    sockets.append(bound.enter_context(bound_socket(family, (address[0], number, *address[2:]))))
                bound.pop_all()
        except (OSError, OverflowError, UnicodeError) as error:
            raise _listen_failed(host, port, error) from error
        return cls(protocol=protocol, host=host, number=sockets[0].getsockname()[1], sockets=sockets)

    async def open(self) -> None:
        """Accept connections. Raises ListenFailed: another process has begun to listen on the port since `bind`."""
        assert not self.is_open, "the port is not open yet"
        loop = asyncio.get_running_loop()
        try:
            for one in self.sockets:
                one.listen(_BACKLOG)
        except OSError as error:
            raise _listen_failed(self.host, self.number, error) from error
        self.is_open = True  # before the loop accepts: the first connection may arrive while `create_server` waits
        for one in self.sockets:
            self._servers.append(await loop.create_server(self.protocol, sock=one, backlog=_BACKLOG))

    def close(self) -> None:
        """Refuse new connections and free the port. Accepted connections stay open."""
        self.is_open = False
        for server in self._servers:
            server.close()
        for one in self.sockets:
            one.close()

    async def wait_closed(self) -> None:
        """Wait until the event loop has closed the port."""
        for server in self._servers:
            await server.wait_closed()


def bound_socket(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a socket that is bound to an address. Raises OSError."""
    # Name the protocol (IPPROTO_TCP): otherwise asyncio does not set TCP_NODELAY on the accepted sockets.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setblocking(False)
        if os.name == "posix":  # on Windows, SO_REUSEADDR would share the port with a process that listens on it
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _listen_failed(host: str, port: int, error: Exception) -> ListenFailed:
    number = error.errno if isinstance(error, OSError) else None
    is_name = isinstance(error, (socket.gaierror, UnicodeError))
    cause = os.strerror(number) if number and not is_name else getattr(error, "strerror", None) or error
    remedy = "choose another port"
    if number == errno.EADDRINUSE:
        cause, remedy = in_use_by(port), "stop that program, or choose another port"
    elif is_name or number == errno.EADDRNOTAVAIL:
        remedy = "use one of this machine's"
    return ListenFailed(f"cannot listen on {join_address(host, port)}: {cause}; {remedy}")
