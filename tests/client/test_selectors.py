"""Queue selectors. Source: behaviour.md §7.7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.selectors import at_random, by_hash, by_sharding_key
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message

QUEUES = [MessageQueue("T", "broker-a", i) for i in range(7)]
MESSAGE = Message(topic="T", body=b"x", sharding_key="TagA")


def test_the_queue_is_the_one_java_chooses():
    # "TagA".hashCode() is 2598919 = 7 * 371274 + 1 and "polygenelubricants".hashCode() is -2147483648.
    assert by_hash("TagA")(QUEUES, MESSAGE).queue_id == 1
    assert by_hash("polygenelubricants")(QUEUES, MESSAGE).queue_id == 2147483648 % 7
    assert by_sharding_key(QUEUES, MESSAGE).queue_id == 1


def test_a_missing_sharding_key_is_told():
    with pytest.raises(ValueError, match="message for topic T has no sharding_key"):
        by_sharding_key(QUEUES, Message(topic="T", body=b"x"))


@given(st.text())
def test_any_key_leads_to_one_of_the_queues(key):
    assert by_hash(key)(QUEUES, MESSAGE) in QUEUES
    assert at_random(QUEUES, MESSAGE) in QUEUES
