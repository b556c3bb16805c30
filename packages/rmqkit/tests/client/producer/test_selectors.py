"""Queue selectors. Source: behaviour.md §7.7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.producer.selectors import PlacedMessage, at_random, by_hash, by_place, by_sharding_key
from rmqkit.errors import MessageIllegal
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue

QUEUES = [MessageQueue("T", "broker-a", i) for i in range(7)]
MESSAGE = Message(topic="T", body=b"x", sharding_key="TagA")


def test_the_queue_is_the_one_java_chooses():
    # "TagA".hashCode() is 2598919 = 7 * 371274 + 1 and "polygenelubricants".hashCode() is -2147483648.
    assert by_hash("TagA")(QUEUES, MESSAGE).queue_id == 1
    assert by_hash("polygenelubricants")(QUEUES, MESSAGE).queue_id == 2147483648 % 7
    assert by_sharding_key(QUEUES, MESSAGE).queue_id == 1


def test_a_missing_sharding_key_is_reported():
    with pytest.raises(ValueError, match="message for topic T has no sharding_key"):
        by_sharding_key(QUEUES, Message(topic="T", body=b"x"))


def test_a_placed_message_goes_to_its_queue_of_its_broker_or_of_the_first_that_has_it():
    queues = [MessageQueue("T", "broker-b", 0), *QUEUES, MessageQueue("T", "broker-b", 8)]
    for broker_name, queue_id, found in ((None, 0, "broker-a"), ("broker-b", 0, "broker-b"), (None, 8, "broker-b")):
        message = PlacedMessage(topic="T", body=b"x", queue_id=queue_id, broker_name=broker_name)
        assert by_place(queues, message) == MessageQueue("T", found, queue_id)
    keyed = PlacedMessage(topic="T", body=b"x", sharding_key="TagA")
    assert keyed.is_placed
    assert by_place(QUEUES, keyed) == by_sharding_key(QUEUES, MESSAGE)
    with pytest.raises(MessageIllegal, match=r"no queue 1 to send to at broker broker-b: it has \[0, 8\]"):
        by_place(queues, PlacedMessage(topic="T", body=b"x", queue_id=1, broker_name="broker-b"))
    with pytest.raises(MessageIllegal, match="no queue 1 to send to at broker c: it has queues at broker-a, broker-b"):
        by_place(queues, PlacedMessage(topic="T", body=b"x", queue_id=1, broker_name="c"))


@given(st.text())
def test_any_key_leads_to_one_of_the_queues(key):
    assert by_hash(key)(QUEUES, MESSAGE) in QUEUES
    assert at_random(QUEUES, MESSAGE) in QUEUES
