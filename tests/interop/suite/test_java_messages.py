"""Messages between our client and Apache's Java client, both ways, over either broker.

One Java program per peer (`java/src/interop/ExchangeProbe.java`) reads our messages, sends its own and makes requests.
Source: remoting.md §7, §8.1; behaviour.md §7.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest

from rmqkit import (
    Compressing,
    CompressionType,
    Message,
    ReceivedMessage,
    SendResult,
    TransactionState,
    selectors,
)
from tests.client.peers import until
from tests.interop.suite.scene import Peer, Scene

pytestmark = pytest.mark.patient

HASH_KEYS = ("order-1", "Zürich", "polygenelubricants")
QUEUES = 5
BATCH_COUNT = 3


@dataclass
class Exchange:
    """The messages that one Java program and our clients exchanged, by their first key."""

    sent: dict[str, tuple[Message, SendResult]]
    read_by_java: dict[str, dict[str, Any]]
    sent_by_java: dict[str, dict[str, Any]]
    read: dict[str, ReceivedMessage]
    reply: dict[str, Any]
    asked: list[ReceivedMessage]


def made(topic: str, kind: str, **fields: Any) -> Message:
    body = f"{kind} grün ".encode() * (1000 if kind in CompressionType.__members__ else 1)
    return Message(
        topic=topic, body=body, tags="TagÄ", keys=[kind, "common"], properties={"city": "東京"}, flag=-5, **fields
    )


async def send_ours(scene: Scene, topic: str) -> dict[str, tuple[Message, SendResult]]:
    """Send one message of each kind."""
    producer = await scene.producer()
    messages = [made(topic, "plain"), made(topic, "sharded", sharding_key="k"), made(topic, "delayed", delay_level=1)]
    sent = {message.keys[0]: (message, await producer.send(message)) for message in messages}
    for compression in CompressionType:
        compressing = await scene.producer(
            f"{scene.group}-{compression.name}", compression=Compressing(type=compression)
        )
        message = made(topic, compression.name)
        sent[compression.name] = message, await compressing.send(message)
    batch = [made(topic, f"batch{i}") for i in range(BATCH_COUNT)]
    result = await producer.send_batch(batch)
    ids = zip(result.msg_id.split(","), result.offset_msg_id.split(","), strict=True)
    for i, (message, (msg_id, offset_msg_id)) in enumerate(zip(batch, ids, strict=True)):
        one = SendResult(result.status, msg_id, offset_msg_id, result.queue, result.queue_offset + i)
        sent[message.keys[0]] = message, one
    return sent


async def exchange(peer: Peer) -> Exchange:
    async with Scene(peer, "exchange") as scene:
        ours, theirs, asked_topic = (f"{scene.topic}-{name}" for name in ("ours", "theirs", "asked"))
        await scene.create_topic(ours)
        await scene.create_topic(theirs, queues=QUEUES)
        await scene.create_topic(asked_topic)
        replier, consumer = await scene.producer(f"{scene.group}-replier"), scene.push_consumer()
        asked: list[ReceivedMessage] = []

        @consumer.on(asked_topic)
        async def handler(message: ReceivedMessage) -> None:
            asked.append(message)
            await replier.reply(message, b"5" * 5000, properties={"by": "python"})

        await consumer.start()
        sent = await send_ours(scene, ours)
        await scene.stored(len(sent), ours)
        events = await scene.java("ExchangeProbe", ["run", "--read", ours, "--send", theirs, "--ask", asked_topic])
        by_kind = {
            kind: {event["keys"].split()[0]: event for event in events if event["event"] == kind}
            for kind in ("received", "sent")
        }
        replies = [event for event in events if event["event"] == "reply"]
        assert replies, f"the Java program asked nothing: {events[-1:]}"
        found = await scene.stored(len(by_kind["sent"]), theirs)
        return Exchange(
            sent, by_kind["received"], by_kind["sent"], {one.keys[0]: one for one in found}, replies[0], asked
        )


def described(message: Message | ReceivedMessage) -> dict[str, object]:
    """Return one of our messages in the form of the Java program's report."""
    return {
        "bodyBytes": len(message.body),
        "bodySha256": hashlib.sha256(message.body).hexdigest(),
        "tags": message.tags,
        "keys": " ".join(message.keys),
        "flag": message.flag,
        "city": message.properties["city"],
    }


def told(event: dict[str, Any]) -> dict[str, object]:
    """Return the same values from the Java program's report."""
    return {**event, "city": event["userProperties"]["city"]}


def check_ours(given: Exchange, *kinds: str) -> None:
    """Check that Java read the messages as they were sent, with the ids and offsets of the send results."""
    for kind in kinds:
        message, result = given.sent[kind]
        event = told(given.read_by_java[kind])
        expected = described(message)
        assert {name: event[name] for name in expected} == expected
        assert (event["topic"], event["msgId"]) == (message.topic, result.msg_id)


def check_theirs(given: Exchange, *kinds: str) -> None:
    """Check that we read the messages as Java sent them, with the ids of Java's send results."""
    for kind in kinds:
        event, one = told(given.sent_by_java[kind]), given.read[kind]
        found = described(one)
        assert {name: event[name] for name in found} == found
        assert (one.topic, one.msg_id) == (event["topic"], event["msgId"])


