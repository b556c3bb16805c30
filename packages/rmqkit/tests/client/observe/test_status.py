"""The status of consumers and producers as text. Source: behaviour.md §7.5."""

from __future__ import annotations

import asyncio

from rmqkit.client.observe.status import BrokerStatus, MemberStatus, ProducerStatus, QueueState, QueueStatus
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import SendFailed
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster, refused


def test_a_consumer_is_a_table():
    status = MemberStatus(
        group="CG",
        client_id="10.0.0.1@7",
        state="started",
        queues=[
            QueueStatus(
                queue=MessageQueue("Orders", "broker-a", 0),
                state=QueueState.BUSY,
                reason="the handler works on message 7F01 at offset 40 since 2023-11-14T22:13:20Z",
                since_ms=1_700_000_000_000,
                is_stalled=True,
                consumed_offset=40,
                pulled_offset=72,
                max_offset=500,
                held_messages=32,
                held_bytes=3200,
            ),
            QueueStatus(queue=MessageQueue("Orders", "broker-a", 11), state=QueueState.WAITING_FOR_LOCK),
        ],
        missing_topics=["Refunds"],
    )
    assert str(status).splitlines() == [
        "consumer of group CG, client 10.0.0.1@7: started, 2 queues, backlog 460, 1 stand still; no queues of Refunds",
        "topic   broker    queue  consumed  pulled  max  held  bytes  since                 state",
        (
            "Orders  broker-a  0      40        72      500  32    3200   2023-11-14T22:13:20Z  busy: the handler "
            "works on message 7F01 at offset 40 since 2023-11-14T22:13:20Z"
        ),
        "Orders  broker-a  11     -         -       -    0     0      1970-01-01T00:00:00Z  waiting for lock",
    ]
    assert status.backlog == 460
    assert [one.queue.queue_id for one in status.stalled] == [0]


def test_a_producer_is_a_table():
    broker = BrokerStatus(
        name="broker-a",
        broker_id=0,
        address="192.0.2.1:10911",
        is_connected=False,
        avoided_ms=1500.4,
        is_reachable=False,
    )
    status = ProducerStatus(
        group="PG",
        client_id="10.0.0.1@7",
        state="started",
        name_servers=["a:9876", "b:9876"],
        brokers=[broker],
        sends_under_way=2,
        bytes_under_way=300,
    )
    assert str(status).splitlines() == [
        "producer of group PG, client 10.0.0.1@7: started, 2 sends (300 bytes) under way, name servers a:9876, b:9876",
        "broker    id  address          connection           avoided for",
        "broker-a  0   192.0.2.1:10911  none, not reachable  1500 ms",
    ]


async def test_a_broker_that_failed_is_avoided_for_a_while():
    settings = ProducerSettings(avoid_slow_brokers=True, retries=0)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.SEND_MESSAGE_V2, refused(14, "going down"))
        try:
            await producer.send(Message(topic="T", body=b"x"))
        except SendFailed:
            (broker,) = producer.status().brokers
        assert 0 < broker.avoided_ms <= 10_000
        assert (broker.is_connected, broker.is_reachable) == (True, False)


async def test_a_producer_reports_brokers_connections_and_what_is_under_way(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        assert producer.status().brokers == []
        await producer.send(Message(topic="T", body=b"x"))
        sending = asyncio.create_task(producer.send(Message(topic="T", body=b"12345")))
        await asyncio.sleep(0)
        status = producer.status()
        assert (status.state, status.sends_under_way, status.bytes_under_way) == ("started", 1, 5)
        (broker,) = status.brokers
        assert (broker.address, broker.broker_id) == (cluster.broker_address, 0)
        assert (broker.is_connected, broker.is_reachable, broker.avoided_ms) == (True, True, 0.0)
        width = max(len(broker.name), len("broker"))
        assert str(status).splitlines()[1:] == [
            f"{'broker'.ljust(width)}  id  {'address'.ljust(len(broker.address))}  connection  avoided for",
            f"{broker.name.ljust(width)}  0   {broker.address}  open        0 ms",
        ]
        await sending
        assert producer.status().bytes_under_way == 0
