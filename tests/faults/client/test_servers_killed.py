"""Servers are killed and restarted while clients work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rmqkit.client.producer.producer import Producer
from rmqkit.errors import NoRoute
from rmqkit.protocol.message import Message
from tests.faults.client.outage import ride_out
from tests.faults.client.servers import Servers
from tests.faults.client.trial import CONF, PATIENT, Trial, on_real_loop
from tests.waiting import SECONDS

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@on_real_loop
async def test_a_broker_that_is_killed_and_comes_back_costs_no_message(tmp_path: Path) -> None:
    async with Servers(tmp_path, conf=CONF) as servers:
        async with Trial(servers.namesrv_addr) as trial:
            for _ in range(2):
                await trial.arrivals(40)
                async with trial.outage():
                    servers.broker.kill()
                    await servers.broker.start()
            await trial.arrivals(40)
            await trial.settle()
        trial.judge()


@on_real_loop
async def test_no_send_fails_while_a_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    async with Servers(tmp_path, conf=CONF) as servers:

        async def outage() -> None:
            servers.broker.kill()
            await servers.broker.start()

        await ride_out(servers.namesrv_addr, "RiddenOut", outage)


@on_real_loop
async def test_known_routes_outlive_the_name_server_and_new_ones_come_back_with_it(tmp_path: Path) -> None:
    async with Servers(tmp_path, conf=CONF + "registerNameServerPeriod=10000") as servers:
        (name_server,) = servers.name_servers
        async with Trial(servers.namesrv_addr, patient=True) as trial:
            name_server.kill()
            await trial.arrivals(80)
            assert not await is_sent(trial.producer, "Unknown")
            await name_server.start()  # the broker registers again within ten seconds
            async with asyncio.timeout(SECONDS):
                while not await is_sent(trial.producer, "Unknown"):
                    await asyncio.sleep(0.1)
            await trial.arrivals(40)
            await trial.settle()
        trial.judge(in_doubt_max=0)


@on_real_loop
async def test_one_of_two_name_servers_is_enough(tmp_path: Path) -> None:
    async with Servers(tmp_path, conf=CONF, name_servers=2) as servers:
        async with Trial(servers.namesrv_addr, patient=True) as trial:
            servers.name_servers[0].kill()
            await trial.arrivals(40)
            for number in range(4):  # a client starts with either of the two
                async with Producer("PG-new", servers.namesrv_addr, settings=PATIENT) as producer:
                    assert await is_sent(producer, f"New{number}")
            await trial.settle()
        trial.judge(in_doubt_max=0)


async def is_sent(producer: Producer, topic: str) -> bool:
    """Send to a topic that does not exist. Return whether there was a route."""
    try:
        await producer.send(Message(topic=topic, body=b"1"))
    except NoRoute:
        return False
    return True
