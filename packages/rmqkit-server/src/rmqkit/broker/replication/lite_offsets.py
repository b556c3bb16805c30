"""A slave's copy of the offsets of groups in lite topics.

There may be millions of offsets, so a slave copies what its master appended to its files of offsets
(`rmqkit.broker.lite.offsets`): it sends GET_ALL_CONSUMER_OFFSET with a place in these files, and gets the next records
and the place after them. If the master deleted the file of the place, or was restarted, the records begin with the
oldest file. Apache's masters ignore the place and return their own table, which is then left alone. The records name
lite topics, and the slave may not have their messages yet: it enters the records when it has dispatched what the master
had at that time. Lite topics that it still does not know have expired.
"""

from __future__ import annotations

import asyncio

from rmqkit.broker.lite.offsets import LiteOffsets
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_header_leniently, request
from rmqkit.protocol.schemas.offsets import LiteOffsetsRequest, LiteOffsetsResponse
from rmqkit.remoting.client import expect_success
from rmqkit.rpc import BrokerCalls
from rmqkit.store.message_store import MessageStore

__all__ = ["LiteOffsetCopies"]

_TRIES, _PAUSE_SECONDS = 50, 0.1


class LiteOffsetCopies:
    """The copy of one slave. Use it only on the event loop."""

    def __init__(self, offsets: LiteOffsets, store: MessageStore) -> None:
        self._offsets = offsets
        self._store = store
        self._master: str | None = None
        self._file = self._position = 0

    async def copy(self, calls: BrokerCalls, master: str) -> None:
        """Copy the offsets that a master has saved since the last call. Raises RemotingError, PeerRefused, HeaderError:
        the master does not answer, refuses, or sends no place."""
        if master != self._master:
            self._master, self._file, self._position = master, 0, 0
        while True:
            asked = request(RequestCode.GET_ALL_CONSUMER_OFFSET, LiteOffsetsRequest(self._file, self._position))
            answer = expect_success(await calls.call(master, asked), master)
            place = decode_header_leniently(answer, LiteOffsetsResponse)
            if place.lite_file is None or place.lite_position is None:
                return
            if answer.payload:
                if not await self._has_dispatched(place.log_offset):
                    return
                self._offsets.take(bytes(answer.payload))
            is_all = (place.lite_file, place.lite_position) == (self._file, self._position)
            self._file, self._position = place.lite_file, place.lite_position
            if is_all or not answer.payload:
                return

    async def _has_dispatched(self, log_offset: int) -> bool:
        """Wait until all messages before a physical offset are in their queues. Return False if this takes long."""
        for _ in range(_TRIES):
            if self._store.dispatched_offset >= log_offset:
                return True
            await asyncio.sleep(_PAUSE_SECONDS)
        return False
