"""A stored message put once more under another topic: what delay delivery, send-back, commit and check-back store.

Body, flag, born data and whatever is not named stay; the copy gets its own offsets, store time and CRC when it is put.
Source: behaviour.md §3.7, §9.1, §9.2; store.md §18.1, §19.3, §20.
"""

from __future__ import annotations

from collections.abc import Mapping

from rmqkit.protocol.properties import PROPERTY_CRC, decode_properties, encode_properties, in_stored_order
from rmqkit.protocol.record import Record
from rmqkit.store.message_store import PutMessage

__all__ = ["message_from", "with_changes"]

_PROPERTY_CRC = PROPERTY_CRC.encode()


def message_from(
    record: Record,
    *,
    topic: str,
    queue_id: int,
    changes: Mapping[str, str | None] | None = None,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    store_host: bytes | None = None,
    prepared_transaction_offset: int = 0,
) -> PutMessage:
    """The message to put for a stored one.
    ``changes``: properties to set, or with None to remove; without changes the stored string is taken as it is.
    ``sys_flag``, ``reconsume_times``, ``store_host``: in place of the record's."""
    properties = record.properties
    if changes or _PROPERTY_CRC in properties:
        properties = with_changes(properties, {PROPERTY_CRC: None, **(changes or {})})
    return PutMessage(
        topic=topic,
        queue_id=queue_id,
        body=record.body,
        properties=properties,
        flag=record.flag,
        sys_flag=record.sys_flag if sys_flag is None else sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_host=record.store_host if store_host is None else store_host,
        reconsume_times=record.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )


def with_changes(properties: bytes, changes: Mapping[str, str | None]) -> bytes:
    """A property string with some properties set, or removed where the value is None."""
    merged = {**decode_properties(properties), **changes}
    kept = [(name, value) for name, value in merged.items() if value is not None]
    return in_stored_order(encode_properties(kept))
