"""The proxy's remoting port: clients of the remoting protocol in front of brokers. Source: grpc.md §11."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager

import msgspec
import pytest

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import ProducerSettings, PushConsumerSettings, StartFrom
from rmqkit.errors import PeerRefused, SendFailed
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply, request
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import (
    ConsumerConnection,
    ConsumerData,
    ConsumerIds,
    HeartbeatData,
    LockBody,
    MessageQueue,
    ProducerConnection,
    ProducerData,
    SubscriptionData,
)
from rmqkit.protocol.schemas.topics import BrokerData, ClusterInfo, TopicRoute
from rmqkit.proxy.server.server import Proxy, ProxySettings
from rmqkit.proxy.service.clients import CALLS_MAX
from rmqkit.remoting.address import split_address
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.remoting.tls import ClientTls, ServerTls, ServerTlsSettings, Tls
from rmqkit.store.settings import StoreSettings
from tests.certificates import OPENSSL, REASON
from tests.client.peers import Cluster
from tests.waiting import until

NAMES = ("broker-a", "broker-b")
QUICK = PushConsumerSettings(take_over_pause_ms=400, start_from=StartFrom.FIRST_OFFSET)
BUSY, ERROR, OK = ResponseCode.SYSTEM_BUSY, ResponseCode.SYSTEM_ERROR, ResponseCode.SUCCESS


def settings(namesrv, **others):
    own = {"grpc_port": 0, "remoting_port": 0, "bind_address": "127.0.0.1"}
    return ProxySettings(namesrv_addr=namesrv, **own, **others)


@asynccontextmanager
async def proxied(root, **others):
    """A name server and two brokers with topic T of two queues each, and the address of a proxy in front of them."""
    async with asyncio.timeout(1000):
        namesrv = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1", kv_config_path=f"{root}/kv.json"))
        await namesrv.start()
        own = {"listen_port": 0, "bind_address": "127.0.0.1", "namesrv_addr": namesrv.address, **others}
        brokers = [
            Broker(BrokerSettings(broker_name=name, **own), StoreSettings(commit_log_file_bytes=1 << 20), root / name)
            for name in NAMES
        ]
        for broker in brokers:
            await broker.start()
            broker.context.topics.ensure("T", 2)
            await broker.context.topics_published()
        try:
            async with Proxy(settings(namesrv.address)) as proxy:
                yield proxy.remoting_address, brokers
        finally:
            for broker in brokers:
                await broker.stop()
            await namesrv.stop()


@asynccontextmanager
async def before(cluster):
    """A proxy in front of scripted peers: a client's connections, and the proxy's address."""
    cluster.topic("T")
    masters = {f"broker-{number}": broker.address for number, broker in enumerate(cluster.brokers)}
    info = ClusterInfo({name: BrokerData("TestCluster", name, {0: address}) for name, address in masters.items()})
    cluster.name_server.answer(
        RequestCode.GET_BROKER_CLUSTER_INFO, lambda command: reply(command, body=fastjson.dumps(info))
    )
    async with Proxy(settings(cluster.namesrv)) as proxy:
        remoting = RemotingClient()
        try:
            yield Asking(remoting, proxy.remoting_address)
        finally:
            await remoting.close()


class Asking:
    def __init__(self, remoting, address):
        self.remoting = remoting
        self.address = address

    async def __call__(self, code, body=b"", *, timeout_ms=1000_000.0, **fields):
        return await self.remoting.call(self.address, Command(code, fields=fields, body=body), timeout_ms)


def heartbeat(*topics, group="G", client="C", **others):
    wanted = [SubscriptionData(topic=topic) for topic in topics]
    consumers = [ConsumerData(group_name=group, subscription_data_set=wanted)] if topics else []
    data = HeartbeatData(clientID=client, consumerDataSet=consumers, producerDataSet=[ProducerData("P")], **others)
    return msgspec.json.encode(data)


# -- our clients, through it


async def test_messages_go_to_all_brokers_and_come_back(tmp_path):
    async with proxied(tmp_path) as (proxy, _), Producer("PG", proxy) as producer:
        sent = [await producer.send(Message(topic="T", body=b"%d" % number)) for number in range(20)]
        assert {one.queue.broker_name for one in sent} == set(NAMES)
        received = []
        consumer = PushConsumer("CG", proxy, settings=QUICK)

        @consumer.on("T")
        async def handle(message):
            if message.body == b"7" and not message.reconsume_times:
                raise ConsumeLater(delay_level=1)
            received.append(int(message.body))

        async with consumer:
            await until(lambda: len(received) >= 20, "all messages, one of them sent back")
        assert sorted(received) == list(range(20))
        async with PullConsumer("CG", proxy) as reader:
            done = [await reader.committed(queue) for queue in await reader.queues("T")]
            assert done == [await reader.max_offset(queue) for queue in await reader.queues("T")]
            assert sum(done) == 20


async def test_members_at_the_proxy_and_at_the_broker_share_queues(tmp_path):
    """Brokers know the consumers behind the proxy, so each queue has one owner."""
    async with proxied(tmp_path) as (proxy, brokers):
        direct = brokers[0].context.settings.namesrv_addr
        seen = defaultdict(list)
        members = [PushConsumer("CG", address, settings=QUICK) for address in (proxy, direct)]
        for member in members:
            member.subscribe("T", "*", lambda message, member=member: seen[member].append(message.body))
        async with members[0], members[1], Producer("PG", proxy) as producer:

            def shares():
                return [len([queue for queue in member.held_queues() if queue.topic == "T"]) for member in members]

            await until(lambda: shares() == [2, 2], "two queues each")
            for number in range(40):
                await producer.send(Message(topic="T", body=b"%d" % number))
            await until(lambda: sum(map(len, seen.values())) >= 40, "each message once")
            assert sorted(map(len, seen.values())) == [20, 20]


async def test_ordered_consumers_lock_their_queues(tmp_path):
    async with proxied(tmp_path) as (proxy, _), Producer("PG", proxy) as producer:
        for queue in await producer.queues("T"):
            for number in range(10):
                await producer.send(Message(topic="T", body=b"%d" % number), queue=queue)
        seen = defaultdict(list)
        consumer = PushConsumer("CG", proxy, settings=QUICK, ordered=True)

        @consumer.on("T")
        async def handle(message):
            seen[message.broker_name, message.queue_id].append(int(message.body))

        async with consumer:
            await until(lambda: sum(map(len, seen.values())) == 40, "all messages")
        assert list(seen.values()) == [list(range(10))] * 4


async def test_pop_consumers_receive_and_acknowledge(tmp_path):
    async with proxied(tmp_path) as (proxy, _), Producer("PG", proxy) as producer:
        for number in range(20):
            await producer.send(Message(topic="T", body=b"%d" % number))
        popped = []
        async with PopConsumer("CG", proxy, settings=QUICK) as consumer:
            while len(popped) < 20:
                messages = await consumer.pop("T", max_count=4, invisible_time=5, wait=1)
                await consumer.change_invisible_time(messages[0], 6)
                await consumer.ack(messages[0])
                await consumer.ack_many(messages[1:])
                popped += messages
            assert sorted(int(one.body) for one in popped) == list(range(20))
            await asyncio.sleep(15)
            assert not await consumer.pop("T", invisible_time=5)


async def test_a_half_message_is_asked_about_through_it(tmp_path):
    checked = []

    def check(message):
        checked.append(message.body)
        return TransactionState.COMMIT

    quick = {"transaction_timeout_ms": 100, "transaction_check_interval_ms": 100}
    async with proxied(tmp_path, **quick) as (proxy, _):
        producer = TransactionProducer(
            "PG", proxy, execute=lambda message, argument: TransactionState.UNKNOWN, check=check
        )
        async with producer, PullConsumer("CG", proxy) as reader:
            for number in range(4):
                await producer.send_in_transaction(Message(topic="T", body=b"%d" % number))

            async def visible():
                pulled = [await reader.pull(queue, 0) for queue in await reader.queues("T")]
                return [message.broker_name for one in pulled for message in one.messages]

            while len(seen := await visible()) < 4:
                await asyncio.sleep(1)
            assert set(seen) == set(NAMES)
        assert set(checked) == {b"0", b"1", b"2", b"3"}


async def test_a_broker_that_comes_back_knows_the_consumers_again(tmp_path):
    async with proxied(tmp_path) as (proxy, brokers):
        received = []
        consumer = PushConsumer("CG", proxy, settings=QUICK)
        consumer.subscribe("T", "*", lambda message: received.append(message.body))
        async with consumer, Producer("PG", proxy) as producer:
            await until(lambda: brokers[0].context.clients.consumers("CG"), "the group at the broker")
            root, own = brokers[0].context.store.root, brokers[0].context.settings
            await brokers[0].stop()
            own.listen_port = 0  # another one: the proxy has to ask where it is now
            brokers[0] = Broker(own, StoreSettings(commit_log_file_bytes=1 << 20), root)
            await brokers[0].start()
            queue = next(one for one in await producer.queues("T") if one.broker_name == NAMES[0])
            async with asyncio.timeout(60):
                while True:
                    try:
                        await producer.send(Message(topic="T", body=b"again"), queue=queue)
                        break
                    except (SendFailed, PeerRefused):
                        await asyncio.sleep(1)
            await until(lambda: b"again" in received, "the message")
            assert brokers[0].context.clients.consumers("CG")


# -- requests, one by one


async def test_a_route_has_the_proxys_address_for_every_broker():
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        told = await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T", acceptStandardJsonOnly="true")
        route = msgspec.json.decode(told.payload, type=TopicRoute)
        assert {data.broker_name: data.broker_addrs for data in route.broker_datas} == {
            "broker-0": {0: ask.address},
            "broker-1": {0: ask.address},
        }
        old = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": "T"}, version=395)
        dialect = (await ask.remoting.call(ask.address, old, 1000)).payload
        assert b'{0:"' in dialect
        assert fastjson.decode_as(dialect, TopicRoute) == route
        missing = await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="Nowhere")
        assert (missing.code, missing.remark) == (
            ResponseCode.TOPIC_NOT_EXIST,
            (
                "CODE: 17  DESC: No topic route info in name server for the topic: Nowhere\n"
                "For more information, please visit the url, https://rocketmq.apache.org/docs/bestPractice/06FAQ"
            ),
        )


async def test_a_request_goes_whole_to_the_broker_it_names():
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        answer = Command(OK, fields={"msgId": "id"}, body=b"answered", remark="said")
        cluster.brokers[1].answer(
            RequestCode.SEND_MESSAGE_V2, lambda command: msgspec.structs.replace(answer, opaque=command.opaque, flag=1)
        )
        await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        sent = Command(
            RequestCode.SEND_MESSAGE_V2, fields={"b": "T", "n": "broker-1", "x": "ü"}, body=b"body", language="GO"
        )
        told = await ask.remoting.call(ask.address, sent, 1000)
        assert (told.code, decode_fields(told), told.payload, told.remark) == (OK, {"msgId": "id"}, b"answered", "said")
        (arrived,) = cluster.brokers[1].requests
        assert (decode_fields(arrived), arrived.payload) == ({"b": "T", "n": "broker-1", "x": "ü"}, b"body")
        assert (arrived.language, arrived.version) == ("GO", sent.version)
        assert not cluster.brokers[0].requests


@pytest.mark.parametrize(
    "code", [RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET]
)
async def test_a_request_that_names_no_broker_is_refused_where_there_are_several(code):
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        told = await ask(code, topic="T", brokerName="broker-0")
        assert (told.code, told.remark) == (15, "Request doesn't have field bname")


async def test_a_request_that_names_no_broker_goes_to_the_only_one():
    """Clients of 4.x do not send the field."""
    async with Cluster() as cluster, before(cluster) as ask:
        assert (await ask(RequestCode.SEND_MESSAGE_V2, b="T", e="0")).code == OK


async def test_what_no_client_asks_is_not_passed_on():
    """Brokers would accept such a request, because it comes from their own machine."""
    async with Cluster() as cluster, before(cluster) as ask:
        for code in (
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            RequestCode.UPDATE_BROKER_CONFIG,
            RequestCode.AUTH_CREATE_USER,
            RequestCode.GET_CONSUMER_RUNNING_INFO,  # as at Apache's proxy: brokers relay it, and are asked themselves
        ):
            told = await ask(code, bname="broker-0", topic="X")
            assert (told.code, told.remark) == (3, f" request type {int(code)} not supported")
        assert not cluster.broker.requests


async def test_an_unknown_broker():
    async with Cluster() as cluster, before(cluster) as ask:
        told = [await ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId="0", bname="nobody") for _ in range(10)]
        assert {(one.code, one.remark) for one in told} == {(ERROR, "broker nobody is not known")}
        assert len(cluster.name_server.asked(RequestCode.GET_BROKER_CLUSTER_INFO)) == 1


async def test_a_broker_that_hangs_costs_its_callers_three_seconds_and_nobody_else_anything():
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        cluster.brokers[0].answer(RequestCode.SEND_MESSAGE_V2, lambda command: None)
        await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        loop = asyncio.get_running_loop()
        began = loop.time()
        late = asyncio.ensure_future(ask(RequestCode.SEND_MESSAGE_V2, b="T", n="broker-0"))
        assert (await ask(RequestCode.SEND_MESSAGE_V2, b="T", n="broker-1", e="0")).code == OK
        assert loop.time() - began < 1
        told = await late
        assert told.code == ERROR
        assert "3000 ms" in told.remark
        assert 3 <= loop.time() - began < 4
        assert (await ask(RequestCode.GET_MAX_OFFSET, topic="T", bname="broker-0")).remark == "not scripted"


async def test_a_held_pull_has_the_time_that_it_requests():
    async with Cluster() as cluster, before(cluster) as ask:
        await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        began = asyncio.get_running_loop().time()
        told = await ask(RequestCode.PULL_MESSAGE, topic="T", bname="broker-0", suspendTimeoutMillis="15000")
        assert told.code == ERROR
        assert 25 <= asyncio.get_running_loop().time() - began < 26


async def test_one_client_may_have_so_many_requests_under_way():
    async with Cluster() as cluster, before(cluster) as ask:
        await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        asked = [
            asyncio.ensure_future(ask(RequestCode.PULL_MESSAGE, topic="T", bname="broker-0"))
            for _ in range(CALLS_MAX + 3)
        ]
        codes = [(await one).code for one in asked]
        assert codes.count(BUSY) == 3
        assert len(cluster.broker.asked(RequestCode.PULL_MESSAGE)) == CALLS_MAX


async def test_a_heartbeat_goes_to_the_brokers_of_what_is_consumed_and_first_over_a_new_connection():
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        assert (await ask(RequestCode.HEART_BEAT, heartbeat())).code == OK
        assert not cluster.heartbeats, "no broker knows a producer without a route"
        assert (await ask(RequestCode.HEART_BEAT, heartbeat("T"))).code == OK
        assert len(cluster.heartbeats) == 2
        for broker in cluster.brokers:
            broker.connections[0].abort()
        await asyncio.sleep(1)  # the client notices it
        cluster.heartbeats.clear()
        assert (await ask(RequestCode.SEND_MESSAGE_V2, b="T", n="broker-1", e="0")).code == OK
        assert [command.code for command in cluster.brokers[1].requests][-2:] == [34, 310]
        assert [one.clientID for one in cluster.heartbeats] == ["C"]
        assert (await ask(RequestCode.UNREGISTER_CLIENT, clientID="C", consumerGroup="G")).code == OK
        assert all(broker.asked(RequestCode.UNREGISTER_CLIENT) for broker in cluster.brokers)


async def test_a_broker_without_the_subscriptions_gets_them():
    """5.x clients send a fingerprint when they think that brokers know the rest."""
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        for broker, changed in zip(cluster.brokers, ("false", "true"), strict=True):
            broker.answer(
                RequestCode.HEART_BEAT,
                lambda command, changed=changed: reply(
                    command, fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": changed}
                ),
            )
        told = await ask(RequestCode.HEART_BEAT, heartbeat("T"))
        assert decode_fields(told) == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}


async def test_members_are_those_of_all_brokers_that_answer():
    async with Cluster(brokers=3) as cluster, before(cluster) as ask:
        await ask(RequestCode.HEART_BEAT, heartbeat("T"))
        for broker, ids in zip(cluster.brokers, (["a", "b"], ["b", "c"], None), strict=True):
            body = msgspec.json.encode(ConsumerIds(ids or []))
            broker.answer(
                RequestCode.GET_CONSUMER_LIST_BY_GROUP,
                lambda command, ids=ids, body=body: None if ids is None else reply(command, body=body),
            )
        told = await ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="G")
        assert sorted(msgspec.json.decode(told.payload, type=ConsumerIds).consumer_id_list) == ["a", "b", "c"]


async def test_locks_go_to_the_broker_of_their_queues():
    async with Cluster(brokers=2) as cluster, before(cluster) as ask:
        await ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        for broker in cluster.brokers:
            broker.answer(RequestCode.LOCK_BATCH_MQ, reply)
        queues = [MessageQueue("T", name, 0) for name in ("broker-0", "broker-1")]
        one = msgspec.json.encode(LockBody(client_id="C", consumer_group="G", queues=queues[1:]))
        assert (await ask(RequestCode.LOCK_BATCH_MQ, one)).code == OK
        assert [command.payload for command in cluster.brokers[1].requests] == [one]
        both = msgspec.json.encode(LockBody(client_id="C", consumer_group="G", queues=queues))
        told = await ask(RequestCode.LOCK_BATCH_MQ, both)
        assert (told.code, told.remark) == (
            ERROR,
            "HeaderError: the body has to name queues of one broker, and names 2",
        )


async def test_what_brokers_ask_reaches_the_client_and_its_answer_them():
    told, asked = [], []

    def answer(connection, command):
        asked.append(command)
        return reply(command, body=b"running")

    async with Cluster() as cluster, before(cluster) as ask:
        router = Router()
        router.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, lambda _, command: told.append(command))
        router.register(RequestCode.GET_CONSUMER_RUNNING_INFO, answer)
        router.register(RequestCode.CONSUME_MESSAGE_DIRECTLY, lambda _, command: None)
        remoting = RemotingClient(router)
        await remoting.call(ask.address, Command(RequestCode.HEART_BEAT, body=heartbeat("T")), 1000)
        await ask(RequestCode.HEART_BEAT, heartbeat("T", client="other"))
        mine = cluster.broker.connections[0]
        running = request(RequestCode.GET_CONSUMER_RUNNING_INFO)
        running.fields = {"clientId": "C"}
        assert (await mine.call(running, 1000)).payload == b"running"
        assert decode_fields(asked[0]) == {"clientId": "C"}
        changed = request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, one_way=True)
        changed.fields = {"consumerGroup": "G"}
        mine.send(changed)
        await until(lambda: told, "the notice")
        assert decode_fields(told[0]) == {"consumerGroup": "G"}
        late = await mine.call(request(RequestCode.CONSUME_MESSAGE_DIRECTLY), 100_000)
        assert late.code == ERROR, late.remark
        assert "within 10000 ms" in late.remark
        refused = await mine.call(request(RequestCode.UPDATE_BROKER_CONFIG), 1000)
        assert refused.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        await remoting.close()
        await until(lambda: not mine.is_open, "brokers see that the client has gone")
        assert cluster.broker.connections[1].is_open, "the other client stays"


async def test_who_requests_consumers_without_being_one(tmp_path):
    async with proxied(tmp_path) as (proxy, _):
        consumer = PushConsumer("CG", proxy, settings=QUICK)
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            remoting = RemotingClient()
            asked = Command(RequestCode.GET_CONSUMER_CONNECTION_LIST, fields={"consumerGroup": "CG"})
            told = await remoting.call(proxy, asked, 1000)
            found = fastjson.decode_as(told.payload, ConsumerConnection)
            assert [one.client_id for one in found.connection_set] == [consumer.status().client_id]
            await remoting.close()


async def test_who_requests_producers_without_being_one(tmp_path):
    async with proxied(tmp_path) as (proxy, _):
        producer, asking = RemotingClient(), RemotingClient()
        body = msgspec.json.encode(HeartbeatData(clientID="C", producerDataSet=[ProducerData("PG")]))
        route = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": "TBW102"})
        assert (await producer.call(proxy, route, 3000)).code == OK  # the brokers it uses hear of it
        assert (await producer.call(proxy, request(RequestCode.HEART_BEAT, body=body), 3000)).code == OK
        asked = Command(RequestCode.GET_PRODUCER_CONNECTION_LIST, fields={"producerGroup": "PG"})
        told = await asking.call(proxy, asked, 3000)
        assert told.code == OK, told.remark
        found = fastjson.decode_as(told.payload, ProducerConnection)
        assert [one.client_id for one in found.connection_set] == ["C"]
        asked = Command(RequestCode.GET_CONSUMER_CONNECTION_LIST, fields={"consumerGroup": "nobody"})
        assert (await asking.call(proxy, asked, 3000)).code == ResponseCode.CONSUMER_NOT_ONLINE
        await producer.close()
        await asking.close()


async def test_no_remoting_port_where_none_is_wanted():
    async with Cluster() as cluster:
        own = ProxySettings(namesrv_addr=cluster.namesrv, grpc_port=0, remoting_port=-1, bind_address="127.0.0.1")
        async with Proxy(own) as proxy:
            assert proxy.remoting_address == ""


async def test_what_a_broker_refuses_is_reported_in_its_words():
    async with Cluster() as cluster, before(cluster) as ask:
        cluster.broker.answer(
            RequestCode.SEND_MESSAGE_V2, lambda command: reply(command, ResponseCode.NO_PERMISSION, "not here")
        )
        async with Producer("PG", ask.address, settings=ProducerSettings(retries=0)) as producer:
            with pytest.raises(SendFailed, match="code 16: not here"):
                await producer.send(Message(topic="T", body=b"x"))


@pytest.mark.real_time
@pytest.mark.skipif(OPENSSL is None, reason=REASON)
async def test_clients_may_encrypt_and_speak_grpc_at_the_same_port():
    """The remoting port accepts TLS and gRPC too. HTTP/2 begins with the server's settings."""
    async with Cluster() as cluster:
        cluster.topic("T")
        async with Proxy(settings(cluster.namesrv), tls=ServerTls(ServerTlsSettings())) as proxy:
            for tls in (None, ClientTls(Tls(verify=False))):
                remoting = RemotingClient(tls=tls)
                asked = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields={"topic": "T"})
                assert (await remoting.call(proxy.remoting_address, asked, 60_000)).code == OK
                await remoting.close()
            reader, writer = await asyncio.open_connection(*split_address(proxy.remoting_address))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            assert (await reader.readexactly(9))[3] == 4
            writer.close()
