"""Handlers and sends as type checkers see them. Nothing here runs: `make check` reads it.

What does not fit is an error; otherwise mypy reports an ignore that is not needed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import assert_type

import msgspec

from rmqkit import (
    Message,
    PopConsumer,
    Producer,
    PushConsumer,
    ReceivedMessage,
    Reply,
    SendResult,
    SqliteDedupe,
    sync,
)


class Order(msgspec.Struct):
    id: int


def fits(consumer: PushConsumer | PopConsumer | sync.PushConsumer, message: ReceivedMessage) -> None:
    @consumer.on("Orders")
    async def one(message: ReceivedMessage) -> None: ...

    @consumer.on("Orders", batch_max=10)
    def several(messages: list[ReceivedMessage]) -> None: ...

    @consumer.on("Orders", body=Order)
    async def value(order: Order) -> None: ...

    @consumer.on("Orders", body=Order)
    def value_and_message(order: Order, message: ReceivedMessage) -> None: ...

    @consumer.on("Orders", body=Order, batch_max=10)
    async def values(orders: list[Order]) -> None: ...

    @consumer.on("Orders", body=list[Order], batch_max=10)
    def values_and_messages(orders: list[list[Order]], messages: list[ReceivedMessage]) -> None: ...

    @consumer.on("Orders", body=Order, dedupe=SqliteDedupe("orders.db"))
    def new_value(order: Order) -> None: ...

    consumer.subscribe("Orders")
    consumer.subscribe("Orders", handler=one, dedupe=lambda message: message.msg_id == "known")
    consumer.subscribe("Orders", "*", one)
    consumer.subscribe("Orders", handler=several, batch_max=10)
    consumer.subscribe("Orders", handler=value, body=Order)
    consumer.subscribe("Orders", handler=value_and_message, body=Order)
    consumer.subscribe("Orders", handler=values, body=Order, batch_max=10)
    awaited: list[Awaitable[None]] = [one(message), value(Order(1)), values([Order(1)])]
    assert awaited
    assert_type(message.body_as(Order), Order)
    assert_type(message.body, bytes)
    Message(topic="Orders", body=Order(1), delay=timedelta(minutes=1))


def does_not_fit(consumer: PushConsumer) -> None:
    async def one(message: ReceivedMessage) -> None: ...
    def several(messages: list[ReceivedMessage]) -> None: ...
    def value(order: Order) -> None: ...

    consumer.on("Orders", batch_max=10)(one)  # type: ignore[type-var]
    consumer.on("Orders")(several)  # type: ignore[type-var]
    consumer.on("Orders", body=Order)(one)  # type: ignore[arg-type]
    consumer.on("Orders", body=int)(value)  # type: ignore[arg-type]
    consumer.on("Orders", body=Order, batch_max=2)(value)  # type: ignore[arg-type]
    consumer.subscribe("Orders", handler=one, batch_max=10)  # type: ignore[arg-type]
    consumer.subscribe("Orders", handler=several, batch_max=2, dedupe=SqliteDedupe("x"))  # type: ignore[call-overload]
    consumer.subscribe("Orders", handler=value)  # type: ignore[arg-type]
    Message(topic="Orders", body="text")  # type: ignore[arg-type]


async def sends(producer: Producer, blocking: sync.Producer, message: ReceivedMessage) -> None:
    sent = await producer.send("Orders", Order(1), tags="new", delay=timedelta(minutes=1), timeout=0.5)
    assert_type(sent, SendResult)
    assert_type(await producer.send(Message(topic="Orders", body=b"x"), timeout=timedelta(seconds=1)), SendResult)
    assert_type(blocking.send("Orders", b"x", keys=["k"]), SendResult)
    assert_type(await producer.request("Orders", b"x"), Reply)
    assert_type(message.born_at, datetime)
    await producer.send("Orders", b"x", tagz="new")  # type: ignore[call-arg]
    await producer.send("Orders", b"x", delay="1s")  # type: ignore[arg-type]
    await producer.send(17, b"x")  # type: ignore[arg-type]
