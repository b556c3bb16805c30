"""Batches of many messages. They are prepared and dispatched in slices, and stored with one put.

The loop runs other tasks between the slices. Only one batch at a time is prepared, because a batch needs a hundred
bytes per message. The connection of the batch is not read meanwhile, so that later sends of the connection cannot
overtake the batch. Use this module only on the event loop. Source: behaviour.md §3.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from rmqkit.protocol.ids import offset_ids
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Slice
from rmqkit.store.long_batch import LongBatch
from rmqkit.store.message_store import InnerMessage, MessageStore, PutResult, PutStatus

__all__ = ["LongBatches", "StoredBatch"]

_UNDER_WAY_MAX = 32
"""The maximum number of long batches that are being stored or wait. The broker refuses further batches as busy."""


class StoredBatch(NamedTuple):
    """The result of a long batch. ``ids``: the offset ids of its records. ``records``: the number of its records."""

    put: PutResult
    ids: str
    records: int
    messages: int


class LongBatches:
    """The queue of long batches. They are stored one after the other."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._under_way = 0

    @property
    def is_full(self) -> bool:
        """Return True if a further batch has to be refused."""
        return self._under_way >= _UNDER_WAY_MAX

    def put(self, connection: Connection, message: InnerMessage) -> Awaitable[StoredBatch]:
        """Store a long batch (`is_long`). The connection is not read until the batch is stored."""
        assert not self.is_full, "there is room for a further batch"
        self._under_way += 1
        connection.hold()
        return self._put(connection, message)

    async def _put(self, connection: Connection, message: InnerMessage) -> StoredBatch:
        try:
            async with self._turn:
                return await self._put_in_slices(message)
        finally:
            assert self._under_way > 0, "the count includes this batch"
            self._under_way -= 1
            # Resume reading even if the put failed: otherwise the connection would never be read again.
            connection.go_on()

    async def _put_in_slices(self, message: InnerMessage) -> StoredBatch:
        now, batch = Slice(), LongBatch(message)
        for _ in self._store.prepare(batch):
            await now.pause_if_over()
        await now.pause()
        put = self._store.put_long_batch(batch)
        await now.pause()
        while self._store.dispatch():
            await now.pause_if_over()
        if put.status is not PutStatus.OK or put.physical_offsets:
            ids = offset_ids(message.store_host, put.physical_offsets)
            return StoredBatch(put, ids, len(put.physical_offsets), batch.count)
        parts: list[str] = []
        for offsets in batch.physical_offsets():
            parts.append(offset_ids(message.store_host, offsets))
            await now.pause_if_over()
        return StoredBatch(put, ",".join(parts), batch.count, batch.count)
