"""One-way requests to a peer that takes nothing more: who sends them is not kept for ever."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.errors import ConnectFailed
from rmqkit.protocol.command import request
from rmqkit.remoting.client import RemotingClient
from tests.waiting import SECONDS


async def test_a_one_way_request_to_a_peer_that_takes_nothing_fails_in_time():
    held = []

    async def take_nothing(reader, writer):
        writer.transport.pause_reading()
        held.append(writer)

    server = await asyncio.start_server(take_nothing, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = RemotingClient()

    async def fill():
        for _ in range(1000):  # MiB, more than any socket's buffers
            await client.send_one_way(address, request(7, body=bytes(1 << 20), one_way=True), 100)

    try:
        async with asyncio.timeout(SECONDS):
            with pytest.raises(ConnectFailed, match="it has read nothing"):
                await fill()
    finally:
        await client.close()
        server.close()
        for writer in held:
            writer.transport.abort()  # it would not see that the other end is gone
