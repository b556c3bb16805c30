"""`start` and servers that do not answer, or answer a moment later."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import pytest

from rmqkit import (
    ClientError,
    NoRoute,
    PopConsumer,
    Producer,
    PullConsumer,
    PushConsumer,
    TransactionProducer,
)
from rmqkit.errors import TimeIllegal
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.schemas.topics import BrokerData, ClusterInfo
from tests.client.peers import Cluster, Peer, refused
from tests.ports import HOST, free_port


def known(command, **brokers):
    """The answer of a name server that knows some brokers."""
    return msgspec.structs.replace(reply(command), body=msgspec.json.encode(ClusterInfo(brokers)))


def transactions(group, name_servers, **options):
    return TransactionProducer(group, name_servers, execute=print, check=print, **options)


def pushing(group, name_servers, **options):
    consumer = PushConsumer(group, name_servers, **options)
    consumer.subscribe("T", handler=print)
    return consumer


@pytest.mark.parametrize("kind", [Producer, transactions, PullConsumer, pushing, PopConsumer])
async def test_a_wrong_address_is_named_when_a_client_starts(kind):
    client = kind("G", "127.0.0.1:1")
    with pytest.raises(NoRoute, match=r"no name server answered, .*: cannot connect to 127\.0\.0\.1:1"):
        await client.start()
    assert client.is_closed


async def test_a_client_starts_when_its_servers_are_there():
    """The name server starts after 3 s, and a broker registers after 6 s more."""
    loop, peer, port = asyncio.get_running_loop(), Peer(), free_port()
    tables = [{}, {}]

    def brokers(command):
        return known(command, **(tables.pop(0) if tables else {"a": BrokerData("c", "a", {0: "127.0.0.1:2"})}))

    peer.answer(RequestCode.GET_BROKER_CLUSTER_INFO, brokers)
    producer = Producer("G", f"{HOST}:{port}", wait_ready=timedelta(seconds=30))
    begun = loop.time()
    starting = asyncio.create_task(producer.start())
    await asyncio.sleep(3)
    assert not starting.done()
    await peer.start(port)
    await starting
    assert not tables and 3 < loop.time() - begun < 30
    await producer.close()
    await peer.stop()


async def test_a_client_waits_no_longer_than_it_may():
    async with Cluster() as cluster:
        cluster.name_server.answer(RequestCode.GET_BROKER_CLUSTER_INFO, known)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match=r"name servers 127.0.0.1:\d+ know no broker: start one"):
            await Producer("G", cluster.namesrv, wait_ready=20).start()
        assert 20 <= asyncio.get_running_loop().time() - begun < 21
        async with Producer("G", cluster.namesrv):
            pass  # without waiting, a name server is enough


async def test_a_name_server_that_may_not_name_brokers_is_enough():
    async with Cluster() as cluster:
        cluster.name_server.answer(
            RequestCode.GET_BROKER_CLUSTER_INFO, refused(ResponseCode.NO_PERMISSION, "no rights")
        )
        async with Producer("G", cluster.namesrv, wait_ready=20):
            pass


async def test_a_ping_asks_each_time():
    async with Cluster() as cluster, Producer("G", cluster.namesrv) as producer:
        cluster.topic("T")
        await producer.queues("T")
        await producer.ping()
        await cluster.name_server.stop()
        with pytest.raises(NoRoute, match="no name server answered"):
            await producer.ping()
    with pytest.raises(ClientError, match="is closed"):
        await producer.ping()


@pytest.mark.parametrize("wait", [-1, "30", float("inf")])
def test_a_time_to_wait_that_is_none_is_refused(wait):
    with pytest.raises(TimeIllegal, match="wait_ready is "):
        Producer("G", "127.0.0.1:1", wait_ready=wait)
