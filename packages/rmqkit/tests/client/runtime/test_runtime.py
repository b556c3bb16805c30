"""One client instance: name servers, routes, heartbeats. Source: behaviour.md §7.1, §7.2; remoting.md §9.1–9.3."""

from __future__ import annotations

import asyncio
import os
import re

import pytest

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.errors import ClientError, NoRoute, PeerRefused
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, reply, request
from rmqkit.protocol.schemas.clients import ConsumerData, ConsumerGroupRequest
from tests.client.peers import Cluster, Peer, refused, until

ROUTE, LIST = RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
QUICK = ClientSettings(route_interval_ms=20, heartbeat_interval_ms=20)


class Group:
    """A consumer as the runtime sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rebalances = 0

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(group_name=self.name)

    def rebalance_soon(self) -> None:
        self.rebalances += 1


def test_the_client_id_has_address_process_and_a_number_of_its_own():
    ids = [ClientRuntime("a:1").client_id for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(re.fullmatch(rf"[0-9a-f.:]+@{os.getpid()}#\d{{19}}", client_id) for client_id in ids)


def test_parts_of_the_client_id_can_be_chosen():
    settings = ClientSettings(client_ip="192.0.2.7", instance_name="one", unit_name="east")
    assert ClientRuntime("a:1", settings=settings).client_id == "192.0.2.7@one@east"


def test_name_servers_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert ClientRuntime().name_servers == ["127.0.0.1:9876"]
    monkeypatch.setenv("NAMESRV_ADDR", "a:1")
    assert ClientRuntime().name_servers == ["a:1"]


async def test_the_next_name_server_is_asked_when_one_does_not_answer_and_then_kept():
    async with Cluster() as cluster:
        cluster.topic("T")
        gone = Peer()
        await gone.start()
        await gone.stop()
        runtime = ClientRuntime(f"{gone.address};{cluster.namesrv}")
        for _ in range(3):
            assert await runtime.routes.refresh("T")
        await runtime.close()
        assert len(cluster.name_server.asked(ROUTE)) == 3


async def test_when_none_answers_all_are_named():
    peers = [Peer(), Peer()]
    for peer in peers:
        await peer.start()
        await peer.stop()
    runtime = ClientRuntime(";".join(peer.address for peer in peers))
    with pytest.raises(NoRoute) as caught:
        await runtime.routes.refresh("T")
    await runtime.close()
    assert all(peer.address in str(caught.value) for peer in peers)
    assert str(caught.value).startswith("no name server answered, check the addresses: cannot connect to ")


@pytest.mark.parametrize("body", [b"", b"?", b"[]", b'{"brokerDatas":7}'])
async def test_an_answer_that_is_no_route_is_a_refusal_that_says_so(body):
    async with Cluster() as cluster:
        cluster.name_server.answer(ROUTE, lambda command: reply(command, body=body))
        runtime = ClientRuntime(cluster.namesrv)
        with pytest.raises(PeerRefused, match="the route of topic T"):
            await runtime.routes.publish_queues("T", "TBW102", 4)
        await runtime.close()


async def test_a_changed_route_is_noticed_and_consumers_are_notified():
    async with Cluster() as cluster:
        cluster.topic("T", queues=2)
        runtime = ClientRuntime(cluster.namesrv, settings=QUICK)
        group = Group("G")
        runtime.register_consumer("G", group)
        runtime.routes.watch("T", "G")
        await runtime.start()
        await until(lambda: len(runtime.routes.subscribe_queues("T")) == 2, "two queues")
        told = group.rebalances
        cluster.topic("T", queues=3)
        await until(lambda: len(runtime.routes.subscribe_queues("T")) == 3, "three queues")
        assert group.rebalances > told
        told, asked = group.rebalances, len(cluster.name_server.asked(ROUTE))
        await until(lambda: len(cluster.name_server.asked(ROUTE)) >= asked + 3, "more refreshes")
        assert group.rebalances == told, "an equal route is no change"
        await runtime.close()


async def test_a_route_once_known_is_kept_when_the_name_server_has_it_no_more():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        assert await runtime.routes.refresh("T")
        del cluster.routes["T"]
        assert await runtime.routes.refresh("T")
        cluster.name_server.answer(ROUTE, refused(1, "broken"))
        await runtime.routes.refresh_all()
        assert len(runtime.routes.subscribe_queues("T")) == 4
        await runtime.close()


async def test_a_kept_route_of_a_deleted_topic_does_not_hide_where_a_broker_is_now():
    async with Cluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv)
        for topic in ("T", "Deleted"):
            cluster.topic(topic)
            await runtime.routes.refresh(topic)
        del cluster.routes["Deleted"]
        cluster.routes["T"].broker_datas[0].broker_addrs[0] = "127.0.0.1:1"
        await runtime.routes.refresh_all()
        assert runtime.routes.address("broker-0") == "127.0.0.1:1"
        await runtime.close()


async def test_a_template_in_use_is_refreshed_as_long_as_the_topic_does_not_exist():
    async with Cluster() as cluster:
        cluster.topic("TBW102", queues=8, perm=7)
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.routes.publish_queues("New", "TBW102", 4)
        cluster.routes["TBW102"].broker_datas[0].broker_addrs[0] = "127.0.0.1:1"
        assert not await runtime.routes.refresh("New")
        assert runtime.routes.address("broker-0") == "127.0.0.1:1"
        cluster.routes.clear()
        assert not await runtime.routes.refresh("New")
        assert len((await runtime.routes.publish_queues("New", "TBW102", 4)).queues) == 4
        await runtime.close()


async def test_the_real_route_replaces_the_template_and_only_then_can_be_read():
    async with Cluster() as cluster:
        cluster.topic("TBW102", queues=8, perm=7)
        runtime = ClientRuntime(cluster.namesrv)
        publish = await runtime.routes.publish_queues("New", "TBW102", 4)
        assert len(publish.queues) == 4
        assert runtime.routes.subscribe_queues("New") == []
        cluster.topic("New", queues=2)
        assert await runtime.routes.refresh("New")
        assert len(runtime.routes.subscribe_queues("New")) == 2
        known = runtime.routes.known_publish_queues("New")
        assert known is not None
        assert len(known.queues) == 2
        await runtime.close()


async def test_a_topic_without_writable_queues_has_no_publish_queues():
    async with Cluster() as cluster:
        cluster.topic("T", perm=4)
        runtime = ClientRuntime(cluster.namesrv)
        with pytest.raises(NoRoute, match="no broker accepts messages for topic T"):
            await runtime.routes.publish_queues("T", "TBW102", 4)
        await runtime.close()


async def test_heartbeats_name_all_groups_and_are_repeated():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv, settings=QUICK)
        runtime.register_producer("PG")
        runtime.register_consumer("CG", Group("CG"))
        runtime.routes.watch("T", "G")
        await runtime.start()
        await until(lambda: len(cluster.heartbeats) >= 3, "three heartbeats")
        await runtime.close()
        heartbeat = cluster.heartbeats[-1]
        assert heartbeat.clientID == runtime.client_id
        assert [data.group_name for data in heartbeat.producerDataSet] == ["PG"]
        assert [data.group_name for data in heartbeat.consumerDataSet] == ["CG"]


async def test_a_group_is_left_after_the_heartbeats_under_way_even_those_nobody_waits_for():
    async with Cluster() as cluster:
        cluster.topic("T")
        held: list[Command] = []
        cluster.broker.answer(RequestCode.HEART_BEAT, held.append)
        runtime = ClientRuntime(cluster.namesrv)
        runtime.register_consumer("CG", Group("CG"))
        await runtime.routes.refresh("T")
        beating = asyncio.create_task(runtime.heartbeat())
        await until(lambda: held, "the heartbeat")
        beating.cancel()
        leaving = asyncio.create_task(runtime.unregister_consumer("CG"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert cluster.broker.asked(RequestCode.UNREGISTER_CLIENT) == []
        cluster.broker.connections[0].send(reply(held[0]))
        await leaving
        assert len(cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)) == 1
        await runtime.close()


async def test_slaves_get_heartbeats_only_from_consumers():
    async with Cluster(2) as cluster:
        cluster.topic("T")
        master, slave = cluster.brokers
        route = cluster.routes["T"]
        route.broker_datas = route.broker_datas[:1]
        route.queue_datas = route.queue_datas[:1]
        route.broker_datas[0].broker_addrs = {0: master.address, 1: slave.address}
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.routes.refresh("T")
        runtime.register_producer("PG")
        await runtime.heartbeat()
        assert (len(master.requests), len(slave.requests)) == (1, 0)
        runtime.register_consumer("CG", Group("CG"))
        await runtime.heartbeat()
        assert (len(master.requests), len(slave.requests)) == (2, 1)
        await runtime.close()


async def test_a_lost_connection_is_followed_by_a_heartbeat():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        runtime.register_consumer("CG", Group("CG"))
        runtime.routes.watch("T", "G")
        await runtime.start()
        await until(lambda: cluster.heartbeats, "the first heartbeat")
        beats = len(cluster.heartbeats)
        cluster.broker.connections[0].abort()
        await until(lambda: len(cluster.heartbeats) > beats, "a heartbeat over a new connection")
        assert len(cluster.broker.connections) == 2
        await runtime.close()


async def test_a_notice_of_changed_members_reaches_its_group_only():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        ours, other = Group("ours"), Group("other")
        runtime.register_consumer("ours", ours)
        runtime.register_consumer("other", other)
        await runtime.routes.refresh("T")
        await runtime.heartbeat()
        ours.rebalances = other.rebalances = 0
        for group in ("ours", "unknown"):
            notice = request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ConsumerGroupRequest(group), one_way=True)
            cluster.broker.connections[0].send(notice)
        await until(lambda: ours.rebalances, "the notice arrives")
        assert (ours.rebalances, other.rebalances) == (1, 0)
        await runtime.close()


async def test_a_group_exists_once_in_an_instance():
    runtime = ClientRuntime("127.0.0.1:1")
    runtime.register_producer("G")
    runtime.register_consumer("G", Group("G"))
    with pytest.raises(ClientError, match=r"producer group G exists in client .*: choose another group"):
        runtime.register_producer("G")
    with pytest.raises(ClientError, match=r"consumer group G exists in client .*: choose another group"):
        runtime.register_consumer("G", Group("G"))
    await runtime.close()


async def test_a_broker_that_left_the_routes_is_let_go():
    async with Cluster(2) as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv, settings=QUICK)
        runtime.register_producer("PG")
        runtime.routes.watch("T", "G")
        await runtime.start()
        gone = cluster.brokers[1]
        await until(lambda: gone.connections, "both brokers are connected")
        route = cluster.routes["T"]
        route.broker_datas, route.queue_datas = route.broker_datas[:1], route.queue_datas[:1]
        await until(lambda: not gone.connections[-1].is_open, "the connection is closed")
        await runtime.close()


async def test_each_question_goes_once_to_every_name_server_however_many_are_asked_at_a_time():
    async with Cluster() as cluster:
        cluster.name_server.answer(LIST, lambda command: reply(command, body=b'{"topicList":["T"]}'))
        gone = Peer()
        await gone.start()
        await gone.stop()
        runtime = ClientRuntime(f"{gone.address};{cluster.namesrv}")
        runtime.routes._name_servers._chosen = 0
        assert await asyncio.gather(*(runtime.routes.topics() for _ in range(4))) == [["T"]] * 4
        await runtime.close()


async def test_a_topic_is_looked_for_until_the_last_one_who_wants_it_does_not():
    async with Cluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv, settings=QUICK)
        await runtime.start()
        consumers = [PushConsumer(group, runtime=runtime) for group in ("G1", "G2")]
        for consumer in consumers:
            consumer.subscribe("T", handler=print)
            await consumer.start()
        await consumers[0].close()
        cluster.topic("T", queues=1)
        await until(consumers[1].held_queues, "the queue of a topic that was made later")
        await consumers[1].close()
        await runtime.close()
