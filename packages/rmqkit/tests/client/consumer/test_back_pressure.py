"""The bound of the bytes of messages in flight. Source: behaviour.md §7.6."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import Compressing, ProducerSettings, SendLimits
from rmqkit.errors import SendFailed, SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from tests.client.peers import Cluster, stored, until

MIB = 1 << 20
SEND = RequestCode.SEND_MESSAGE_V2


def message(body_bytes: int) -> Message:
    return Message(topic="T", body=bytes(body_bytes))


class Holding:
    """A producer with room for 1 MiB, and a broker that holds its answers to sends until the test releases them."""

    def __init__(self, **settings) -> None:
        self.settings = ProducerSettings(
            limits=SendLimits(sends_bytes_max=MIB), compression=Compressing(body_bytes_min=4 * MIB), **settings
        )
        self.cluster = Cluster()
        self.held = []

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T")
        self.cluster.broker.answer(SEND, self.held.append)
        self.producer = Producer("PG", self.cluster.namesrv, settings=self.settings)
        await self.producer.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.producer.close()
        await self.cluster.__aexit__(*exc_info)

    def send(self, body_bytes):
        return asyncio.create_task(self.producer.send(message(body_bytes), timeout=20))

    def answer(self):
        command = self.held.pop(0)
        self.cluster.broker.connections[0].send(stored(command))


async def test_sends_wait_while_too_many_bytes_are_under_way():
    async with Holding() as it:
        sends = [it.send(MIB // 2) for _ in range(3)]
        await until(lambda: len(it.held) == 2, "two halves under way")
        assert (it.producer.status().sends_under_way, it.producer.status().bytes_under_way) == (2, MIB)
        it.answer()
        await sends[0]
        await until(lambda: len(it.held) == 2, "the third")
        it.answer()
        it.answer()
        await asyncio.gather(*sends)
        assert (it.producer.status().sends_under_way, it.producer.status().bytes_under_way) == (0, 0)


async def test_a_body_larger_than_the_bound_goes_alone():
    async with Holding() as it:
        large = it.send(2 * MIB)
        await until(lambda: it.held, "the large one")
        small = it.send(1)
        it.answer()
        await large
        await until(lambda: it.held, "the small one")
        it.answer()
        await small


async def test_who_waits_too_long_is_reported_the_bound_and_takes_no_room():
    async with Holding(line_timeout_ms=20) as it:
        large = it.send(MIB)
        await until(lambda: it.held, "the large one")
        with pytest.raises(SendFailed) as caught:
            await it.producer.send(message(1))
        assert str(caught.value) == (
            "message for topic T not sent: 20 ms in line behind 1048576 bytes (backPressureForAsyncSendSize): slow down"
        )
        assert it.producer.status().sends_under_way == 1
        it.answer()
        await large
        assert (it.producer.status().sends_under_way, it.producer.status().bytes_under_way) == (0, 0)


def test_the_bound_is_at_least_a_mebibyte():
    with pytest.raises(SettingsError, match=r"^limits.sends_bytes_max \(backPressureForAsyncSendSize\) is 1: it must "):
        Producer("PG", "a:1", settings=ProducerSettings(limits=SendLimits(sends_bytes_max=1)))
