"""One connection for all clients of a program."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import rmqkit
from rmqkit import ClientError, ClientSettings, Hook, NoRoute, PushConsumerSettings, SettingsError, StartFrom
from rmqkit.errors import TimeIllegal
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster, until

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0)


class Counting(Hook):
    def __init__(self) -> None:
        self.sent: list[str] = []

    def sending(self, sending):
        self.sent.append(sending.group)


async def test_all_kinds_of_clients_work_over_one_connection(tmp_path):
    seen: list[tuple[str, bytes]] = []
    counting = Counting()
    async with Standalone(tmp_path / "store") as servers:
        async with rmqkit.connect(servers.namesrv_address, wait_ready=30, hooks=[counting]) as mq:
            consumer, popping = mq.consumer("billing", settings=FIRST), mq.pop_consumer("couriers", settings=FIRST)
            consumer.subscribe("Orders", handler=lambda message: seen.append(("billing", message.body)))
            popping.subscribe("Orders", handler=lambda message: seen.append(("couriers", message.body)))
            shop = mq.transaction_producer("bank", execute=lambda *_: rmqkit.TransactionState.COMMIT, check=print)
            async with mq.producer("shop") as producer, shop, consumer, popping:
                await producer.send("Orders", b"17")
                await shop.send_in_transaction(rmqkit.Message(topic="Orders", body=b"18"))
                await until(lambda: len(seen) == 4, "both groups have both messages")
                async with mq.pull_consumer("audit") as reader:
                    (queue,) = [one for one in await reader.queues("Orders") if await reader.max_offset(one) > 0][:1]
                    assert (await reader.pull(queue, 0)).messages
                groups = [servers.broker.context.clients.consumers(group) for group in ("billing", "couriers")]
                assert groups[0].members.keys() == groups[1].members.keys(), "one connection for both"
            await mq.ping()
        assert sorted(seen) == sorted((group, body) for group in ("billing", "couriers") for body in (b"17", b"18"))
        assert {"shop", "bank"} <= set(counting.sent)


async def test_what_is_still_open_closes_with_it_consumers_first():
    closed: list[str] = []
    async with Cluster() as cluster:
        cluster.topic("T")
        async with rmqkit.connect(cluster.namesrv) as mq:
            producer, consumer = mq.producer("PG"), mq.consumer("CG")
            consumer.subscribe("T", handler=print)
            for client in (producer, consumer):
                await client.start()
            tasks = [
                asyncio.create_task(one.wait_closed(), name=name) for one, name in ((producer, "p"), (consumer, "c"))
            ]
            for task in tasks:
                task.add_done_callback(lambda task: closed.append(task.get_name()))
        assert producer.is_closed and consumer.is_closed
        await asyncio.gather(*tasks)
        assert closed == ["c", "p"]


async def test_clients_are_made_before_it_is_open_and_started_after():
    async with Cluster() as cluster:
        mq = rmqkit.connect([cluster.namesrv])
        producer, consumer = mq.producer("G"), mq.consumer("G")
        consumer.subscribe("T", handler=print)
        for too_early in (mq.ping, producer.start, consumer.start, lambda: producer.send("T", b"1")):
            with pytest.raises(ClientError, match=r"is not (open|started)"):
                await too_early()
        cluster.topic("T")
        async with mq, producer, consumer:
            assert (await producer.send("T", b"1")).status.name == "SEND_OK"


async def test_a_closed_one_makes_no_clients():
    async with Cluster() as cluster:
        mq = rmqkit.connect([cluster.namesrv])
        async with mq:
            producer = mq.producer("G")
        for use in (lambda: mq.producer("G"), lambda: mq.consumer("G"), lambda: mq.read("T")):
            with pytest.raises(ClientError, match=r"the connection is closed: make a new one"):
                use()
        with pytest.raises(ClientError, match="the connection is closed"):
            await mq.ping()
        with pytest.raises(ClientError, match="is closed already"):
            await producer.start()


async def test_a_wrong_address_and_wrong_settings_are_named():
    with pytest.raises(NoRoute, match="no name server answered"):
        async with rmqkit.connect("127.0.0.1:1"):
            pytest.fail("nobody is there")
    for arguments in ({"name_servers": "here"}, {"wait_ready": -1}, {"settings": ClientSettings(api_timeout_ms=0)}):
        with pytest.raises((SettingsError, TimeIllegal)):
            rmqkit.connect(**arguments)


@pytest.mark.real_time
async def test_run_starts_and_closes_the_clients_made_here():
    async with Cluster() as cluster:
        cluster.topic("T")
        async with rmqkit.connect(cluster.namesrv) as mq:
            producer, consumer = mq.producer("PG"), mq.consumer("CG")
            consumer.subscribe("T", handler=print)
            running = asyncio.create_task(mq.run())
            await until(lambda: cluster.heartbeats and consumer.held_queues(), "it runs")
            os.kill(os.getpid(), signal.SIGTERM)
            await running
        assert producer.is_closed and consumer.is_closed
