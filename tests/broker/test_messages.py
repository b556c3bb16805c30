"""Copies of stored messages: what stays and what changes (store.md §18.1, §19.3, §20)."""

from __future__ import annotations

from rmqkit.broker.messages import message_from, with_changes
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
