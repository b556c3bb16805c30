"""A consumer does not start without a subscription, or with a handler of a wrong signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rmqkit import PopConsumer, PushConsumer, sync
from rmqkit.client.consumer.subscribe import handler_fault
from rmqkit.errors import SettingsError
from rmqkit.standalone import Standalone

NOWHERE = "127.0.0.1:1"


class Order(msgspec.Struct):
    number: int = 0


async def test_a_consumer_without_a_subscription_does_not_start() -> None:
    consumer = PushConsumer("billing", NOWHERE)
    with pytest.raises(SettingsError, match="consumer of group billing has no subscription and gets no messages"):
        await consumer.start()
    assert consumer.is_new, "it may be subscribed, and started then"
    consumer.subscribe("Orders")  # for messages()
    consumer.unsubscribe("Orders")
    with pytest.raises(SettingsError, match="has no subscription"):
        await consumer.start()


def test_a_consumer_of_sync_says_the_same() -> None:
    with pytest.raises(SettingsError, match="has no subscription"):
        sync.PushConsumer("billing", NOWHERE).start()


async def three(message: object, value: object, more: object) -> None: ...


@pytest.mark.parametrize("kind", [PushConsumer, PopConsumer])
async def test_a_consumer_with_a_wrong_handler_does_not_start(kind: type[PushConsumer]) -> None:
    consumer = kind("billing", NOWHERE)
    consumer.on("Orders")(three)
    with pytest.raises(SettingsError) as caught:
        await consumer.start()
    assert str(caught.value) == (
        "subscription to topic Orders: handler three(message: 'object', value: 'object', more: 'object') -> 'None' "
        "cannot be called: it gets the message"
    )
    consumer.subscribe("Orders", handler=lambda message: None)  # corrected
    assert not consumer._faults


def nothing() -> None: ...
def one(message: object) -> None: ...
def two(value: object, message: object) -> None: ...
def with_default(message: object, more: int = 1) -> None: ...
def any_number(*messages: object) -> None: ...
def keyword(message: object, *, needed: int) -> None: ...


class Handler:
    def method(self, message: object) -> None: ...
    def __call__(self, message: object) -> None: ...


PLAIN = "it gets the message"


@pytest.mark.parametrize(
    ("handler", "body", "batch_max", "fault"),
    [
        (one, None, None, None),
        (with_default, None, None, None),
        (any_number, None, None, None),
        (Handler().method, None, None, None),
        (Handler(), None, None, None),
        (functools.partial(two, 1), None, None, None),
        (print, None, None, None),
        (nothing, None, None, PLAIN),
        (two, None, None, PLAIN),
        (keyword, None, None, PLAIN),
        (Handler.method, None, None, PLAIN),
        (one, Order, None, None),
        (two, Order, None, None),
        (three, Order, None, "it gets the value, or the value and the message"),
        (one, None, 8, None),
        (two, None, 8, "it gets a list of messages"),
        (three, Order, 8, "it gets a list of values, or a list of values and a list of their messages"),
    ],
)
def test_what_a_handler_can_be_called_with(
    handler: Callable[..., Any], body: object, batch_max: int | None, fault: str | None
) -> None:
    found = handler_fault(handler, body, batch_max)
    assert (found is None) == (fault is None), found
    assert fault is None or (found is not None and found.endswith(f"cannot be called: {fault}"))


async def test_a_block_may_subscribe_and_wrong_handlers_are_refused_there(tmp_path: Path) -> None:
    async with Standalone(tmp_path) as both:
        async with PushConsumer("billing", both.namesrv_address) as consumer:
            consumer.subscribe("Orders", handler=one)
            with pytest.raises(SettingsError, match="cannot be called: it gets the message"):
                consumer.subscribe("Bills", handler=three)
        wrong = PushConsumer("billing", both.namesrv_address)
        wrong.subscribe("Orders", handler=nothing)
        with pytest.raises(SettingsError, match="cannot be called"):
            await wrong.__aenter__()
