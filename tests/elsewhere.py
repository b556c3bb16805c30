"""Requests that seem to come from another machine."""

from __future__ import annotations

import asyncio

from rmqkit.protocol.command import Command, FrameSplitter, decode_command, encode_command
from rmqkit.remoting.address import AdminAddresses

BELIEVES_US = {"proxy_addresses": AdminAddresses("loopback")}
"""A server setting that makes the server accept the client address of `ask_from_elsewhere`."""


async def ask_from_elsewhere(address: str, command: Command) -> Command:
    """Send a request over a connection that a local load balancer opened for a client on another machine.

    The server must accept the balancer's preamble: ``proxyProtocolAddresses=loopback``."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    writer.writelines([b"PROXY TCP4 10.1.2.3 10.0.0.1 5000 9876\r\n", *encode_command(command)])
    splitter, frames = FrameSplitter(), []
    while not frames:
        frames = splitter.feed(await reader.read(65536))
    writer.close()
    await writer.wait_closed()
    return decode_command(frames[0])