@pytest.mark.parametrize("compression", CompressionType.__members__)
async def test_java_reads_what_was_sent_compressed(scene: Scene, compression: str) -> None:
    """remoting.md §7.5."""
    given = await scene.peer.shared(exchange)
    check_ours(given, compression)
    assert given.read_by_java[compression]["storeSizeBytes"] < len(given.sent[compression][0].body) // 2


async def test_java_reads_what_was_sent_in_a_batch(scene: Scene) -> None:
    """remoting.md §7.2."""
    given = await scene.peer.shared(exchange)
    check_ours(given, *(f"batch{i}" for i in range(BATCH_COUNT)))
    for i in range(BATCH_COUNT):
        result, event = given.sent[f"batch{i}"][1], given.read_by_java[f"batch{i}"]
        assert (event["queueOffset"], event["offsetMsgId"]) == (result.queue_offset, result.offset_msg_id)


async def test_java_reads_a_delayed_message_as_it_was_sent(scene: Scene) -> None:
    """behaviour.md §9.2."""
    given = await scene.peer.shared(exchange)
    check_ours(given, "delayed")
    event = given.read_by_java["delayed"]
    assert event["storeTimestampMs"] - event["bornTimestampMs"] >= 1000


async def test_java_reads_tags_keys_properties_and_flag_as_they_were_sent(scene: Scene) -> None:
    """remoting.md §8.1, §7.3."""
    given = await scene.peer.shared(exchange)
    check_ours(given, "plain", "sharded")


@pytest.mark.parametrize("compression", CompressionType.__members__)
async def test_what_java_sent_compressed_is_read(scene: Scene, compression: str) -> None:
    """remoting.md §7.5."""
    given = await scene.peer.shared(exchange)
    check_theirs(given, compression)
    assert given.read[compression].store_size < len(given.read[compression].body) // 2


async def test_what_java_sent_in_a_batch_is_read(scene: Scene) -> None:
    """remoting.md §7.2."""
    given = await scene.peer.shared(exchange)
    kinds = [f"batch{i}" for i in range(BATCH_COUNT)]
    check_theirs(given, *kinds)
    offsets = [given.read[kind].queue_offset for kind in kinds]
    assert offsets == [given.sent_by_java[kind]["queueOffset"] for kind in kinds]


async def test_a_message_java_sent_delayed_is_read_later(scene: Scene) -> None:
    """behaviour.md §9.2."""
    given = await scene.peer.shared(exchange)
    check_theirs(given, "delayed")
    assert given.read["delayed"].store_timestamp - given.read["delayed"].born_timestamp >= 1000


async def test_what_java_sent_has_its_tag_keys_properties_and_flag(scene: Scene) -> None:
    """remoting.md §8.1."""
    given = await scene.peer.shared(exchange)
    check_theirs(given, "plain")
    one = given.read["plain"]
    assert (one.tags, one.keys, one.flag) == ("TagÄ", ["plain", "common"], -5)


@pytest.mark.parametrize("key", HASH_KEYS)
async def test_java_and_we_choose_the_same_queue_by_hash(scene: Scene, key: str) -> None:
    """behaviour.md §7.7."""
    given = await scene.peer.shared(exchange)
    producer = await scene.producer()
    topic = f"{scene.topic}-five"
    await scene.create_topic(topic, queues=QUEUES)
    result = await producer.send(Message(topic=topic, body=b"x"), selector=selectors.by_hash(key))
    assert given.sent_by_java[f"hash_{key}"]["queueId"] == result.queue.queue_id


async def test_a_java_request_is_replied_to_from_here(scene: Scene) -> None:
    """behaviour.md §7.10."""
    given = await scene.peer.shared(exchange)
    assert (given.reply["body"], given.reply["by"]) == ("5" * 5000, "python")
    assert [(one.body, one.tags) for one in given.asked] == [(b"2+3", "asked")]


async def test_transactions_of_a_java_producer_that_is_gone_are_answered_here(scene: Scene) -> None:
    """behaviour.md §9.1, step 6: any producer of the group is asked."""
    asked: set[str] = set()

    def check(message: ReceivedMessage) -> TransactionState:
        if message.topic == scene.topic:
            asked.update(message.keys)
        return TransactionState.COMMIT

    await scene.create_topic()
    producer = await scene.transaction_producer(lambda message, argument: None, check, "probe-transactions")
    await producer.send(Message(topic=scene.topic, body=b"so that the broker knows us", keys=["first"]))
    # It sends one transaction of each kind and leaves the group at once.
    arguments = ["run", "--topic", scene.topic, "--checks-max", 1, "--timeout-seconds", 0]
    events = await scene.java("TransactionProbe", arguments)
    sent = {event["kind"] for event in events if event["event"] == "sent"}
    answered_there = {event["kind"] for event in events if event["event"] == "question"}
    undecided = {kind for kind in sent if not kind.startswith(("commit", "rollback"))} - answered_there
    assert undecided
    await until(lambda: asked >= undecided, "all questions")
    committed = {kind for kind in sent if kind.startswith("commit")} | undecided | {"first"}
    found: set[str] = set()
    while not found >= committed:
        found = {key for one in await scene.stored(len(found) + 1) for key in one.keys}
    assert "rollback:unknown" not in found
