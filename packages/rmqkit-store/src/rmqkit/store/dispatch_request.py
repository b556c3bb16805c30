"""A record on its way to the queues and the index. Source: store.md §4.2, §11."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.properties import Keys

__all__ = ["DispatchRequest"]


class DispatchRequest(Struct, gc=False):
    """A record with the facts that queues, index and owner need (``DispatchRequest``).

    Attributes:
        queue_offset: number of the message in its queue; for an inner batch, the number of the first message.
        tags_code: hash of the tags, or the delivery time in the delay topic.
        physical_offset, size: place of the record in the log, in bytes.
        properties: the stored property string.
        batch_count: number of messages in an inner batch.
        keys, hashes: the index keys, or their hashes (4 bytes each in the machine's byte order), if the put knew
            them. Otherwise the index reads the keys from ``properties``.
    """

    topic: str
    queue_id: int
    queue_offset: int
    tags_code: int
    store_timestamp: int
    physical_offset: int
    size: int
    sys_flag: int
    properties: bytes
    batch_count: int = 1
    keys: Keys | None = None
    hashes: bytes | None = None
