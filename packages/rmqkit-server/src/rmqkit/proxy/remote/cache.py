"""A cache of brokers' answers in a proxy (the Caffeine caches of ``ClusterMetadataService``).

Source: grpc.md §11.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rmqkit.clock import Clock
from rmqkit.errors import RmqError

__all__ = ["Cache"]

_FRESH_MS = 20_000.0
# Short, because a topic may have been created just now. Apache's proxy does not see a new topic for 20 s to 5 minutes.
_ABSENT_MS = 1000.0
_COUNT_MAX = 10_000

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Cache(Generic[T]):
    """A bounded cache of answers by name. Answers expire after 20 s. Concurrent calls for a name share one request.

    Args:
        fetch: requests the answer for a name; the answer None is cached for a second.
        stale_ms: the age up to which an answer is used while new requests fail.
    """

    def __init__(
        self, fetch: Callable[[str], Awaitable[T | None]], clock: Clock, *, stale_ms: float = math.inf
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._stale_ms = stale_ms
        self._kept: OrderedDict[str, tuple[float, T | None]] = OrderedDict()
        self._asked: dict[str, asyncio.Future[T | None]] = {}

    async def find(self, name: str) -> T | None:
        """Return the answer for a name. Raises RmqError: the request failed, and no usable answer is cached."""
        came_ms, found = self._kept.get(name, (-math.inf, None))
        age_ms = self._clock.monotonic_ms() - came_ms
        if age_ms < (_ABSENT_MS if found is None else _FRESH_MS):
            return found
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = asyncio.ensure_future(self._fetch(name))
            asked.add_done_callback(lambda done: self._take(name, done))
        try:
            return await asyncio.shield(asked)
        except RmqError as error:
            if found is None or age_ms >= self._stale_ms:
                raise
            _log.warning("%s: using the last known answer: %s", name, error)
            return found

    def _take(self, name: str, done: asyncio.Future[T | None]) -> None:
        del self._asked[name]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[name] = self._clock.monotonic_ms(), done.result()
        self._kept.move_to_end(name)
        if len(self._kept) > _COUNT_MAX:
            self._kept.popitem(last=False)
