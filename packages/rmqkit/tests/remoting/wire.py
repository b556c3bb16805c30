"""A connection on a transport without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router


class Wire(asyncio.Transport):
    """A transport that records how a connection uses it.

    Attributes:
        names: the addresses of both sides.
        data: the written bytes.
        writes: the same, one entry for each write.
        buffered: the number of bytes that the peer has not read.
        reading: one entry for each pause (False) and each resumption (True).
        protocol: the protocol that took over the transport.
    """

    def __init__(self, peername: object = None, sockname: object = None) -> None:
        super().__init__()
        self.names = {"peername": peername, "sockname": sockname}
        self.data = b""
        self.writes: list[bytes] = []
        self.is_closed = self.is_aborted = False
        self.buffered = 0
        self.reading: list[bool] = []
        self.protocol: asyncio.BaseProtocol | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.names.get(name, default)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: Any) -> None:
        self.data += data
        self.writes.append(bytes(data))

    def writelines(self, pieces: Any) -> None:
        raise AssertionError("asyncio's own writelines() copies, or never pauses the writer")

    def pause_reading(self) -> None:
        self.reading.append(False)

    def resume_reading(self) -> None:
        self.reading.append(True)


def opened(router: Router | None = None, wire: Wire | None = None, **arguments: Any) -> tuple[Connection, Wire]:
    connection, wire = Connection(router or Router(), **arguments), wire or Wire()
    connection.connection_made(wire)
    return connection, wire
