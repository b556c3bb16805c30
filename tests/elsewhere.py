"""Requests that seem to come from another machine."""

from __future__ import annotations

import asyncio

from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command
from rmqkit.remoting.address import AdminAddresses

BELIEVES_US = {"proxy_addresses": AdminAddresses("loopback")}
"""The setting of a server that believes what `ask_from_elsewhere` says."""


async def ask_from_elsewhere(address: str, command: Command) -> Command:
    """One request over a connection that a balancer on this machine opened for a client on another one.
    The server has to believe it: ``proxyProtocolAddresses=loopback``."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    writer.writelines([b"PROXY TCP4 10.1.2.3 10.0.0.1 5000 9876\r\n", *encode_command(command)])
    splitter, frames = FrameSplitter(), []
    while not frames:
        frames = splitter.feed(await reader.read(65536))
    writer.close()
    await writer.wait_closed()
    return decode_command(frames[0])
