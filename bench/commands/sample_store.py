"""The stores that ``rmq bench spark`` reads: commit logs of equal messages, written in bulk.

Every record is a copy of one record of `encode_record`. Its numbers, the digits of its keys, its body and its CRC are
set for all records at once. The messages go to eight topics of four queues in turn. Bodies are random and unique:
Parquet stores equal bodies only once, and would look better.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import decode_record, encode_record, layout_of, pack_blank, pack_host

__all__ = ["FIRST_STORED_MS", "QUEUES", "SEGMENT_BYTES", "TOPICS", "write_log"]

TOPICS, QUEUES = 8, 4
"""Topics are named topic-0, topic-1, ..., each with this number of queues."""
SEGMENT_BYTES = 1 << 30
_CHUNK_BYTES = 32 << 20
_HOST = pack_host("127.0.0.1", 10911)
_BORN_MS = 1_700_000_000_000
FIRST_STORED_MS = _BORN_MS + 1
"""Each message is stored a millisecond after the previous one."""
_KEY, _UNIQUE_KEY = b"key-%010d", b"7F000001%024d"
_SEED = 7


def write_log(root: Path, size: int, body_bytes: int, *, topics: int = TOPICS) -> int:
    """Write a commit log of about ``size`` bytes in files of 1 GiB below ``root``. Return the number of messages. The
    last file ends with its last record, the others with a blank."""
    folder = root / "commitlog"
    folder.mkdir(parents=True)
    template = _template(body_bytes, _topic_name(topics))
    count = 0
    for base in range(0, size, SEGMENT_BYTES):
        part_bytes = min(SEGMENT_BYTES, size - base)
        fitting = (part_bytes - 8) // len(template)
        with (folder / f"{base:020d}").open("wb") as file:
            for first in range(0, fitting, chunk := _CHUNK_BYTES // len(template)):
                rows = min(chunk, fitting - first)
                file.write(_records(template, count + first, rows, base + first * len(template), topics))
            if part_bytes == SEGMENT_BYTES:
                left = part_bytes - fitting * len(template)
                file.write(pack_blank(left).ljust(left, b"\0"))
        count += fitting
    return count


def _topic_name(topics: int) -> bytes:
    """Return the name of the first topic. All names have the same length."""
    return f"topic-{0:0{len(str(topics - 1))}d}".encode()


def _template(body_bytes: int, topic: bytes) -> bytes:
    properties = {"KEYS": (_KEY % 0).decode(), "UNIQ_KEY": (_UNIQUE_KEY % 0).decode(), "WAIT": "true", "TAGS": "Tag0"}
    return encode_record(
        topic=topic, queue_id=0, flag=0, queue_offset=0, physical_offset=0, sys_flag=0, born_timestamp=0,
        born_host=_HOST, store_timestamp=0, store_host=_HOST, reconsume_times=0, prepared_transaction_offset=0,
        body=bytes(body_bytes), properties=encode_properties(properties),
    )  # fmt: skip


def _records(template: bytes, first: int, count: int, physical_offset: int, topics: int) -> memoryview:
    """Return the messages ``first``, ``first + 1``, ... as records from a physical offset on."""
    import numpy as np

    rows = np.tile(np.frombuffer(template, "u1"), (count, 1))
    numbers = first + np.arange(count)
    body_at = layout_of(0).head_bytes
    body_end = body_at + len(decode_record(template).body)
    bodies = rows[:, body_at:body_end]
    bodies[:] = np.random.default_rng([_SEED, first]).integers(0, 256, bodies.shape, "u1")
    fields: dict[str, Any] = {
        "queue_id": numbers // topics % QUEUES,
        "queue_offset": numbers // (topics * QUEUES),
        "physical_offset": physical_offset + np.arange(count) * len(template),
        "born_timestamp": _BORN_MS + numbers,
        "store_timestamp": FIRST_STORED_MS + numbers,
        "body_crc": np.array([zlib.crc32(body) & 0x7FFF_FFFF for body in np.ascontiguousarray(bodies)], "i8"),
    }
    for name, values in fields.items():
        at, width = layout_of(0).positions[name], 4 if name in ("queue_id", "body_crc") else 8
        rows[:, at : at + width] = values.astype(f">i{width}").view("u1").reshape(-1, width)
    texts = {_topic_name(topics): numbers % topics, b"Tag0": numbers % 5, _KEY % 0: numbers, _UNIQUE_KEY % 0: numbers}
    for text, values in texts.items():
        end = template.index(text, body_end) + len(text)
        for place in range(min(10, text.count(b"0"))):
            rows[:, end - 1 - place] = values // 10**place % 10 + ord("0")
    return rows.data
