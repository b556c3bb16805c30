"""SIGKILL of a broker under gRPC clients: popped messages are redelivered, half messages are checked, and no answered
message is lost. `tests.faults.grpc_restart` kills at random moments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.grpc_broker import GrpcBroker
from tests.faults.grpc_clients import (
    BEGIN,
    COMMIT,
    FROM_CHECK,
    NORMAL,
    PUSH,
    ROLLBACK,
    SIMPLE,
    TRANSACTION,
    Connection,
    Member,
    begin,
    until_answered,
)
from tests.faults.grpc_tables import RENEWED
from tests.patience import TIMEOUT_MS

CONF = {
    "transactionTimeOut": 300,
    "transactionCheckInterval": 300,
    "transactionOpBatchInterval": 100,
    "enableMixedMessageType": "true",
    "brokerName": "broker-a",
}
TOPICS = {"Popped": "NORMAL", "Pushed": "NORMAL", "Halves": "MIXED"}
SENT = 20

pytestmark = [pytest.mark.faults, pytest.mark.real_time, pytest.mark.slow]


@asynccontextmanager
async def clients(broker: GrpcBroker, *names: str) -> AsyncIterator[list[Member]]:
    connection = Connection(broker.address)
    try:
        yield [connection.member(name) for name in names]
    finally:
        await connection.close()


async def received(member: Member, group: str, topic: str, **more: Any) -> list[Any]:
    """Return messages. Those sent before the group's start are acknowledged and left out."""
    messages = await until_answered(lambda: member.receive(group, topic, **more))
    begins = [message for message in messages if message.body == BEGIN]
    if begins:
        await member.ack(group, topic, *begins)
    return [message for message in messages if message.body != BEGIN]


async def bodies_until(member: Member, group: str, topic: str, wanted: set[bytes], **more: Any) -> list[bytes]:
    """Receive and acknowledge messages until all wanted ones have arrived. Return all bodies."""
    came: list[bytes] = []
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while not wanted <= set(came):
            messages = await received(member, group, topic, **more)
            if messages:
                await member.ack(group, topic, *messages)
            came += [message.body for message in messages]
    return came


async def test_what_was_popped_pushed_and_half_sent_is_there_after_a_kill(tmp_path: Path) -> None:
    async with GrpcBroker(tmp_path, CONF, is_quick=True) as broker:
        await broker.make(TOPICS)
        async with clients(broker, "producer", "simple", "push") as (producer, simple, push):
            await producer.produces("Popped", "Pushed", "Halves")
            await simple.consumes("G-simple", "Popped", SIMPLE)
            await push.consumes("G-push", "Pushed", PUSH)
            for member, group, topic in ((simple, "G-simple", "Popped"), (push, "G-push", "Pushed")):
                await begin(member, group, topic, producer)
                for number in range(SENT):
                    await producer.send(topic, b"%d" % number, f"{topic}-{number}", message_type=NORMAL)

            await begin(simple, "G-halves", "Halves", producer)

            popped: list[Any] = []
            while len(popped) < SENT:
                popped += await received(simple, "G-simple", "Popped", invisible=2)
            await simple.ack("G-simple", "Popped", *popped[:5])
            acknowledged = {message.body for message in popped[:5]}
            for number, resolution in enumerate((COMMIT, ROLLBACK, None)):
                name = f"half-{number}"
                await producer.send("Halves", name.encode(), name, message_type=TRANSACTION)
                if resolution is not None:
                    await producer.end("Halves", name, resolution)
            held: list[Any] = []
            while len(held) < SENT:
                held += await received(push, "G-push", "Pushed", renew=True, invisible=None)
            async with asyncio.timeout(TIMEOUT_MS / 1000):
                while (await asyncio.to_thread(broker.sizes)).get(RENEWED, 0) < SENT:
                    await asyncio.sleep(0.05)
            broker.kill()

        await asyncio.to_thread(broker.start)
        async with clients(broker, "producer", "simple", "other-push", "of-halves") as (producer, simple, push, other):
            await until_answered(lambda: producer.produces("Halves"))
            await simple.consumes("G-simple", "Popped", SIMPLE)
            await push.consumes("G-push", "Pushed", PUSH)
            everything = {b"%d" % number for number in range(SENT)}
            again, pushed, asked = await asyncio.gather(
                bodies_until(simple, "G-simple", "Popped", everything - acknowledged, invisible=30),
                bodies_until(push, "G-push", "Pushed", everything, renew=True, invisible=None),
                producer.orphan(),
            )
            assert not acknowledged & set(again), "an answered ack stays valid"
            assert set(pushed) == everything
            assert (asked.transaction_id, asked.message.body) == ("half-2", b"half-2")
            await producer.end("Halves", "half-2", COMMIT, FROM_CHECK)
            ended = await bodies_until(other, "G-halves", "Halves", {b"half-0", b"half-2"})
            assert b"half-1" not in ended, "half-1 was rolled back"
