"""Reads of messages that were deleted from the log but still exist in another place.

A read never waits. It returns one of three things:

==============  =======================================================================================================
messages        the read is complete
no messages     the request is answered without messages, or held
`Missing`       these messages have to be fetched first. The read has changed nothing
==============  =======================================================================================================

For pulls and pops, only `read_when_fetched` waits. It fetches the missing messages and repeats the read with them. If
the group is at another offset by then, the read does not use the fetched messages. `when_found` is for lookups by key,
id and time, which need one fetch.

Other requests do not wait meanwhile. A broker without such a place starts no tasks and makes no calls for it
(`rmqkit.store.message_store.MessageStore.older` is None). The archive is the only place (`rmqkit.broker.archive`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from rmqkit.broker.tables.filters import PullFilter
from rmqkit.protocol.command import Command
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import GetResult, OlderQueues

__all__ = ["FETCHES_MAX", "Fetched", "Missing", "OlderMessages", "read_when_fetched", "when_found"]

FETCHES_MAX = 8
"""The maximum number of fetches for one request. A request needs more only if other consumers of the group are always
faster, or if the filter matches hardly any message. Then the client retries."""

T = TypeVar("T")


class OlderMessages(OlderQueues, Protocol):
    """A place with messages that were deleted from the log. A read raises PeerRefused if the client has to retry, and
    StoreError or OSError if the messages cannot be read. ``connection`` is None for the broker itself."""

    def first_offset(self, topic: str, queue_id: int) -> int: ...

    async def get(
        self,
        connection: Connection | None,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
    ) -> GetResult: ...

    async def record_at(self, connection: Connection, physical_offset: int) -> memoryview | None: ...

    async def query(
        self,
        connection: Connection,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        bytes_max: int,
    ) -> list[memoryview]: ...

    async def offset_by_time(
        self, connection: Connection, topic: str, queue_id: int, timestamp_ms: int
    ) -> int | None: ...


class Missing(NamedTuple):
    """The messages of a queue, from an offset on, that a read needs and that have to be fetched."""

    topic: str
    queue_id: int
    queue_offset: int
    count_max: int
    wanted: PullFilter


class Fetched(NamedTuple):
    """The fetched messages of a queue, from an offset on."""

    topic: str
    queue_id: int
    queue_offset: int
    found: GetResult


async def read_when_fetched(
    older: OlderMessages,
    connection: Connection,
    missing: Missing,
    read: Callable[[Fetched], Command | Missing | None],
    *,
    otherwise: Command | None = None,
) -> Command | None:
    """Fetch the missing messages and repeat the read until no messages are missing. Return the answer of the read.
    After `FETCHES_MAX` fetches return ``otherwise``. If the connection is closed, return None without another read.
    Raises the errors of `OlderMessages` and of the read."""
    for _ in range(FETCHES_MAX):
        topic, queue_id, queue_offset, count_max, wanted = missing
        found = await older.get(
            connection, topic, queue_id, queue_offset, count_max=count_max, codes=wanted.codes, accept=wanted.accept
        )
        # Do not read for a closed connection: a pop would hide messages, and no client would acknowledge them.
        if connection.closed.done():
            return None
        answer = read(Fetched(topic, queue_id, queue_offset, found))
        if not isinstance(answer, Missing):
            return answer
        missing = answer
    return otherwise


async def when_found(looking: Awaitable[T], answer: Callable[[T], Command]) -> Command:
    """Await a lookup and return the answer that is made from its result."""
    return answer(await looking)
