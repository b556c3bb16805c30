"""FastStream applications over our own broker, with FastStream's own release."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faststream import AckPolicy, Context, FastStream, TestApp
from faststream.exceptions import (
    FeatureNotSupportedException,
    IncorrectState,
    NackMessage,
    RejectMessage,
    SetupError,
    StopConsume,
    SubscriberNotFound,
)
from faststream.middlewares import BaseMiddleware
from faststream.specification import AsyncAPI
from pydantic import BaseModel, ValidationError

from rmqkit import sync
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.errors import ReplyTimedOut
from rmqkit.faststream import RocketBroker, RocketMessage, RocketResponse, RocketRouter, TestRocketBroker
from rmqkit.faststream.annotations import Producer as ProducerOfBroker
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.standalone import Standalone
from tests.client.peers import standalone, until

QUICK = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET)
SECONDS_MAX = 200


class Order(BaseModel):
    id: int


class Bill(BaseModel):
    order: int
    amount: float = 1.0


@contextlib.asynccontextmanager
async def cluster(tmp_path):
    async with Standalone(tmp_path / "store") as running:
        yield running.namesrv_address


def broker_at(address: str, **options) -> RocketBroker:
    return RocketBroker(address, consumer_settings=QUICK, logger=None, **options)


async def stored(address: str, topic: str, count: int = 1) -> list[ReceivedMessage]:
    """Messages of a topic, read by a group of the test's own."""
    found: list[ReceivedMessage] = []
    reader = PushConsumer("reader", address, settings=QUICK)
    reader.on(topic)(found.append)
    async with reader:
        await until(lambda: len(found) >= count, f"{count} messages of {topic}")
    return found


# -- over our own broker


async def test_a_handler_gets_a_model_and_what_it_returns_is_published(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)
        shipped = []

        @broker.subscriber("Orders", group="billing")
        @broker.publisher("Bills", tags="new", headers={"from": "billing"})
        async def bill(order: Order, message: RocketMessage) -> Bill:
            assert (message.raw_message.topic, message.headers["shop"]) == ("Orders", "17")
            return Bill(order=order.id)

        @broker.subscriber("Bills", "new", group="shipping")
        async def ship(bill: Bill, message: RocketMessage) -> None:
            shipped.append((bill, message.headers["from"], message.raw_message.tags, message.correlation_id))

        async with broker:
            await broker.start()
            await broker.publish(Order(id=17), "Orders", headers={"shop": "17"}, correlation_id="cid")
            await until(lambda: shipped, "the bill")
        assert shipped == [(Bill(order=17), "billing", "new", "cid")]


async def test_what_other_clients_send_is_read_as_json(tmp_path):
    async with cluster(tmp_path) as address:
        broker, got = broker_at(address), []

        @broker.subscriber("Orders")
        async def bill(order: Order) -> None:
            got.append(order)

        async with broker, Producer("PG", address) as producer:
            await broker.start()
            await producer.send(Message(topic="Orders", body=b'{"id": 17}'))
            await until(lambda: got, "the order")
        assert got == [Order(id=17)]


