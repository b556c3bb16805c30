"""What the broker asks of a store: `MessageStore` keeps it in files, `MemoryStore` in lists.

Handlers name this type, so that either can be given to them. Retention, flushing and the files themselves are no part
of it: who starts a store knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rmqkit.store.index_file import KeyQuery
from rmqkit.store.put import PutMessage, PutResult
from rmqkit.store.reader import EntryTest, GetResult

__all__ = ["Store"]


class Store(Protocol):
    """Puts and reads; what each does is said at `MessageStore`."""

    @property
    def durable_offset(self) -> int: ...

    @property
    def min_physical_offset(self) -> int: ...

    @property
    def max_physical_offset(self) -> int: ...

    @property
    def dispatched_offset(self) -> int: ...

    @property
    def is_writable(self) -> bool: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def put(self, message: PutMessage) -> PutResult: ...

    def put_batch(self, message: PutMessage) -> PutResult: ...

    def together(self) -> AbstractContextManager[None]: ...

    def request_flush(self) -> None: ...

    def dispatch(self) -> None: ...

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int,
        codes: frozenset[int] | None = None,
        accept: Callable[[memoryview], bool] | None = None,
        accept_entry: EntryTest | None = None,
    ) -> GetResult: ...

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, *, count_max: int
    ) -> list[tuple[int, int, int, int | None]]: ...

    def max_offset(self, topic: str, queue_id: int) -> int: ...

    def min_offset(self, topic: str, queue_id: int) -> int: ...

    def earliest_store_time(self, topic: str, queue_id: int) -> int: ...

    def store_time_at(self, topic: str, queue_id: int, queue_offset: int) -> int: ...

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, *, upper: bool = False) -> int: ...

    def is_in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool: ...

    def record_at(self, physical_offset: int) -> memoryview | None: ...

    def copy_record(self, physical_offset: int, size: int) -> bytes | None: ...

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> KeyQuery: ...

    def delete_topic(self, topic: str) -> None: ...
