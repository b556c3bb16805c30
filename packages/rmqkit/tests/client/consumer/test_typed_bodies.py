"""Handlers that take values of a type, against our own broker."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import pydantic
import pytest

from rmqkit import Reject, sync
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import Batching, ProducerSettings, PushConsumerSettings, StartFrom
from rmqkit.errors import MessageIllegal, SettingsError
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.standalone import Standalone
from tests.client.peers import standalone, until

QUICK = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET)
KINDS = {
    "push": lambda address: PushConsumer("CG", address, settings=QUICK),
    "ordered": lambda address: PushConsumer("CG", address, settings=QUICK, ordered=True),
    "pop": lambda address: PopConsumer("CG", address, settings=QUICK),
    "ordered pop": lambda address: PopConsumer("CG", address, settings=QUICK, ordered=True),
}


class Order(msgspec.Struct):
    id: int


class Bill(pydantic.BaseModel):
    id: int


@contextlib.asynccontextmanager
async def running(tmp_path, settings=None):
    async with (
        Standalone(tmp_path / "store") as cluster,
        Producer("PG", cluster.namesrv_address, settings=settings) as producer,
    ):
        yield cluster.namesrv_address, producer


async def dead_letters(address: str, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    reader = PushConsumer("reader", address, settings=QUICK)
    reader.on("%DLQ%CG")(found.append)
    async with reader:
        await until(lambda: len(found) >= count, f"{count} dead letters")
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_gets_values_and_what_does_not_fit_is_a_dead_letter_with_its_reason(kind, tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send(Message(topic="Orders", body=Order(1)))
        sent = await producer.send(Message(topic="Orders", body=b'{"id":"x"}', keys=["k"], properties={"a": "b"}))
        await producer.send(Message(topic="Orders", body=Bill(id=2)))
        got = []
        consumer = KINDS[kind](address)

        @consumer.on("Orders", body=Order)
        async def bill(order: Order) -> None:
            got.append(order)

        async with consumer:
            await until(lambda: len(got) == 2, "both orders")
            (letter,) = await dead_letters(address, 1)
        assert sorted(order.id for order in got) == [1, 2]
        assert letter.body == b'{"id":"x"}'
        assert letter.msg_id == sent.msg_id
        assert letter.keys == ["k"]
        assert letter.properties["a"] == "b"
        assert letter.properties["RETRY_TOPIC"] == "Orders"
        assert (
            letter.properties["rmqkit_reason"] == "the body is not a valid Order: Expected `int`, got `str` - at `$.id`"
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_the_others_of_a_batch_reach_the_handler(kind, tmp_path):
    async with running(tmp_path) as (address, producer):
        (queue, *_) = await producer.queues("Orders")
        for body in (b"1", b"x", b"2", b"y", b"3"):
            await producer.send(Message(topic="Orders", body=body), queue=queue)
        got, messages_got = [], []
        consumer = KINDS[kind](address)

        @consumer.on("Orders", body=int, batch_max=32)
        def bill(numbers: list[int], messages: list[ReceivedMessage]) -> None:
            got.extend(numbers)
            messages_got.extend(int(message.body) for message in messages)

        async with consumer:
            await until(lambda: len(got) == 3, "the three numbers")
            letters = await dead_letters(address, 2)
        assert got == messages_got == [1, 2, 3]
        assert sorted(letter.body for letter in letters) == [b"x", b"y"]


async def test_a_handler_with_two_parameters_gets_the_message_too(tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send(Message(topic="Orders", body=Bill(id=1), tags="new"))
        got = []
        consumer = PushConsumer("CG", address, settings=QUICK)

        @consumer.on("Orders", body=Bill)
        def bill(order: Bill, message: ReceivedMessage) -> None:
            got.append((order, message.tags))

        async with consumer:
            await until(lambda: got, "the bill")
        assert got == [(Bill(id=1), "new")]


async def test_every_kind_of_send_takes_values(tmp_path):
    async with running(tmp_path, ProducerSettings(batch=Batching(auto=True))) as (address, producer):
        await producer.send(Message(topic="Orders", body=Order(1)))
        await producer.send(Message(topic="Orders", body=Order(2)), timeout=5)
        await producer.send_batch([Message(topic="Orders", body=Order(3))])
        await producer.send_many([Message(topic="Orders", body=Order(4))])
        await producer.send_one_way(Message(topic="Orders", body=Order(5)))
        got = []
        consumer = PushConsumer("CG", address, settings=QUICK)
        consumer.subscribe("Orders", handler=lambda order: got.append(order.id), body=Order)
        async with consumer:
            await until(lambda: len(got) == 5, "five orders")
        assert sorted(got) == [1, 2, 3, 4, 5]


async def test_a_value_is_compressed_as_bytes_are(tmp_path):
    async with running(tmp_path, ProducerSettings(batch=Batching(auto=True))) as (address, producer):
        note = Note("x" * 10_000)
        await producer.send_many([Message(topic="Notes", body=note)])
        await producer.send(Message(topic="Notes", body=note))
        got = []
        consumer = PushConsumer("CG", address, settings=QUICK)
        consumer.subscribe("Notes", handler=lambda value, message: got.append((value, message.store_size)), body=Note)
        async with consumer:
            await until(lambda: len(got) == 2, "both notes")
        assert all(value == note and size < 1000 for value, size in got)


class Note(msgspec.Struct):
    text: str


async def test_a_handler_may_give_a_reason_itself(tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send(Message(topic="Orders", body=b"17"))
        consumer = PushConsumer("CG", address, settings=QUICK)

        @consumer.on("Orders")
        async def bill(message: ReceivedMessage) -> None:
            raise Reject("no customer\x01 of that name\n" + "x" * 2000)

        async with consumer:
            (letter,) = await dead_letters(address, 1)
        reason = letter.properties["rmqkit_reason"]
        assert reason.startswith("no customer  of that name x")
        assert len(reason) == 1000


async def test_a_dead_letter_whose_properties_are_full_goes_without_the_reason(tmp_path):
    async with running(tmp_path) as (address, producer):
        await producer.send(Message(topic="Orders", body=b"x", properties={"a": "x" * 32_500}))
        consumer = PushConsumer("CG", address, settings=QUICK)
        consumer.on("Orders", body=int)(lambda number: None)
        async with consumer:
            (letter,) = await dead_letters(address, 1)
        assert letter.body == b"x"
        assert "rmqkit_reason" not in letter.properties


async def test_values_that_are_no_bodies_are_refused(tmp_path):
    async with running(tmp_path) as (_, producer):
        with pytest.raises(MessageIllegal, match="body of a message for topic T is dict: it must be bytes, a msgspec"):
            await producer.send(Message(topic="T", body={"id": 1}))


def test_subscriptions_that_cannot_be_are_refused():
    consumer = PushConsumer("CG", "127.0.0.1:1")
    with pytest.raises(SettingsError, match="of topic T has no handler"):
        consumer.subscribe("T", body=Order)
    with pytest.raises(SettingsError, match=r"subscription to topic T: body .* cannot be read from JSON"):
        consumer.on("T", body=str | bytes)(print)


def test_the_blocking_consumer_takes_types_too(tmp_path):
    got: list[Order] = []
    with standalone(tmp_path) as address, sync.Producer("PG", address) as producer:
        producer.send(Message(topic="Orders", body=Order(7)))
        consumer = sync.PushConsumer("CG", address, settings=QUICK)
        arrived = threading.Event()

        @consumer.on("Orders", body=Order)
        def bill(order: Order) -> None:
            got.append(order)
            arrived.set()

        with consumer:
            assert arrived.wait(100)
    assert got == [Order(7)]
