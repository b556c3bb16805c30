"""A message for a put, and the result of the put (``MessageExtBrokerInner``, ``PutMessageResult``).
Source: store.md §3.6, §14."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct

from rmqkit.protocol.properties import (
    KEYS,
    TAGS,
    UNIQ_KEY,
    Keys,
    decode_properties,
    encode_in_stored_order,
    find_keys,
)

__all__ = ["InnerMessage", "PutResult", "PutStatus"]


class PutStatus(enum.Enum):
    """The result of a put. Source: store.md §14.
    ``OS_PAGE_CACHE_BUSY`` means that the disk is slow: the next log file, or a buffer of the transient store pool, is
    not ready yet. (In Apache's broker it means that a thread held the append lock for too long.)"""

    OK = "PUT_OK"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPPED_FILE_FAILED = "CREATE_MAPPED_FILE_FAILED"
    OS_PAGE_CACHE_BUSY = "OS_PAGE_CACHE_BUSY"
    LIGHT_QUEUES_EXCEEDED = "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"


class InnerMessage(Struct, gc=False):
    """A message on its way from a request to the log. Its properties are decoded and encoded at most once.

    Attributes:
        body: the body to store; for `MessageStore.put_batch` the wire batch body.
        string: the property string; None while only ``values`` holds the properties.
        born_host, store_host: packed IP and port, 8 or 20 bytes.
        keys: UNIQ_KEY, KEYS and TAGS, if the sender knows them and knows that there is no INNER_NUM. Otherwise
            `index_keys` finds them.
        values: the properties by name; None before the first use of `parsed`. The dict is never changed: each step
            creates a new dict.
        was_accepted: whether the message is a copy of a stored message. A lowered ``maxMessageSize`` does not refuse
            it.
    """

    topic: str
    queue_id: int
    body: bytes
    string: bytes | None
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    keys: Keys | None = None
    values: dict[str, str] | None = None
    was_accepted: bool = False

    @property
    def properties(self) -> bytes:
        """The property string. Raises ValueError: a value contains the separator 0x02."""
        # Encode late and once: a special send passes several steps, and only the final properties are written.
        if self.string is None:
            assert self.values is not None, "a message has its properties as a string or as values"
            self.string = encode_in_stored_order(self.values)
        return self.string

    @property
    def parsed(self) -> dict[str, str]:
        """The properties by name; the caller must not change them."""
        if self.values is None:
            self.values = decode_properties(self.properties)
        return self.values

    def index_keys(self) -> Keys:
        """Return the properties that determine the tags code and the index entries."""
        if self.keys is None:
            values = self.values
            if values is None:
                self.keys = find_keys(self.properties)
            else:
                # Find the same keys as a reader of the encoded string: encoding drops properties without a value.
                get = values.get
                unique_key, words, tags = get(UNIQ_KEY, ""), get(KEYS, ""), get(TAGS, "")
                self.keys = (
                    unique_key.encode("utf-8", "replace"),
                    words.encode("utf-8", "replace"),
                    tags.encode("utf-8", "replace"),
                )
        return self.keys


class PutResult(Struct, gc=False):
    """The result of a put.

    Attributes:
        physical_offset: offset of the record, or of the first record of a batch.
        end_offset: end of the last written byte. The message is on the disk when ``store.durable_offset`` has reached
            it.
        queue_offset: number of the message in its queue, or of the first message of a batch.
        physical_offsets: the offset of each message of a batch.
        light_offset: number of the message in its first light queue, -1 without one.
        lite_epoch: life of the message's lite topic; 0 without one.
        reason: the reason of a refusal.
    """

    status: PutStatus
    physical_offset: int = -1
    end_offset: int = -1
    queue_offset: int = -1
    store_timestamp: int = 0
    physical_offsets: Sequence[int] = ()
    light_offset: int = -1
    lite_epoch: int = 0
    reason: str = ""
