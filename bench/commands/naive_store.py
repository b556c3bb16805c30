"""The comparison of `store`: an obvious implementation of the store's formats.

It has the same files and the same answers, with one `struct` call per field, one system call per entry, one fsync per
message, and properties as a dict. It is only used for measurements. Source: store.md §3, §4, §7.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

from rmqkit.protocol.properties import decode_properties, java_hash
from rmqkit.protocol.record import HEAD_FIELDS, MAGIC_V1
from rmqkit.store.inner_message import InnerMessage

__all__ = ["NaiveStore", "naive_walk"]

_SLOTS = 5_000_000


class NaiveStore:
    """A log, queues and an index in one directory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._log = os.open(folder / "log", os.O_RDWR | os.O_CREAT)
        self._index = os.open(folder / "index", os.O_RDWR | os.O_CREAT)
        self._queues: dict[tuple[str, int], int] = {}
        self._next: dict[tuple[str, int], int] = {}
        self._end = 0
        self._index_count = 1

    def close(self) -> None:
        for descriptor in (self._log, self._index, *self._queues.values()):
            os.close(descriptor)

    def put(self, message: InnerMessage, *, sync: bool = False) -> None:
        """Append a record and its queue entry."""
        key = message.topic, message.queue_id
        queue_offset = self._next.get(key, 0)
        record = _encode(message, queue_offset, self._end)
        os.write(self._log, record)
        if sync:
            os.fsync(self._log)
        self.dispatch(message.topic, message.queue_id, self._end, len(record), message.properties)
        self._next[key] = queue_offset + 1
        self._end += len(record)

    def put_batch(self, message: InnerMessage) -> None:
        """Put every message of a batch body."""
        body, position = message.body, 0
        while position < len(body):
            flag = struct.unpack_from(">i", body, position + 12)[0]
            body_bytes = struct.unpack_from(">i", body, position + 16)[0]
            member = body[position + 20 : position + 20 + body_bytes]
            position += 20 + body_bytes
            properties_bytes = struct.unpack_from(">h", body, position)[0]
            properties = body[position + 2 : position + 2 + properties_bytes]
            position += 2 + properties_bytes
            hosts = message.born_host, message.store_host
            self.put(
                InnerMessage(message.topic, message.queue_id, member, properties, flag, message.sys_flag, 0, *hosts)
            )

    def dispatch(
        self, topic: str, queue_id: int, physical_offset: int, size: int, properties: bytes, *, index: bool = False
    ) -> None:
        """Write the queue entry, and those of the index."""
        values = decode_properties(properties)
        tags_code = java_hash(values["TAGS"]) if values.get("TAGS") else 0
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            path = self._folder / f"{topic}-{queue_id}"
            queue = self._queues[topic, queue_id] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.write(queue, struct.pack(">q", physical_offset) + struct.pack(">i", size) + struct.pack(">q", tags_code))
        if index:
            self._enter(abs(java_hash(f"{topic}#{values['UNIQ_KEY']}")), physical_offset)

    def _enter(self, hashed: int, physical_offset: int) -> None:
        slot_at = 40 + hashed % _SLOTS * 4
        previous = struct.unpack(">i", os.pread(self._index, 4, slot_at) or bytes(4))[0]
        entry = struct.pack(">iqii", hashed, physical_offset, 0, previous)
        os.pwrite(self._index, entry, 40 + _SLOTS * 4 + self._index_count * 20)
        os.pwrite(self._index, struct.pack(">i", self._index_count), slot_at)
        self._index_count += 1
        os.pwrite(self._index, struct.pack(">qqqqii", 0, 0, 0, physical_offset, 0, self._index_count), 0)

    def get(self, topic: str, queue_id: int, queue_offset: int, count: int) -> list[bytes]:
        """Read messages one by one."""
        records = []
        for i in range(queue_offset, queue_offset + count):
            entry = os.pread(self._queues[topic, queue_id], 20, i * 20)
            physical_offset = struct.unpack(">q", entry[:8])[0]
            records.append(os.pread(self._log, struct.unpack(">i", entry[8:12])[0], physical_offset))
        return records


def _encode(message: InnerMessage, queue_offset: int, physical_offset: int) -> bytes:
    topic = message.topic.encode()
    tail = struct.pack(">i", len(message.body)) + message.body + struct.pack(">b", len(topic)) + topic
    tail += struct.pack(">h", len(message.properties)) + message.properties
    crc, now_ms = zlib.crc32(message.body) & 0x7FFFFFFF, int(time.time() * 1000)
    record = b"".join(struct.pack(">i", n) for n in (84 + len(tail), MAGIC_V1, crc, message.queue_id, message.flag))
    record += struct.pack(">q", queue_offset) + struct.pack(">q", physical_offset)
    record += struct.pack(">i", message.sys_flag) + struct.pack(">q", message.born_timestamp) + message.born_host
    record += struct.pack(">q", now_ms) + message.store_host
    record += struct.pack(">i", message.reconsume_times) + struct.pack(">q", message.prepared_transaction_offset)
    return record + tail


def naive_walk(
    log: memoryview, end: int, *, check_crc: bool = False, store: NaiveStore | None = None
) -> tuple[int, int]:
    """Read every record field by field. Return the number of records and the bytes of their bodies.

    Args:
        check_crc: compare the body checksums.
        store: dispatch the records to this store, if it is given.
    """
    position = count = body_bytes = 0
    while position < end:
        fields: dict[str, int] = {}
        hosts, at = [], position
        for name, letter in HEAD_FIELDS:
            if letter == "host":
                hosts.append(bytes(log[at : at + 8]))
                at += 8
            else:
                fields[name] = struct.unpack_from(">" + letter, log, at)[0]
                at += struct.calcsize(">" + letter)
        assert (fields["magic"], fields["physical_offset"]) == (MAGIC_V1, position), "the record is not damaged"
        body = bytes(log[at : at + fields["body_bytes"]])
        at += len(body)
        topic = bytes(log[at + 1 : at + 1 + log[at]]).decode()
        at += 1 + len(topic)
        properties = bytes(log[at + 2 : at + 2 + struct.unpack_from(">h", log, at)[0]])
        assert not check_crc or zlib.crc32(body) & 0x7FFFFFFF == fields["body_crc"]
        if store is not None:
            store.dispatch(topic, fields["queue_id"], position, fields["size"], properties)
        position += fields["size"]
        count += 1
        body_bytes += len(body)
    return count, body_bytes