OUTCOMES = {
    "raises": (ValueError("no stock"), "ValueError: no stock"),
    "does not fit": (None, "ValidationError: 1 validation error for bill"),
    "rejects": (RejectMessage(), "its handler gave it up without a reason"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_rejected_message_is_a_dead_letter_with_the_reason(outcome, tmp_path):
    error, reason = OUTCOMES[outcome]
    async with cluster(tmp_path) as address:
        broker = broker_at(address, ack_policy=AckPolicy.REJECT_ON_ERROR)

        @broker.subscriber("Orders", group="billing")
        async def bill(order: Order) -> None:
            raise error

        async with broker:
            await broker.start()
            await broker.publish({"id": "x"} if error is None else {"id": 1}, "Orders")
            (letter,) = await stored(address, "%DLQ%billing")
        assert letter.properties["rmqkit_reason"].startswith(reason)
        assert letter.properties["rmqkit_handler"] == "bill"


FAILURES = {
    "the broker's policy": (None, ValueError("no stock")),
    "its own policy": (AckPolicy.NACK_ON_ERROR, ValueError("no stock")),
    "an exception that says so": (AckPolicy.ACK, NackMessage(delay_level=1)),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_message_whose_handler_fails_is_redelivered(failure, tmp_path):
    policy, error = FAILURES[failure]
    async with cluster(tmp_path) as address:
        broker, tries = broker_at(address), []
        options = {} if policy is None else {"ack_policy": policy}

        @broker.subscriber("Orders", group="billing", **options)
        async def bill(order: Order, message: RocketMessage) -> None:
            tries.append(message.raw_message.reconsume_times)
            if len(tries) == 1:
                raise error

        async with broker:
            await broker.start()
            await broker.publish({"id": 1}, "Orders")
            await until(lambda: len(tries) == 2, "the second try")
        assert tries == [0, 1]


async def test_with_ack_a_message_whose_handler_fails_is_consumed(tmp_path):
    async with cluster(tmp_path) as address:
        broker, tries = broker_at(address), []

        @broker.subscriber("Orders", group="billing", ack_policy=AckPolicy.ACK)
        async def bill(order: Order) -> None:
            tries.append(order.id)
            raise ValueError("no stock")

        async with broker:
            await broker.start()
            (queue, *_) = await broker.producer.queues("Orders")
            for number in range(3):
                await broker.producer.send(Message(topic="Orders", body=b'{"id":%d}' % number), queue=queue)
            await until(lambda: len(tries) == 3, "three tries")
            await retries_would_have_come()
        assert sorted(tries) == [0, 1, 2]


async def retries_would_have_come() -> None:
    """Let the virtual time pass in which a failed message would be redelivered."""
    await asyncio.sleep(60)


MANUAL = {
    "acknowledges": (lambda message: message.ack(), 1),
    "has it again": (lambda message: message.nack(delay_level=1), 2),
    "does not say": (lambda message: asyncio.sleep(0), 2),
}


@pytest.mark.parametrize("way", MANUAL)
async def test_a_handler_may_say_itself_what_becomes_of_a_message(way, tmp_path):
    act, tries_wanted = MANUAL[way]
    async with cluster(tmp_path) as address:
        broker, tries = broker_at(address), []

        @broker.subscriber("Orders", group="billing", ack_policy=AckPolicy.MANUAL)
        async def bill(order: Order, message: RocketMessage) -> None:
            tries.append(order.id)
            if len(tries) == 1:
                await act(message)
            else:
                await message.ack()

        async with broker:
            await broker.start()
            await broker.publish({"id": 1}, "Orders")
            await until(lambda: len(tries) == tries_wanted, "the tries")
            await retries_would_have_come()
        assert len(tries) == tries_wanted


async def test_a_message_may_be_rejected_with_a_reason(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)

        @broker.subscriber("Orders", group="billing")
        async def bill(order: Order, message: RocketMessage) -> None:
            await message.reject("no such customer")
            await message.ack()  # the first that is said counts

        async with broker:
            await broker.start()
            await broker.publish({"id": 1}, "Orders")
            (letter,) = await stored(address, "%DLQ%billing")
        assert letter.properties["rmqkit_reason"] == "no such customer"


async def test_batches_groups_that_pop_and_ordered_ones(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)
        several, popped, in_order = [], [], []

        @broker.subscriber("Orders", group="several", batch_max=10)
        async def batch(orders: list[Order], message: RocketMessage) -> None:
            several.append([order.id for order in orders])
            assert [one.topic for one in message.raw_message] == ["Orders"] * len(orders)

        @broker.subscriber("Orders", group="poppers", pop=True)
        async def pop(order: Order) -> None:
            popped.append(order.id)

        @broker.subscriber("Orders", group="ordered", ordered=True)
        async def ordered(order: Order) -> None:
            in_order.append(order.id)

        async with broker:
            results = await broker.publish_batch(*(Order(id=i) for i in range(20)), topic="Orders", sharding_key="17")
            assert len({result.queue for result in results}) == 1
            await broker.start()
            await until(lambda: len(popped) == len(in_order) == sum(map(len, several)) == 20, "all of them")
        assert in_order == list(range(20))
        assert sorted(popped) == list(range(20))
        # Batches of one queue are handled side by side: in order within each, and no batch before another.
        assert [sorted(numbers) for numbers in several] == several
        assert sorted(number for numbers in several for number in numbers) == list(range(20))
        assert max(map(len, several)) > 1


async def test_one_group_may_have_several_subscribers(tmp_path):
    async with cluster(tmp_path) as address:
        broker, got = broker_at(address), []

        @broker.subscriber("Orders", group="office")
        async def orders(order: Order) -> None:
            got.append(("Orders", order.id))

        @broker.subscriber("Bills", group="office")
        async def bills(bill: Bill) -> None:
            got.append(("Bills", bill.order))

        async with broker:
            await broker.start()
            await broker.publish(Order(id=1), "Orders")
            await broker.publish(Bill(order=2), "Bills")
            await until(lambda: len(got) == 2, "one of each")
        assert sorted(got) == [("Bills", 2), ("Orders", 1)]


async def test_subscribers_of_a_group_have_equal_options(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)
        broker.subscriber("Orders", group="office")(print)
        broker.subscriber("Bills", group="office", ordered=True)(print)
        with pytest.raises(SetupError, match="subscribers of group office have different options"):
            await broker.start()
        await broker.stop()


async def test_a_request_gets_what_the_handler_returns(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)
        prices = broker.publisher("Prices")

        @broker.subscriber("Prices")
        async def price(fruit: str) -> dict[str, int] | None:
            return {"apples": 3}.get(fruit) and {"price": 3}

        async with broker:
            await broker.start()
            reply = await broker.request("apples", "Prices", timeout=60)
            assert (await reply.decode(), reply.content_type) == ({"price": 3}, "application/json")
            assert await (await prices.request("apples", timeout=60)).decode() == {"price": 3}
            assert await (await broker.request("plums", "Prices", timeout=60)).decode() is None
            with pytest.raises(ReplyTimedOut):
                await broker.request("apples", "Nobody", timeout=1)


async def test_answers_may_go_to_a_topic(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)

        @broker.subscriber("Prices")
        async def price(fruit: str) -> RocketResponse:
            return RocketResponse({"price": 3}, keys=[fruit], headers={"desk": "2"})

        async with broker:
            await broker.start()
            await broker.publish("apples", "Prices", reply_to="Answers")
            (answer,) = await stored(address, "Answers")
        assert (json.loads(answer.body), answer.keys, answer.properties["desk"]) == ({"price": 3}, ["apples"], "2")


async def test_routers_have_prefixes_and_middlewares_see_both_ways(tmp_path):
    seen = []

    class Watch(BaseMiddleware):
        async def consume_scope(self, call_next, msg):
            seen.append(("consume", msg.raw_message.topic))
            return await call_next(msg)

        async def publish_scope(self, call_next, cmd):
            seen.append(("publish", cmd.destination))
            return await call_next(cmd)

    router = RocketRouter(prefix="shop_", group="shop")

    @router.subscriber("Orders")
    @router.publisher("Bills")
    async def bill(order: Order) -> Bill:
        return Bill(order=order.id)

    async with cluster(tmp_path) as address:
        broker = broker_at(address, middlewares=[Watch])
        broker.include_router(router)
        async with broker:
            await broker.start()
            await broker.publish(Order(id=1), "shop_Orders")
            (stored_bill,) = await stored(address, "shop_Bills")
        assert json.loads(stored_bill.body) == {"order": 1, "amount": 1.0}
        assert seen == [("publish", "shop_Orders"), ("consume", "shop_Orders"), ("publish", "shop_Bills")]


async def test_handlers_may_have_the_producer_and_anything_of_the_context(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)

        @broker.subscriber("Orders")
        async def bill(order: Order, producer: ProducerOfBroker, shop: str = Context()) -> None:
            await producer.send(Message(topic="Bills", body=shop.encode()))

        broker.context.set_global("shop", "corner")
        async with broker:
            await broker.start()
            await broker.publish(Order(id=1), "Orders")
            (found,) = await stored(address, "Bills")
        assert found.body == b"corner"


async def test_a_handler_may_end_its_subscriber(tmp_path):
    async with cluster(tmp_path) as address:
        broker, got = broker_at(address), []

        @broker.subscriber("Orders", group="billing")
        async def bill(order: Order) -> None:
            got.append(order.id)
            raise StopConsume

        async with broker:
            await broker.start()
            await broker.publish(Order(id=1), "Orders")
            await until(lambda: not broker.subscribers[0].running, "the subscriber's end")
        assert got == [1]


async def test_a_broker_that_stops_waits_for_its_handlers(tmp_path):
    async with cluster(tmp_path) as address:
        broker, begun, gate, ended = broker_at(address), asyncio.Event(), asyncio.Event(), []

        @broker.subscriber("Orders")
        @broker.publisher("Bills")
        async def bill(order: Order) -> Bill:
            begun.set()
            await gate.wait()
            ended.append(order.id)
            return Bill(order=order.id)

        await broker.start()
        await broker.publish(Order(id=1), "Orders")
        await begun.wait()
        stopping = asyncio.create_task(broker.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping
        assert ended == [1]
        assert len(await stored(address, "Bills")) == 1


async def test_ping_reports_whether_a_name_server_answers(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)
        assert not await broker.ping(1)
        await broker.start()
        assert await broker.ping(5)
    assert not await broker.ping(1)
    await broker.stop()


async def test_what_rocketmq_cannot_do_is_refused():
    broker = broker_at("127.0.0.1:1")
    with pytest.raises(SetupError, match="acknowledges when a handler has ended"):
        broker.subscriber("Orders", ack_policy=AckPolicy.ACK_FIRST)
    with pytest.raises(IncorrectState, match="RocketBroker is not connected"):
        await broker.publish("x", "Orders")
    subscriber = broker.subscriber("Orders")
    with pytest.raises(FeatureNotSupportedException):
        await subscriber.get_one()
    with pytest.raises(FeatureNotSupportedException):
        async for _ in subscriber:
            pass


# -- without a broker


async def test_handlers_are_tested_without_a_broker():
    broker = RocketBroker()

    @broker.subscriber("Orders", group="billing")
    @broker.publisher("Bills")
    async def bill(order: Order) -> Bill:
        return Bill(order=order.id)

    @broker.subscriber("Bills", group="shipping", batch_max=10)
    async def ship(bills: list[Bill]) -> None: ...

    @broker.subscriber("Prices")
    async def price(fruit: str) -> int:
        return len(fruit)

    async with TestRocketBroker(broker) as br:
        sent = await br.publish({"id": 17}, "Orders")
        assert sent.queue.topic == "Orders"
        bill.mock.assert_called_once_with({"id": 17})
        ship.mock.assert_called_once_with([{"order": 17, "amount": 1.0}])
        await br.publish_batch({"order": 1}, {"order": 2}, topic="Bills")
        ship.mock.assert_called_with([{"order": 1}, {"order": 2}])
        assert await (await br.request("plums", "Prices")).decode() == 5
        with pytest.raises(ValidationError):
            await br.publish({"id": "x"}, "Orders")
        with pytest.raises(SubscriberNotFound):
            await br.request("x", "Nowhere")
    with pytest.raises(IncorrectState):
        await broker.publish("x", "Orders")


async def test_each_group_gets_a_message_once_in_tests_too():
    broker, got = RocketBroker(), []

    def subscribe(name: str, group: str) -> None:
        @broker.subscriber("Orders", group=group)
        async def handle(order: Order) -> None:
            got.append(name)

    for name, group in (("first", "A"), ("second", "A"), ("third", "B")):
        subscribe(name, group)
    publisher = broker.publisher("Elsewhere")
    async with TestRocketBroker(broker) as br:
        await br.publish({"id": 1}, "Orders")
        await publisher.publish({"id": 2})
        publisher.mock.assert_called_once_with({"id": 2})
    assert sorted(got) in (["first", "third"], ["second", "third"])


async def test_an_application_is_tested_with_a_real_broker(tmp_path):
    async with cluster(tmp_path) as address:
        broker = broker_at(address)

        @broker.subscriber("Orders", group="billing")
        async def bill(order: Order) -> None: ...

        async with TestRocketBroker(broker, with_real=True) as br, TestApp(FastStream(broker)):
            await br.publish({"id": 17}, "Orders")
            await bill.wait_call(timeout=60)
            bill.mock.assert_called_once_with({"id": 17})


def test_the_page_names_topics_and_what_they_carry():
    broker = RocketBroker("a:9876;b:9876")

    @broker.subscriber("Orders", group="billing")
    @broker.publisher("Bills", description="What customers owe.")
    async def bill(order: Order) -> Bill:
        """Write a bill."""
        return Bill(order=order.id)

    page = json.loads(FastStream(broker, specification=AsyncAPI(title="Shop")).schema.to_specification().to_json())
    assert {server["host"] for server in page["servers"].values()} == {"a:9876", "b:9876"}
    assert {server["protocol"] for server in page["servers"].values()} == {"rocketmq"}
    channels = {name: (one["address"], one.get("description")) for name, one in page["channels"].items()}
    assert channels == {
        "Orders:Bill": ("Orders", "Write a bill."),
        "Bills:Publisher": ("Bills", "What customers owe."),
    }
    assert page["components"]["schemas"]["Order"]["properties"] == {"id": {"title": "Id", "type": "integer"}}
    assert "Bill" in page["components"]["schemas"]


# -- as a process

SERVICE = """
import os

from faststream import FastStream

from rmqkit import PushConsumerSettings, StartFrom
from rmqkit.faststream import RocketBroker

broker = RocketBroker(
    os.environ["NAMESRV_ADDR"], consumer_settings=PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
)
app = FastStream(broker)

@broker.subscriber("Orders", group="billing")
@broker.publisher("Bills")
async def bill(order: dict) -> dict:
    return {"bill": order["id"]}
"""


def test_faststream_run_serves_until_it_is_asked_to_end(tmp_path):
    (tmp_path / "service.py").write_text(SERVICE)
    arrived, bills = threading.Event(), []

    def note(message: ReceivedMessage) -> None:
        bills.append(message.body)
        arrived.set()

    with standalone(tmp_path) as address, sync.Producer("PG", address) as producer:
        reader = sync.PushConsumer("reader", address, settings=QUICK)
        reader.subscribe("Bills", "*", note)
        command = [Path(sys.executable).with_name("faststream"), "run", "service:app", "--app-dir", str(tmp_path)]
        environment = {"NAMESRV_ADDR": address, "PATH": ""}
        with reader, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            producer.send(Message(topic="Orders", body=b'{"id": 17}'))
            assert arrived.wait(SECONDS_MAX)
            process.send_signal(signal.SIGTERM)
            log, _ = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, log
    assert bills == [b'{"bill":17}']
    assert "Orders | billing" in log
