"""Batches of many messages: prepared and dispatched in slices, between which the loop runs, and stored with one put.

One batch at a time is prepared, because each needs a hundred bytes per message. Its connection is not read meanwhile,
so that later sends of that connection cannot overtake the batch. Loop only. Source: behaviour.md §3.6.
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
"""The number of long batches that may be stored or waiting. The broker refuses further ones as busy."""


class StoredBatch(NamedTuple):
    """A long batch that was put. ``ids``: the offset ids of its records. ``records``: the number of its records."""

    put: PutResult
    ids: str
    records: int
    messages: int


class LongBatches:
    """The queue of long batches, which are stored one after the other."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._under_way = 0

    @property
    def is_full(self) -> bool:
        """Return whether a further batch has to be refused."""
        return self._under_way >= _UNDER_WAY_MAX

    def put(self, connection: Connection, message: InnerMessage) -> Awaitable[StoredBatch]:
        """Store a batch that `is_long`. The connection is not read until the batch is stored."""
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
            # Also if the put failed: a connection that stays held is never read again.
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
