"""Messages that clients do not send or brokers refuse: each error has numbers, place and remedy.

Source: behaviour.md §3.1, §7.3, §7.6; remoting.md §4.3.1, §8.4, §8.5.
"""

from __future__ import annotations

from typing import Any

import pytest

from rmqkit import (
    ClientError,
    Compressing,
    Message,
    MessageIllegal,
    MessageQueue,
    NoRoute,
    PeerRefused,
    Producer,
    SendFailed,
    SendLimits,
    SettingsError,
    selectors,
)
from rmqkit.protocol.codes import ResponseCode
from tests.interop.suite.scene import Scene

LIMIT = 4 << 20


async def refused(scene: Scene, message: Message, text: str) -> None:
    """Check that the message is refused before it is sent, and that nothing is stored."""
    await scene.create_topic()
    producer = await scene.producer()
    with pytest.raises(MessageIllegal, match=text):
        await producer.send(message)
    with pytest.raises(MessageIllegal, match=text):
        await producer.send_one_way(message)
    assert await scene.stored(0) == []


# -- refused by the client


async def test_a_body_over_the_limit_is_refused_with_both_sizes(scene: Scene) -> None:
    """behaviour.md §7.3."""
    text = rf"body of a message for topic {scene.topic} has {LIMIT + 5} bytes, 5 more than the limit of {LIMIT}"
    await refused(scene, Message(topic=scene.topic, body=bytes(LIMIT + 5)), text)


async def test_an_empty_body_is_refused(scene: Scene) -> None:
    """behaviour.md §7.3."""
    await refused(scene, Message(topic=scene.topic, body=b""), "is empty: it must have at least one byte")


async def test_a_body_that_is_text_is_refused(scene: Scene) -> None:
    """behaviour.md §7.3."""
    body: Any = "text"
    await refused(scene, Message(topic=scene.topic, body=body), "is str: it must be bytes")


@pytest.mark.parametrize("name", ["KEYS", "TAGS", "UNIQ_KEY", "DELAY", "TRAN_MSG", "ORIGIN_MESSAGE_ID"])
async def test_properties_with_names_of_rocketmqs_own_are_refused(scene: Scene, name: str) -> None:
    """remoting.md §8.1."""
    message = Message(topic=scene.topic, body=b"x", properties={name: "1"})
    await refused(scene, message, f"property name {name} belongs to RocketMQ: choose another")


@pytest.mark.parametrize("character", ["\x01", "\x02"])
async def test_properties_with_separator_characters_are_refused(scene: Scene, character: str) -> None:
    """remoting.md §7.3."""
    message = Message(topic=scene.topic, body=b"x", properties={"a": f"b{character}c"})
    await refused(scene, message, f"message for topic {scene.topic}: .*a")


async def test_properties_over_their_limit_are_refused_with_both_sizes(scene: Scene) -> None:
    """remoting.md §7.3."""
    message = Message(topic=scene.topic, body=b"x", properties={"a": "x" * 32767})
    await refused(scene, message, r"properties .* have \d+ bytes, \d+ more than the limit of 32767")


async def test_a_key_with_a_blank_is_refused(scene: Scene) -> None:
    """remoting.md §8.1: keys are separated by blanks."""
    message = Message(topic=scene.topic, body=b"x", keys=["two words"])
    await refused(scene, message, "must be words without blanks")


async def test_two_kinds_of_delay_are_refused(scene: Scene) -> None:
    """behaviour.md §3.4."""
    message = Message(topic=scene.topic, body=b"x", delay_level=1, delay=0.01)
    await refused(scene, message, "delay_level=1, delay=0.01, deliver_at=None: give one, not negative")


async def test_a_negative_delay_is_refused(scene: Scene) -> None:
    """behaviour.md §3.4."""
    await refused(scene, Message(topic=scene.topic, body=b"x", delay_level=-1), "give one, not negative")


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("", "The specified topic is blank."),
        ("a b", "contains illegal characters, allowing only"),
        ("straße", "contains illegal characters, allowing only"),
        ("t" * 128, "is longer than topic max length: 127"),
    ],
    ids=["blank", "blank within", "letter", "length"],
)
async def test_illegal_topic_names_are_refused_with_the_rule(scene: Scene, topic: str, text: str) -> None:
    """remoting.md §8.5."""
    await refused(scene, Message(topic=topic, body=b"x"), text)


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "SELF_TEST_TOPIC"])
async def test_topics_of_the_brokers_own_are_forbidden(scene: Scene, topic: str) -> None:
    """remoting.md §8.4."""
    await refused(scene, Message(topic=topic, body=b"x"), rf"Sending message to topic\[{topic}\] is forbidden")


async def test_a_topic_of_127_characters_is_legal(scene: Scene) -> None:
    """remoting.md §8.5."""
    topic = await scene.create_topic(scene.topic.ljust(127, "x"))
    one = await scene.sent_and_stored(Message(topic=topic, body=b"x"))
    assert one.topic == topic


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("", "The specified group is blank."),
        ("a.b", "contains illegal characters"),
        ("g" * 121, "is longer than group max length: 120"),
        ("DEFAULT_PRODUCER", "is reserved: choose another"),
    ],
    ids=["blank", "character", "length", "reserved"],
)
async def test_illegal_producer_groups_are_refused_with_the_rule(scene: Scene, group: str, text: str) -> None:
    """behaviour.md §7.3; remoting.md §8.5."""
    with pytest.raises(SettingsError, match=text):
        Producer(group, scene.namesrv)


