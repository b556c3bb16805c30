"""Listening ports: two processes that bind one port at the same moment, names with several addresses, closing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.exporter import Exporter
from rmqkit.metrics import histogram
from rmqkit.remoting.listening import ListenFailed, ListeningPort
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer

uvloop = pytest.importorskip("uvloop")

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def is_reachable(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@LOOPS
def test_of_two_that_bind_a_port_together_the_second_that_opens_it_fails(run):
    async def scenario():
        first = await ListeningPort.bind(asyncio.Protocol, "127.0.0.1", 0)
        second = await ListeningPort.bind(asyncio.Protocol, "127.0.0.1", first.number)
        await second.open()
        with pytest.raises(ListenFailed, match=rf"127\.0\.0\.1:{first.number}: in use by .+, or choose another"):
            await first.open()
        assert not first.is_open
        assert second.is_open
        second.close()
        await second.wait_closed()
        await first.open()  # the port is free again
        assert await is_reachable(first.number)
        first.close()
        assert not await is_reachable(first.number)

    run(scenario())


@LOOPS
def test_each_kind_of_server_reports_a_port_that_was_lost_since_it_was_bound(run):
    async def scenario():
        server, exporter = RemotingServer(Router()), Exporter()
        await exporter.bind("127.0.0.1", 0)
        ports = [await server.bind("127.0.0.1", 0), int(exporter.address.rpartition(":")[2])]
        others = [await ListeningPort.bind(asyncio.Protocol, "127.0.0.1", port) for port in ports]
        for other in others:
            await other.open()
        with pytest.raises(ListenFailed, match=str(ports[0])):
            await server.serve()
        with pytest.raises(ListenFailed, match=str(ports[1])):
            await exporter.serve(dict, {}, histogram("rmqkit_event_loop_lag"), SYSTEM_CLOCK)
        await server.close()
        await exporter.close()
        for other in others:
            other.close()

    run(scenario())


@LOOPS
def test_a_bound_port_refuses_connections_until_it_opens(run):
    async def scenario():
        port = await ListeningPort.bind(asyncio.Protocol, "127.0.0.1", 0)
        assert not await is_reachable(port.number)
        await port.open()
        assert await is_reachable(port.number)
        port.close()
        await port.wait_closed()

    run(scenario())


@LOOPS
def test_a_port_in_use_is_found_when_it_is_bound(run):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenFailed, match="in use by"):
            await ListeningPort.bind(asyncio.Protocol, "127.0.0.1", taken.getsockname()[1])

    run(scenario())


@LOOPS
def test_all_addresses_of_a_host_share_one_number(run):
    async def scenario():
        port = await ListeningPort.bind(asyncio.Protocol, "", 0)
        await port.open()
        assert {one.getsockname()[1] for one in port.sockets} == {port.number}
        assert await is_reachable(port.number)
        port.close()

    run(scenario())


@LOOPS
def test_accepted_connections_do_not_wait_for_more_to_send(run):
    async def scenario():
        accepted = asyncio.get_running_loop().create_future()

        class Noting(asyncio.Protocol):
            def connection_made(self, transport):
                accepted.set_result(transport)

        port = await ListeningPort.bind(Noting, "127.0.0.1", 0)
        await port.open()
        _, writer = await asyncio.open_connection("127.0.0.1", port.number)
        transport = await accepted
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.abort()
        writer.close()
        port.close()

    run(scenario())
