"""Namespaces and the VIP channel. Source: remoting.md §3.1, §3.2, §4.2, §9.4."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.group import offsets_of
from rmqkit.client.consumer.offsets import LocalOffsetStore
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.namespace import VIP_CODES, vip_address
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import (
    ClientSettings,
    MessageModel,
    ProducerSettings,
    PullConsumerSettings,
    PushConsumerSettings,
    StartFrom,
)
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, reply, request
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import (
    ConsumerRunningInfo,
    LockBody,
    LockedQueues,
    MessageQueue,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.offsets import (
    ConsumerStatus,
    ConsumerStatusRequest,
    ResetClientOffsetRequest,
    ResetOffsetBody,
)
from rmqkit.protocol.schemas.send import CheckTransactionRequest
from rmqkit.protocol.schemas.topics import BrokerData, QueueData, TopicRoute
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.server import RemotingServer
from rmqkit.standalone import Standalone
from tests.client.messages import record
from tests.client.peers import Cluster, Peer, pulled, until
from tests.client.pops import PopCluster
from tests.ports import free_port

NS = "NS"
FIRST = StartFrom.FIRST_OFFSET
SENDING = ProducerSettings(namespace=NS)
PUSHING = PushConsumerSettings(namespace=NS, start_from=FIRST, take_over_pause_ms=0)


async def test_messages_of_two_namespaces_do_not_meet_and_programs_see_bare_names(tmp_path):
    async with Standalone(tmp_path / "store") as cluster:
        namesrv, seen, everything = cluster.namesrv_address, {}, asyncio.Event()

        def consumer(namespace, **options):
            made = PushConsumer(
                "CG", namesrv, settings=PushConsumerSettings(namespace=namespace, start_from=FIRST), **options
            )

            @made.on("T")
            async def note(message):
                seen.setdefault(namespace, []).append((message.topic, message.body, message.reconsume_times))
                if not message.reconsume_times:
                    raise ConsumeLater(1)
                if len(seen) == 2 and all(len(some) == 2 for some in seen.values()):
                    everything.set()

            return made

        for namespace in ("A", "B"):
            async with Producer("PG", namesrv, settings=ProducerSettings(namespace=namespace)) as producer:
                sent = await producer.send(Message(topic="T", body=namespace.encode()))
                assert sent.queue.topic == "T"
                assert {queue.topic for queue in await producer.queues("T")} == {"T"}
        async with consumer("A") as a, consumer("B"):
            await everything.wait()
            assert {queue.topic for queue in a.held_queues()} == {"T", "%RETRY%CG"}
        assert seen == {name: [("T", name.encode(), times) for times in (0, 1)] for name in ("A", "B")}
        async with PullConsumer("CG", namesrv) as reader:
            assert await reader.queues("A%T")
            assert await reader.queues("%RETRY%A%CG")


async def test_a_pull_consumer_reads_and_commits_in_its_namespace(tmp_path):
    settings = PullConsumerSettings(namespace=NS, start_from=FIRST)
    async with Standalone(tmp_path / "store") as cluster:
        namesrv = cluster.namesrv_address
        async with Producer("PG", namesrv, settings=SENDING) as producer:
            sent = await producer.send(Message(topic="T", body=b"1", keys=["k"]))
        async with PullConsumer("CG", namesrv, settings=settings) as consumer:
            (message,) = (await consumer.pull(sent.queue, 0)).messages
            assert message.topic == "T"
            assert [one.topic for one in await consumer.query_messages("T", "k")] == ["T"]
            await consumer.commit(sent.queue, 1)
            assert await consumer.committed(sent.queue) == 1
            consumer.subscribe("T")
            await until(lambda: len(consumer.held_queues()) == 4, "all queues")
        async with PullConsumer("NS%CG", namesrv) as plain:
            assert await plain.committed(MessageQueue("NS%T", sent.queue.broker_name, sent.queue.queue_id)) == 1


async def test_ordered_consumption_locks_the_queues_of_its_namespace():
    async with Cluster() as cluster:
        cluster.topic("NS%T", queues=1)
        cluster.broker.answer(
            RequestCode.LOCK_BATCH_MQ,
            lambda command: reply(
                command, body=msgspec.json.encode(LockedQueues(msgspec.json.decode(command.body, type=LockBody).queues))
            ),
        )
        cluster.broker.answer(RequestCode.UNLOCK_BATCH_MQ, reply)
        consumer = PushConsumer("CG", cluster.namesrv, settings=PUSHING, ordered=True)
        consumer.subscribe("T", handler=print)
        async with consumer:
            await until(lambda: consumer.held_queues() == {MessageQueue("T", "broker-0", 0)}, "the queue of T")
        bodies = [one.body for one in cluster.broker.requests if one.code == RequestCode.LOCK_BATCH_MQ]
        asked = msgspec.json.decode(bodies[0], type=LockBody)
        assert (asked.consumer_group, asked.queues) == ("NS%CG", [MessageQueue("NS%T", "broker-0", 0)])


async def test_heartbeats_and_headers_have_the_full_names():
    async with Cluster() as cluster:
        cluster.topic("NS%T", queues=1)
        consumer = PushConsumer("CG", cluster.namesrv, settings=PUSHING)
        consumer.subscribe("T", handler=print)
        async with consumer, Producer("PG", cluster.namesrv, settings=SENDING) as producer:
            await producer.send(Message(topic="T", body=b"1"))
            await until(lambda: cluster.broker.asked(RequestCode.PULL_MESSAGE), "a pull")
        (data,) = next(one.consumerDataSet for one in cluster.heartbeats if one.consumerDataSet)
        assert data.group_name == "NS%CG"
        assert {one.topic for one in data.subscription_data_set} == {"NS%T", "%RETRY%NS%CG"}
        (sent,) = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert (sent["a"], sent["b"], sent["c"]) == ("NS%PG", "NS%T", "TBW102")
        asked = cluster.broker.asked(RequestCode.PULL_MESSAGE)[0]
        assert (asked["consumerGroup"], asked["topic"]) == ("NS%CG", "NS%T")
        left = cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)
        assert {"NS%CG", "NS%PG"} <= {one.get("consumerGroup") or one.get("producerGroup") for one in left}


async def test_what_brokers_ask_of_a_namespace_reaches_its_consumer():
    async with Cluster() as cluster:
        cluster.topic("NS%T", queues=1)
        cluster.broker.answer(
            RequestCode.PULL_MESSAGE,
            lambda command: (
                pulled(command, ResponseCode.SUCCESS, 1, record(0, topic="NS%T"))
                if decode_fields(command)["queueOffset"] == "0"
                else None
            ),
        )
        seen = []
        consumer = PushConsumer("CG", cluster.namesrv, settings=PUSHING)

        @consumer.on("T")
        async def note(message):
            seen.append(message.topic)

        full = MessageQueue("NS%T", "broker-0", 0)
        async with consumer:
            await until(lambda: seen, "a message")
            (connection, *_) = cluster.broker.connections
            asked = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest("NS%CG", "client"))
            info = fastjson.decode_as((await connection.call(asked, 60_000)).payload, ConsumerRunningInfo)
            assert full in info.mq_table
            assert {one.topic for one in info.subscription_set} == {"NS%T", "%RETRY%NS%CG"}
            assert info.status_table.keys() == {"NS%T"}
            consumer.pause()
            info = fastjson.decode_as((await connection.call(asked, 60_000)).payload, ConsumerRunningInfo)
            assert "NS%T broker-0 0" in info.user_consumer_info
            consumer.resume()
            asked = request(
                RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ConsumerStatusRequest(topic="NS%T", group="NS%CG")
            )
            status = fastjson.decode_as((await connection.call(asked, 60_000)).payload, ConsumerStatus)
            assert full in status.message_queue_table
            header = ResetClientOffsetRequest(topic="NS%T", group="NS%CG", timestamp=0, is_force=True)
            body = fastjson.dumps(ResetOffsetBody({full: 0}))
            connection.send(request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body, one_way=True))
            await until(lambda: len(seen) == 2, "the message again")
        assert seen == ["T", "T"]


async def test_what_is_popped_is_reported_with_its_namespace():
    async with PopCluster() as cluster:
        cluster.topic("NS%T", queues=1)
        consumer = PopConsumer("CG", cluster.namesrv, settings=PUSHING)
        consumer.subscribe("T", handler=print)
        async with consumer:
            await until(consumer.held_queues, "the queues")
            asked = request(RequestCode.GET_CONSUMER_RUNNING_INFO, RunningInfoRequest("NS%CG", "client"))
            (connection, *_) = cluster.broker.connections
            info = fastjson.decode_as((await connection.call(asked, 60_000)).payload, ConsumerRunningInfo)
        assert info.mq_pop_table.keys() == {MessageQueue("NS%T", "broker-0", -1)}


async def test_a_check_back_reaches_the_producer_of_its_namespace():
    async with Cluster() as cluster:
        cluster.topic("NS%T", queues=1)
        ended = []
        cluster.broker.answer(RequestCode.END_TRANSACTION, lambda command: ended.append(decode_fields(command)))
        checked = []

        async def execute(message, argument):
            return TransactionState.UNKNOWN

        async def check(message):
            checked.append(message.topic)
            return TransactionState.COMMIT

        async with TransactionProducer(
            "PG", cluster.namesrv, execute=execute, check=check, settings=SENDING
        ) as producer:
            await producer.send_in_transaction(Message(topic="T", body=b"1"))
            assert "PGROUP\x01NS%PG" in cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)[0]["i"]
            header = CheckTransactionRequest(tran_state_table_offset=0, commit_log_offset=0, bname="broker-0")
            half = record(0, topic="NS%T", PGROUP="NS%PG")
            (connection, *_) = cluster.broker.connections
            connection.send(request(RequestCode.CHECK_TRANSACTION_STATE, header, half, one_way=True))
            await until(lambda: len(ended) == 2, "the end that follows from the check")
        assert checked == ["T"]
        assert [one["producerGroup"] for one in ended] == ["NS%PG", "NS%PG"]


async def test_requests_are_replied_to_within_a_namespace(tmp_path):
    async with Standalone(tmp_path / "store") as cluster:
        namesrv = cluster.namesrv_address
        consumer = PushConsumer("CG", namesrv, settings=PUSHING)
        async with Producer("PG", namesrv, settings=SENDING) as producer:

            @consumer.on("T")
            async def answer(message):
                if message.body == b"question":
                    await producer.reply(message, b"answer to " + message.body)

            await producer.send(Message(topic="T", body=b"makes the topic"))
            async with consumer:
                reply = await producer.request(Message(topic="T", body=b"question"), timeout=20)
        assert reply.body == b"answer to question"


def test_offsets_of_broadcasting_are_kept_by_namespace():
    async def path(namespace):
        runtime = ClientRuntime("127.0.0.1:9876", settings=ClientSettings(namespace=namespace))
        offsets = offsets_of(runtime, "CG", PushConsumerSettings(message_model=MessageModel.BROADCASTING))
        assert isinstance(offsets, LocalOffsetStore)
        return offsets.path.parent.name

    assert [asyncio.run(path(namespace)) for namespace in ("", "A")] == ["CG", "A%CG"]


async def test_the_other_kind_of_namespace_is_a_field_of_every_request():
    async with Cluster() as cluster:
        cluster.topic("T")
        settings = ProducerSettings(namespace_v2="NS2", auth=Credentials(access_key="key", secret_key="secret"))
        async with Producer("PG", cluster.namesrv, settings=settings) as producer:
            await producer.send(Message(topic="T", body=b"1"))
        (sent,) = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        (asked, *_) = cluster.name_server.asked(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        assert (sent["nsd"], sent["ns"], sent["b"]) == ("true", "NS2", "T")
        assert (asked["nsd"], asked["ns"]) == ("true", "NS2")
        assert "Signature" in sent, "the fields are there when the request is signed"


class PairOfPorts(Peer):
    """A broker that listens at a port and two below it; ``vip`` has what came to the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.vip = Peer()

    async def start(self) -> None:
        port = free_port(-2)
        for peer, at in ((self, port), (self.vip, port - 2)):
            server: RemotingServer = peer._server
            await server.listen("127.0.0.1", at)
            peer.address = f"127.0.0.1:{at}"

    async def stop(self) -> None:
        await super().stop()
        await self.vip.stop()