async def test_a_queue_of_another_topic_is_refused(scene: Scene) -> None:
    """behaviour.md §7.3: message's topic not equal mq's topic."""
    await scene.create_topic()
    producer = await scene.producer()
    queue = MessageQueue("Other", scene.broker_name, 0)
    with pytest.raises(MessageIllegal, match=f"for topic {scene.topic} cannot go to a queue of topic Other"):
        await producer.send(Message(topic=scene.topic, body=b"x"), queue=queue)


async def test_a_queue_of_an_unknown_broker_is_tried_once_and_named(scene: Scene) -> None:
    """behaviour.md §7.6: a given queue gets one try."""
    await scene.create_topic()
    producer = await scene.producer()
    queue = MessageQueue(scene.topic, "no-such-broker", 0)
    with pytest.raises(SendFailed, match=r"not stored after 1 try on no-such-broker: .*no route names its master"):
        await producer.send(Message(topic=scene.topic, body=b"x"), queue=queue)


async def test_a_selector_that_chooses_nothing_is_reported(scene: Scene) -> None:
    """behaviour.md §7.7: select message queue return null."""
    await scene.create_topic()
    producer = await scene.producer()
    with pytest.raises(ClientError, match=f"the selector chose no queue for a message of topic {scene.topic}"):
        await producer.send(Message(topic=scene.topic, body=b"x"), selector=lambda queues, message: None)


async def test_what_a_selector_raises_reaches_the_program(scene: Scene) -> None:
    """behaviour.md §7.7."""
    await scene.create_topic()
    producer = await scene.producer()
    with pytest.raises(ValueError, match="no sharding_key to choose a queue by"):
        await producer.send(Message(topic=scene.topic, body=b"x"), selector=selectors.by_sharding_key)


async def test_without_start_nothing_can_be_sent(scene: Scene) -> None:
    """behaviour.md §7.3: the producer service state not OK."""
    producer = scene.closing(Producer(scene.group, scene.namesrv))
    with pytest.raises(
        ClientError, match=f"producer of group {scene.group} is not started: use it inside 'async with'"
    ):
        await producer.send(Message(topic=scene.topic, body=b"x"))


async def test_after_the_end_nothing_can_be_sent(scene: Scene) -> None:
    """behaviour.md §7.12."""
    producer = await scene.producer()
    await producer.close()
    with pytest.raises(ClientError, match=f"producer of group {scene.group} is closed: make a new one"):
        await producer.send(Message(topic=scene.topic, body=b"x"))


async def test_a_closed_producer_is_not_started_again(scene: Scene) -> None:
    """behaviour.md §7.12."""
    producer = await scene.producer()
    with pytest.raises(ClientError, match="is started already: make a new one"):
        await producer.start()
    await producer.close()
    await producer.close()
    with pytest.raises(ClientError, match="is closed already: make a new one"):
        await producer.start()


# -- refused by the broker


async def test_a_body_over_the_brokers_limit_is_refused_with_its_words(scene: Scene) -> None:
    """behaviour.md §3.4, §3.5."""
    await scene.create_topic()
    producer = await scene.producer(
        limits=SendLimits(message_bytes_max=64 << 20), compression=Compressing(body_bytes_min=64 << 20)
    )
    with pytest.raises(PeerRefused, match=f"msg body length limit {LIMIT}B") as refusal:
        await producer.send(Message(topic=scene.topic, body=bytes(LIMIT + 1)))
    assert (refusal.value.code, refusal.value.address) == (ResponseCode.MESSAGE_ILLEGAL, scene.peer.broker_addr)
    assert await scene.stored(0) == []


async def test_a_queue_the_topic_does_not_have_is_refused_with_the_brokers_words(scene: Scene) -> None:
    """behaviour.md §3.1, step 8."""
    await scene.create_topic(queues=2)
    producer = await scene.producer()
    with pytest.raises(PeerRefused, match=r"request queueId\[2\] is illegal") as refusal:
        await producer.send(
            Message(topic=scene.topic, body=b"x"), queue=MessageQueue(scene.topic, scene.broker_name, 2)
        )
    assert refusal.value.code == ResponseCode.INVALID_PARAMETER


async def test_a_topic_that_may_not_be_created_is_refused_after_every_try(scene: Scene) -> None:
    """behaviour.md §3.2: the template must be inheritable; §7.6: TOPIC_NOT_EXIST is tried again."""
    template = await scene.create_topic(f"{scene.topic}-template")
    producer = await scene.producer(template_topic=template)
    with pytest.raises(SendFailed, match="not exist, apply first please!") as failure:
        await producer.send(Message(topic=scene.topic, body=b"x"))
    assert failure.value.brokers == [scene.broker_name] * 3
    assert isinstance(failure.value.cause, PeerRefused)
    assert failure.value.cause.code == ResponseCode.TOPIC_NOT_EXIST


async def test_the_number_of_tries_is_a_setting(scene: Scene) -> None:
    """behaviour.md §7.4: retryTimesWhenSendFailed."""
    template = await scene.create_topic(f"{scene.topic}-template")
    producer = await scene.producer(template_topic=template, retries=0)
    with pytest.raises(SendFailed, match=f"not stored after 1 try on {scene.broker_name}"):
        await producer.send(Message(topic=scene.topic, body=b"x"))


async def test_without_topic_and_template_the_error_names_topic_name_servers_and_remedy(scene: Scene) -> None:
    """behaviour.md §7.2: No route info of this topic."""
    producer = await scene.producer(template_topic=f"{scene.topic}-template")
    with pytest.raises(
        NoRoute, match=f"no broker accepts messages for topic {scene.topic}, asked name servers {scene.namesrv}: create"
    ):
        await producer.send(Message(topic=scene.topic, body=b"x"))
