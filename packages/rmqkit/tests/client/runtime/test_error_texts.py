"""Every misuse and failure has its class; ten texts as examples say what, where, and what to do next."""

from __future__ import annotations

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, PullConsumerSettings
from rmqkit.errors import (
    REMEDIES,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    NoRoute,
    PeerRefused,
    RequestTimedOut,
    SendFailed,
    SettingsError,
)
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.client.messages import received
from tests.client.peers import Cluster, offset, refused

SEND, PULL = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE
QUEUE = MessageQueue("T", "broker-0", 0)
ELSEWHERE = MessageQueue("T", "broker-9", 0)
X = Message(topic="T", body=b"x")
ONE_TRY = ProducerSettings(retries=0)
LOOK = "check whether it runs and can be reached"
LOOK_THERE = "check whether it runs and registers with these name servers"


def producer(name_servers="127.0.0.1:1", **options):
    return Producer(options.pop("group", "PG"), name_servers, **options)


def ordered(topic, handler):
    PushConsumer("CG", "127.0.0.1:1", ordered=True).subscribe(topic, "*", handler)


def subscribe(*arguments, **options):
    PushConsumer("CG", "127.0.0.1:1").subscribe(*arguments, **options)


def subscribe_and_assign(first, second):
    consumer = PullConsumer("CG", "127.0.0.1:1")
    for what in (first, second):
        consumer.subscribe("T") if what == "subscribe" else consumer.assign([QUEUE])


