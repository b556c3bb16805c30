"""Chunks: what goes together, in which order, and how fast."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rmqkit.admin.messages.sending import CHUNK_COUNT, SILENT_SECONDS, Pace, send_chunk
from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.client.observe.status import BrokerStatus
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import ConnectionLost, MessageIllegal, NoRoute, SendFailed
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.testing.clock import LoopThread, StandingClock, VirtualClock


class Requests:
    """A producer that remembers the bodies of each request and the queue it was for."""

    def __init__(self):
        self.seen = []

    async def queues(self, topic):
        if topic == "Nowhere":
            raise NoRoute("no broker accepts messages for topic Nowhere")
        return [MessageQueue(topic, broker, i) for broker in "ab" for i in range(4)]

    async def send(self, message, *, queue=None):
        self.seen.append((message.body, queue))
        if message.body == b"bad":
            raise MessageIllegal("bad")
        return SendResult(SendStatus.SEND_OK, message.msg_id or "id", "00", queue or MessageQueue("T", "a", 0), 5)

    async def send_batch(self, messages, *, queue=None):
        self.seen.append((b"+".join(one.body for one in messages), queue))
        if any(one.body == b"bad" for one in messages):
            raise MessageIllegal("bad")
        ids = ",".join(f"id-{one.body.decode()}" for one in messages)
        return SendResult(SendStatus.SEND_OK, ids, "01,02", queue or MessageQueue("T", "a", 0), 5)


def messages(*texts, **fields):
    return [PlacedMessage(topic="T", body=text.encode(), **fields) for text in texts]


@pytest.mark.real_time
async def test_placed_messages_go_one_after_the_other_to_their_queues():
    producer = Requests()
    chunk = [*messages("0", "1", queue_id=2), *messages("2", broker_name="b", queue_id=2), *messages("3", queue_id=2)]
    await send_chunk(producer, chunk)
    a, b = MessageQueue("T", "a", 2), MessageQueue("T", "b", 2)
    assert [body for body, queue in producer.seen if queue == a] == [b"0", b"1", b"3"]
    assert [body for body, queue in producer.seen if queue == b] == [b"2"]


@pytest.mark.real_time
async def test_neighbours_go_together_but_delayed_ones_and_other_topics_alone():
    producer = Requests()
    other = [PlacedMessage(topic="U", body=b"u")]
    chunk = [
        *messages("0", "1", "2"),
        *other,
        *messages("3"),
        *messages("4", delay_level=1),
        *messages("5", "6", "7" * 4096, "8"),
    ]
    outcomes = await send_chunk(producer, chunk, batch_count=2)
    assert sorted(body for body, _ in producer.seen) == [b"0+1", b"2", b"3", b"4", b"5+6", b"7" * 4096, b"8", b"u"]
    assert [(outcomes[i].msg_id, outcomes[i].queue_offset) for i in (0, 1, 6)] == [
        ("id-0", 5),
        ("id-1", 6),
        ("id-5", 5),
    ]


@pytest.mark.real_time
async def test_each_failure_is_its_message_s_own():
    producer = Requests()
    chunk = [
        *messages("0", "bad", "1"),
        PlacedMessage(topic="Nowhere", body=b"x", queue_id=1),
        *messages("2", queue_id=9),
    ]
    outcomes = await send_chunk(producer, chunk, batch_count=10)
    assert [type(one) for one in outcomes] == [SendResult, MessageIllegal, SendResult, NoRoute, MessageIllegal]
    assert [body for body, _ in producer.seen] == [b"0+bad+1", b"0", b"bad", b"1"]


@pytest.mark.real_time
async def test_behind_one_that_a_queue_did_not_get_no_other_is_tried():
    class Away(Requests):
        async def send(self, message, *, queue=None):
            if queue == MessageQueue("T", "b", 1):
                self.seen.append((message.body, queue))
                raise SendFailed("T", ["b"] * 12, ConnectionLost("b:1", "refused"))
            return await super().send(message, queue=queue)

    producer = Away()
    away = {"broker_name": "b", "queue_id": 1}
    outcomes = await send_chunk(producer, [*messages("0", "1", "2", **away), *messages("3", queue_id=2)])
    assert [type(one) for one in outcomes] == [SendFailed, SendFailed, SendFailed, SendResult]
    assert sorted(body for body, _ in producer.seen) == [b"0", b"3"]


@pytest.mark.parametrize(
    ("place", "named"),
    [({}, "broker a or b or c or 1 more"), ({"broker_name": "b", "queue_id": 1}, "broker b")],
    ids=["any queue", "one queue"],
)
def test_a_broker_that_is_waited_for_is_named_once(place, named):
    thread = LoopThread("send")
    clock = VirtualClock(thread)
    told = []

    class Silent(Requests):
        settings = ProducerSettings(send_timeout_ms=20_000)

        def status(self):
            names = [("a", 0), ("b", 0), ("b", 1), ("d", 0), ("c", 0)]
            brokers = [BrokerStatus(name=name, broker_id=i, address="", is_connected=False) for name, i in names]
            return SimpleNamespace(brokers=brokers)

        async def send(self, message, *, queue=None):
            await self.answer.wait()
            return await super().send(message, queue=queue)

    async def begun():
        producer.answer = asyncio.Event()
        chunk = messages("0", "1", **place)
        return asyncio.ensure_future(send_chunk(producer, chunk, on_wait=lambda *what: told.append(what)))

    async def answered():
        producer.answer.set()
        return await sending

    producer = Silent()
    sending = thread.run(begun)
    clock.advance(seconds=SILENT_SECONDS - 0.5)
    assert told == []
    for _ in range(10):
        clock.advance(seconds=1)
    assert told == [(named, 20_000)]
    assert len(thread.run(answered)) == 2
    clock.advance(seconds=10)
    assert told == [(named, 20_000)], "and no more when it is done"
    thread.close()


@pytest.mark.parametrize(("rate", "chunk"), [(0, CHUNK_COUNT), (0.5, 1), (5, 1), (100, 10), (1e9, CHUNK_COUNT)])
def test_slow_senders_send_small_chunks(rate, chunk):
    assert Pace(rate).chunk_count == chunk


@pytest.mark.real_time
async def test_the_pace_is_held_on_the_whole(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(round(seconds, 3))

    monkeypatch.setattr("rmqkit.admin.messages.sending.asyncio.sleep", sleep)
    pace = Pace(100, StandingClock())
    await pace.passed(10)
    await pace.passed(5)
    assert pauses == [0.1, 0.15], "of a clock that stands still"
    await Pace(0, StandingClock()).passed(1000)
    assert len(pauses) == 2
