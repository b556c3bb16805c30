"""Queue locks: brokers keep a queue for one client of a group, so that it is consumed in order (LOCK_BATCH_MQ).

A broker's lock lives 60 s after it was last asked for; here it counts for 30 s, and the consumer renews it every 20 s.
A queue is given to its next owner in this order: handler ended, offset saved, lock given back.
Loop only. Source: behaviour.md §2.7, §8.10; remoting.md §4.3.5.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import ConnectFailed, RmqError
from rmqkit.protocol.schemas.clients import MessageQueue

LOCAL_LOCK_MS = 30_000
"""ms that a lock counts here after the broker last granted it; the broker keeps it twice as long."""

_log = logging.getLogger(__name__)


class ClientQueueLocks:
    """The locks of one group's member; ``asked`` are the queues that a broker may keep for it, ``errors`` are those of
    brokers that did not answer when last asked."""

    def __init__(self, runtime: ClientRuntime, group: str) -> None:
        self._runtime = runtime
        self._group = group
        self._granted_ms: dict[MessageQueue, float] = {}
        self.asked: set[MessageQueue] = set()
        self.errors: dict[str, RmqError] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """Whether the lock is certain: the broker granted it, and so recently that it cannot have run out."""
        granted_ms = self._granted_ms.get(queue)
        return granted_ms is not None and self._runtime.clock.monotonic_ms() - granted_ms < LOCAL_LOCK_MS

    def error_of(self, queue: MessageQueue) -> RmqError | None:
        """The error of the last request to the broker of a queue, None when it answered."""
        return self.errors.get(self._runtime.routes.broker_of(queue))

    def granted_at_ms(self, queue: MessageQueue) -> int:
        """When a broker last granted a lock, in ms since the epoch; 0 when it is not here."""
        granted_ms = self._granted_ms.get(queue)
        clock = self._runtime.clock
        return 0 if granted_ms is None else clock.now_ms() - round(clock.monotonic_ms() - granted_ms)

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues or renew their locks; those that another client holds. A broker that does not answer is logged:
        its queues' locks stay as they are."""
        refused = await asyncio.gather(*(self._lock(name, some) for name, some in self._by_broker(queues).items()))
        return set().union(*refused)

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Give locks back; one that cannot be ends by itself after 60 s."""
        await asyncio.gather(*(self._unlock(name, some) for name, some in self._by_broker(queues).items()))

    async def _lock(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        address = self._runtime.routes.address(broker_name)
        # When it was asked, not when it answered: the broker's 60 s began in between.
        asked_ms = self._runtime.clock.monotonic_ms()
        try:
            if address is None:
                raise ConnectFailed(broker_name, "no route names its master", NOT_REGISTERED)
            self.asked.update(queues)  # a grant whose answer does not come has to be given back, too
            granted = await self._runtime.calls.lock_queues(address, self._group, self._runtime.client_id, queues)
        except RmqError as error:
            if self.errors.get(broker_name) is None:
                _log.warning("locks of group %s at broker %s: %s", self._group, broker_name, error)
            self.errors[broker_name] = error
            return set()
        self.errors.pop(broker_name, None)
        self._granted_ms.update(dict.fromkeys(granted, asked_ms))
        refused = set(queues) - granted
        for queue in refused:
            self._granted_ms.pop(queue, None)
        self.asked -= refused
        return refused

    async def _unlock(self, broker_name: str, queues: list[MessageQueue]) -> None:
        # Given up here before it is at the broker: no handler of ours may begin once another member can have it.
        for queue in queues:
            self._granted_ms.pop(queue, None)
        self.asked.difference_update(queues)
        address = self._runtime.routes.address(broker_name)
        try:
            if address is not None:
                await self._runtime.calls.unlock_queues(address, self._group, self._runtime.client_id, queues)
        except RmqError as error:
            _log.warning("unlocking queues of group %s at broker %s: %s", self._group, broker_name, error)

    def _by_broker(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        grouped: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            grouped[self._runtime.routes.broker_of(queue)].append(queue)
        return grouped
