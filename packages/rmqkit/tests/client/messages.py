"""Received messages and stored records for tests."""

from __future__ import annotations

from typing import Any

from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import encode_record, pack_host


def received(offset: int, body: bytes = b"body", **fields: Any) -> ReceivedMessage:
    """A message of queue 0 of topic T as a consumer has it."""
    values: dict[str, Any] = {
        "topic": "T",
        "broker_name": "broker-0",
        "queue_id": 0,
        "msg_id": f"id-{offset}",
        "offset_msg_id": f"7F00000100005597{offset:016X}",
        "properties": {},
        "flag": 0,
        "sys_flag": 0,
        "body_crc": 0,
        "store_size": 200,
        "physical_offset": 1000 + offset,
        "born_timestamp": 0,
        "born_host": "127.0.0.1:1",
        "store_timestamp": 0,
        "store_host": "127.0.0.1:2",
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        **fields,
    }
    return ReceivedMessage(queue_offset=offset, body=body, **values)


def record(
    offset: int, body: bytes = b"body", *, topic: str = "T", sys_flag: int = 0, reconsume: int = 0, **properties: str
) -> bytes:
    """A message of queue 0 as it is stored and pulled."""
    return encode_record(
        topic=topic.encode(),
        queue_id=0,
        flag=0,
        queue_offset=offset,
        physical_offset=1000 + offset,
        sys_flag=sys_flag,
        born_timestamp=0,
        born_host=pack_host("127.0.0.1", 1),
        store_timestamp=0,
        store_host=pack_host("127.0.0.1", 2),
        reconsume_times=reconsume,
        prepared_transaction_offset=0,
        body=body,
        properties=encode_properties({"UNIQ_KEY": f"id-{offset}", **properties}),
    )