@pytest.mark.parametrize("is_on", [False, True])
async def test_sends_and_offsets_go_to_the_vip_port_if_wanted_and_pulls_never(is_on):
    cluster = Cluster()
    pair = PairOfPorts()
    pair._answers = pair.vip._answers = cluster.brokers[0]._answers
    cluster.brokers[0] = pair
    async with cluster:
        cluster.routes["T"] = TopicRoute(
            queue_datas=[QueueData("broker-0", 1, 1, 6)],
            broker_datas=[BrokerData("TestCluster", "broker-0", {0: pair.address})],
        )
        consumer = PushConsumer("CG", cluster.namesrv, settings=PushConsumerSettings(vip_channel=is_on))
        consumer.subscribe("T", handler=print)
        async with (
            consumer,
            Producer("PG", cluster.namesrv, settings=ProducerSettings(vip_channel=is_on)) as producer,
        ):
            await producer.send(Message(topic="T", body=b"1"))
            await until(lambda: pair.asked(RequestCode.PULL_MESSAGE), "a pull")
        at_vip = {command.code for command in pair.vip.requests}
        assert bool(at_vip & {RequestCode.SEND_MESSAGE_V2}) == is_on
        assert at_vip <= VIP_CODES
        assert {RequestCode.HEART_BEAT, RequestCode.PULL_MESSAGE, RequestCode.UNREGISTER_CLIENT} <= {
            command.code for command in pair.requests
        }


def test_the_vip_port_is_two_below():
    assert [vip_address("127.0.0.1:10911"), vip_address("[::1]:10911")] == ["127.0.0.1:10909", "[::1]:10909"]


def test_a_client_without_these_settings_does_not_come_by_here():
    async def kind(**settings):
        runtime = ClientRuntime("127.0.0.1:9876", settings=ClientSettings(**settings))
        return type(runtime.remoting).__name__

    assert asyncio.run(kind()) == "RemotingClient"
    assert asyncio.run(kind(namespace="N")) == asyncio.run(kind(vip_channel=True)) == "NamespaceClient"