@pytest.mark.parametrize(
    "make",
    [
        lambda: producer(group=""),
        lambda: producer(group="a b"),
        lambda: producer(group="DEFAULT_PRODUCER"),
        lambda: producer(runtime=ClientRuntime("127.0.0.1:1")),
        lambda: subscribe("a b"),
        lambda: subscribe("T", " || "),
        lambda: subscribe("T", print),
        lambda: subscribe("T", "*", print, batch_max=0),
        lambda: ordered("T", None),
    ],
)
def test_settings_that_cannot_be(make):
    with pytest.raises(SettingsError):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: producer("here"),
            "name servers 'here': address 'here' must be host:port, for example 127.0.0.1:9876",
        ),
        (
            lambda: producer(settings=ProducerSettings(retries=101)),
            "retries (retryTimesWhenSendFailed) is 101: it must be at least -1 and at most 100",
        ),
    ],
)
def test_a_setting_s_error_names_it_and_what_it_may_be(make, text):
    with pytest.raises(SettingsError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize("order", [("subscribe", "assign"), ("assign", "subscribe")])
def test_subscribing_and_assigning(order):
    with pytest.raises(ClientError, match="mutually exclusive"):
        subscribe_and_assign(*order)


async def test_what_was_not_started_or_is_closed():
    said = []
    async with Cluster() as cluster:
        one, consumer = producer(cluster.namesrv), PullConsumer("CG", cluster.namesrv)
        await failing(said, one.send(X))
        await failing(said, consumer.poll())
        async with one, consumer:
            await failing(said, one.start())
            await failing(said, consumer.poll())
        await failing(said, one.send(X))
        await failing(said, one.start())
    assert len(said) == 6
    assert said[0] == "producer of group PG is not started: use it inside 'async with' or call start()"
    assert said[-1] == "producer of group PG is closed already: make a new one"


async def failing(said, work, kind=ClientError):
    """Append what an attempt fails with."""
    with pytest.raises(kind) as caught:
        await work
    said.append(str(caught.value))
    return caught.value


async def test_a_group_that_exists_in_the_instance():
    said = []
    async with Cluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.start()
        async with Producer("PG", runtime=runtime):
            await failing(said, Producer("PG", runtime=runtime).start())
        await runtime.close()
        assert said == [f"producer group PG exists in client {runtime.client_id}: choose another group"]


async def test_routes():
    said = []
    await failing(said, producer().start(), NoRoute)
    await failing(said, PullConsumer("CG", "127.0.0.1:1").start(), NoRoute)
    nobody = f"no name server answered, check the addresses: cannot connect to 127.0.0.1:1: Connection refused; {LOOK}"
    assert said == [nobody, nobody]
    said.clear()
    async with Cluster() as cluster, producer(cluster.namesrv) as one, PullConsumer("CG", cluster.namesrv) as reader:
        await failing(said, one.send(X), NoRoute)
        await failing(said, reader.queues("T"), NoRoute)
        assert said == [
            (
                f"no broker accepts messages for topic T, asked name servers {cluster.namesrv}: create the topic, or "
                "start a broker with autoCreateTopicEnable=true"
            ),
            "no broker lets topic T be read: create it, or send a message to it first",
        ]


async def test_refused_sends():
    said = []
    async with Cluster() as cluster, producer(cluster.namesrv, settings=ONE_TRY) as one:
        cluster.topic("T")
        for code in (ResponseCode.NO_PERMISSION, ResponseCode.SYSTEM_BUSY, ResponseCode.TOPIC_NOT_EXIST):
            cluster.broker.answer(SEND, refused(code, "topic[T] not exist, apply first please!"))
            error = await failing(said, one.send(X), SendFailed)
            assert isinstance(error.cause, PeerRefused)
            assert error.cause.code == code
        address = cluster.broker.address
    assert said[-1] == (
        f"message for topic T not stored after 1 try on broker-0: {address} answered with code 17: "
        "topic[T] not exist, apply first please!; create the topic"
    )


async def test_refused_reads():
    said = []
    async with Cluster() as cluster, PullConsumer("CG", cluster.namesrv) as reader:
        cluster.topic("T")
        await reader.queues("T")
        cluster.broker.answer(PULL, refused(26, "subscription group [CG] does not exist"))
        await failing(said, reader.pull(QUEUE, 0), PeerRefused)
        cluster.broker.answer(RequestCode.GET_MIN_OFFSET, lambda command: offset(command, 3))
        cluster.broker.answer(RequestCode.GET_MAX_OFFSET, lambda command: offset(command, 9))
        await failing(said, reader.seek(QUEUE, 10))
        await failing(said, reader.seek(QUEUE, 9))
        await failing(said, reader.pull(ELSEWHERE, 0), ConnectFailed)
        address = cluster.broker.address
    assert len(said) == 4
    assert said[1] == (
        f"Seek offset illegal, seek offset = 10, min offset = 3, max offset = 9 in {QUEUE}: seek between them"
    )
    assert said[3] == f"cannot connect to broker-9: no route of topic T names a broker of that name; {LOOK_THERE}"
    assert address in said[0]


async def test_brokers_that_do_not_answer():
    said = []
    async with Cluster() as cluster, producer(cluster.namesrv, settings=ONE_TRY) as one:
        cluster.topic("T")
        broker = cluster.broker
        broker.answer(SEND, lambda command: None)
        error = await failing(said, one.send(X, timeout=1), SendFailed)
        assert isinstance(error.cause, RequestTimedOut)

        def hang_up(command):
            broker.connections[-1].abort()

        broker.answer(SEND, hang_up)
        error = await failing(said, one.send(X), SendFailed)
        assert isinstance(error.cause, ConnectionLost)
        await failing(said, one.send(X, queue=ELSEWHERE), SendFailed)
        await broker.stop()
        error = await failing(said, one.send(X), SendFailed)
        assert isinstance(error.cause, ConnectFailed)
        address = broker.address
    assert address in said[0]
    assert "it may have executed the request" in said[0]
    assert "it may have executed the request" in said[1]
    assert said[3] == (
        f"message for topic T not stored after 1 try on broker-0: cannot connect to {address}: "
        f"Connection refused; {LOOK}"
    )


async def test_choices_that_cannot_be():
    said = []
    async with Cluster() as cluster, producer(cluster.namesrv) as one:
        cluster.topic("T")
        await failing(said, one.send(X, selector=lambda queues, message: None))
        await failing(said, one.send(X, queue=MessageQueue("U", "broker-0", 0)))
        await failing(said, one.reply(received(0), b"x"))
        await failing(said, one.recall("x"))
        shop = TransactionProducer("TG", cluster.namesrv, execute=print, check=print)
        async with shop:
            await failing(said, shop.send_in_transaction(Message(topic="T", body=b"x", delay_level=1)))
    assert len(said) == 5
    assert said[3] == "recall handle 'x' is not base64url of UTF-8 text: pass the recall_handle of a SendResult"


async def test_a_name_that_nobody_knows_and_a_request_without_reply():
    said = []
    async with Cluster() as cluster, producer(cluster.namesrv) as one:
        cluster.topic("T")
        await failing(said, one.request(X, timeout=3))
        settings = PullConsumerSettings(api_timeout_ms=5000)
        await failing(said, PullConsumer("CG", "no-such-host.invalid:9876", settings=settings).start())
    assert said[0] == (
        "the request for topic T was stored, and no reply came within 3000 ms: does a consumer of the topic reply?"
    )
    where = "no name server answered, check the addresses: cannot connect to no-such-host.invalid:9876: "
    assert said[1].startswith(where)
    assert said[1].endswith(f"; {LOOK}")


def test_remedies_are_for_codes_that_exist():
    assert {ResponseCode(code).value for code in REMEDIES} == REMEDIES.keys()
