"""Changes of a message before it is put, and its unchanged parts (store.md §18.1, §19.2, §19.3, §20)."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.broker.messages import (
    committed,
    message_from,
    to_dead_letters,
    to_delay_level,
    to_half,
    to_priority,
    to_timer,
    with_changes,
)
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import Record

RECORD = Record(
    size=0,
    magic=0,
    body_crc=0,
    queue_id=3,
    flag=7,
    queue_offset=11,
    physical_offset=1000,
    sys_flag=9,
    born_timestamp=1_700_000_000_000,
    born_host=b"born-at.",
    store_timestamp=1_700_000_000_001,
    store_host=b"kept-at.",
    reconsume_times=2,
    prepared_transaction_offset=55,
    body=b"body",
    topic="T",
    properties=b"a\x01b\x02DELAY\x013\x02",
)


def test_without_changes_only_the_place_is_another():
    copy = message_from(RECORD, topic="U", queue_id=1)
    assert (copy.topic, copy.queue_id, copy.prepared_transaction_offset) == ("U", 1, 0)
    kept = ("body", "properties", "flag", "sys_flag", "born_timestamp", "born_host", "store_host", "reconsume_times")
    assert [getattr(copy, name) for name in kept] == [getattr(RECORD, name) for name in kept]


def test_what_is_named_replaces_what_was_there():
    copy = message_from(
        RECORD,
        topic="U",
        queue_id=1,
        changes={"DELAY": None, "c": "d", "a": "e"},
        sys_flag=8,
        reconsume_times=0,
        store_host=b"now--at.",
        prepared_transaction_offset=1000,
    )
    assert decode_properties(copy.properties) == {"a": "e", "c": "d"}
    assert (copy.sys_flag, copy.reconsume_times, copy.store_host) == (8, 0, b"now--at.")
    assert copy.prepared_transaction_offset == 1000


def test_a_checksum_of_the_old_record_does_not_go_with_the_copy():
    record = Record(*(getattr(RECORD, name) for name in Record.__struct_fields__))
    record.properties += b"__CRC32#\x011234567890\x02"
    assert message_from(record, topic="U", queue_id=1).properties == with_changes(RECORD.properties, {})


SENT = message_from(RECORD, topic="T", queue_id=3)


@pytest.mark.parametrize(
    ("step", "topic", "queue_id", "properties"),
    [
        (lambda one: to_dead_letters(one, "g"), "%DLQ%g", 0, {"a": "b", "DELAY": "-1"}),
        (lambda one: to_delay_level(one, 3, 18), "SCHEDULE_TOPIC_XXXX", 2, {"a": "b", "DELAY": "3"}),
        (lambda one: to_delay_level(one, 3, 2), "SCHEDULE_TOPIC_XXXX", 1, {"a": "b", "DELAY": "2"}),
        (lambda one: to_timer(one, 5000), "rmq_sys_wheel_timer", 0, {"a": "b", "DELAY": "3", "TIMER_OUT_MS": "5000"}),
        (to_half, "RMQ_SYS_TRANS_HALF_TOPIC", 0, {"a": "b", "DELAY": "3"}),
    ],
)
def test_a_step_returns_another_message_and_leaves_the_first(step, topic, queue_id, properties):
    before = dict(SENT.parsed)
    became = step(SENT)
    assert (SENT.topic, SENT.queue_id, SENT.parsed) == ("T", 3, before)
    place = {} if topic.startswith("%DLQ%") else {"REAL_TOPIC": "T", "REAL_QID": "3"}
    assert (became.topic, became.queue_id, became.parsed) == (topic, queue_id, properties | place)
    assert (became.body, became.flag, became.born_timestamp) == (b"body", 7, 1_700_000_000_000)


@pytest.mark.parametrize(
    ("properties", "queue_id", "left"),
    [
        ({"_SYS_MSG_PRIORITY_": "1"}, 1, {"_SYS_MSG_PRIORITY_": "1"}),
        ({"_SYS_MSG_PRIORITY_": "9"}, 3, {"_SYS_MSG_PRIORITY_": "9"}),
        ({"_SYS_MSG_PRIORITY_": "1", "DELAY": "2"}, 0, {"DELAY": "2"}),
        ({"_SYS_MSG_PRIORITY_": "1", "TRAN_MSG": "TRUE"}, 0, {"TRAN_MSG": "TRUE"}),
        ({"_SYS_MSG_PRIORITY_": "-1"}, 0, {"_SYS_MSG_PRIORITY_": "-1"}),
    ],
)
def test_a_priority_chooses_the_queue_or_goes(properties, queue_id, left):
    became = to_priority(msgspec.structs.replace(SENT, queue_id=0, string=None, values=properties), 4)
    assert (became.queue_id, became.parsed) == (queue_id, left)


def test_a_half_message_and_its_commit_give_back_what_was_sent():
    half = to_half(msgspec.structs.replace(SENT, sys_flag=0x4, string=None, values={"UNIQ_KEY": "K"}))
    stored = msgspec.structs.replace(RECORD, topic=half.topic, properties=half.properties, sys_flag=0)
    real = committed(stored)
    assert (real.topic, real.queue_id, real.sys_flag, real.prepared_transaction_offset) == ("T", 3, 0x8, 1000)
    assert real.parsed == {"UNIQ_KEY": "K", "__transactionId__": "K"}
