"""The POP state of a broker: in-flight messages, ordered pops, waiting requests and the revive schedule
(``PopBufferMergeService``, ``PopReviveService``, ``PopLongPollingService``).

==================  ===================================================================================================
`check_points`      check points and acks in the revive topic, and the batch that stores those of one loop tick
`in_flight`         the pops that are in flight, and when their messages are redelivered
`order`             messages that were popped in order
`revive`            redelivery of messages through retry topics
`PopLongPolling`    pops and NOTIFICATION requests that found nothing and wait
==================  ===================================================================================================

Only a master serves pops. A slave copies the revive topic with the rest of the log.

Waiting requests are grouped by topic and group, in the order of their arrival. A message that arrives in the topic, or
in a retry topic that the group has for the topic, wakes one request. The request is retried in the next loop tick. A
request that leaves messages in the queue wakes the next request. A request that finds nothing continues to wait and is
retried at the end of its time. If a message wakes many requests, they are retried in slices, and the loop runs other
tasks in between.
Use this module only on the event loop. Source: behaviour.md §4.7, §4.8.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.older import OlderMessages
from rmqkit.broker.pop.check_points import CheckPointStore, PopWriteBatch, revive_topic
from rmqkit.broker.pop.order import OrderTable
from rmqkit.broker.pop.revive import Revive
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock, SteadyClock
from rmqkit.metrics import Gathered
from rmqkit.protocol.names import RETRY_PREFIX, is_light, pop_retry_topic
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Tasks, Turns
from rmqkit.store.message_store import DispatchRequest, MessageStore, StoredSends
from rmqkit.store.settings import StoreSettings
from rmqkit.store.table_journal import journal_of
from rmqkit.system import disk

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["PopLongPolling", "PopService", "WaitingPop"]

_WRITING_MS = 100
"""The maximum time between the copy of a table and the write of its file."""
_ANY_QUEUE = -1
_LATE_MS = 20
_AT_ONCE_MAX = 32

_log = logging.getLogger(__name__)


class PopContext(Protocol):
    """The parts of the broker that pops and acks use."""

    clients: ClientTable
    clock: Clock
    counts: Counts | None
    durability: Durability | None
    groups: GroupTable
    identity: OwnAddress
    lite: LiteService | None
    offsets: OffsetTable
    pop: PopService | None
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    store_settings: StoreSettings
    topics: TopicTable

    @property
    def older(self) -> OlderMessages | None: ...

    def first_offset(self, topic: str, queue_id: int) -> int: ...


class PopService:
    """The parts of POP of one broker.

    Attributes:
        clock: the clock of pops. It never goes back: otherwise messages in flight would be redelivered later.
        waiting: pops that wait for a message.
        notifications: NOTIFICATION requests that wait for a message.
        fetching: tasks of woken pops. They fetch messages that were deleted from the log.
    """

    def __init__(
        self,
        folder: Path,
        store: MessageStore,
        topics: TopicTable,
        groups: GroupTable,
        offsets: OffsetTable,
        settings: BrokerSettings,
        clock: Clock,
        store_host: bytes,
        older: OlderMessages | None = None,
    ) -> None:
        self.clock = clock = SteadyClock(clock)
        self.check_points = CheckPointStore(store, groups, offsets, settings, clock, store_host)
        self.batch = PopWriteBatch(self.check_points)
        self.orders = OrderTable(folder, clock)
        self.waiting = PopLongPolling(settings, clock)
        self.notifications = PopLongPolling(settings, clock)
        self.fetching = Tasks()
        self.revive = Revive(self.check_points, store, topics, groups, offsets, settings, store_host, older)
        self._offsets_path, self._groups_path = folder / "consumerOffset.json", groups.saved.file.path
        self._revive_topic = revive_topic(settings.cluster_name)
        self._topics = topics

    def load(self) -> None:
        """Read the pending pops from the store, which is open."""
        self.orders.load()
        config = self._topics.get(self._revive_topic)
        assert config is not None, "the revive topic exists from the start"
        # Read the files' times now: the start writes both files later, which changes the times.
        offsets_at_ms = _written_ms(self._offsets_path)
        groups_at_ms = max(map(_written_ms, (self._groups_path, journal_of(self._groups_path))))
        self.check_points.load(max(1, config.write_queue_nums), offsets_at_ms=offsets_at_ms, groups_at_ms=groups_at_ms)

    def gather(self) -> Gathered:
        """Return the values of POP's metrics. Source: behaviour.md §9.10."""
        counts, late = self.check_points.counts, self.check_points.late
        counts.drop_topics(lambda topic: self._topics.get(topic) is None)
        check_points, offsets = self.check_points.buffered
        return {
            "rocketmq_pop_buffer_scan_time_consume": {(): counts.scan_ms},
            "rocketmq_pop_revive_in_message_total": counts.put,
            "rocketmq_pop_revive_out_message_total": counts.done,
            "rocketmq_pop_revive_retry_messages_total": counts.revived,
            "rocketmq_pop_revive_lag": {(str(queue_id),): count for queue_id, (count, _) in late.items()},
            "rocketmq_pop_revive_latency": {(str(queue_id),): ms for queue_id, (_, ms) in late.items()},
            "rocketmq_pop_offset_buffer_size": {(): offsets},
            "rocketmq_pop_checkpoint_buffer_size": {(): check_points},
        }

    def connection_closed(self, connection: Connection) -> None:
        self.waiting.connection_closed(connection)
        self.notifications.connection_closed(connection)

    async def close(self) -> None:
        """Answer the waiting requests. Cancel pops that still fetch messages: they have hidden no messages yet."""
        self.waiting.close()
        # After `waiting.close`, which retries each pop: the batch stores their check points and answers them.
        self.batch.end()
        self.notifications.close()
        await self.fetching.close()

    def persist(self) -> None:
        """Store the state that is only in memory when the broker stops. The store is still open."""
        self.batch.end()
        # Write the acks before the offset: the revive group's offset stops at check points with unwritten acks.
        self.check_points.write_acks()
        self.check_points.commit()
        if self.orders.is_dirty:
            self.orders.persist()


def _written_ms(path: Path) -> int:
    """Return the time up to which a table's file contains all changes, in ms; 0 for a missing file."""
    return disk.modified_ms(path) - _WRITING_MS if disk.exists(path) else 0


@dataclass(slots=True, eq=False)
class WaitingPop:
    """One waiting request.

    Attributes:
        queue_id: -1 for all queues of the topic.
        until_ms: the time at which the request expires, by the clock of pops.
        retry: answers the request, or holds it again if nothing was found and the argument is True.
        wants: returns True if an arrived message passes the request's filter.
        look_at_ms: the time of a retry without a new message, because a blocked queue becomes free; None: never.
    """

    connection: Connection
    topic: str
    group: str
    queue_id: int
    until_ms: int
    retry: Callable[[bool], None]
    wants: Callable[[DispatchRequest], bool]
    look_at_ms: int | None = None
    timer: asyncio.TimerHandle | None = field(default=None, init=False)


_Several = dict[WaitingPop, None]


class PopLongPolling:
    """The waiting requests of one kind."""

    def __init__(self, settings: BrokerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, dict[str, _Several]] = {}
        self._counts: dict[tuple[str, str, int], int] = {}
        self._connections: dict[Connection, _Several] = {}
        self._woken: _Several = {}
        self._turns = Turns(lambda error: _log.error("cannot wake held pops", exc_info=error))
        self._count = self._light_count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._count

    def count(self, topic: str, group: str, queue_id: int) -> int:
        """Return the number of requests that wait for a queue. Queue id -1: requests for any queue."""
        return self._counts.get((topic, group, queue_id), 0)

    def hold(self, held: WaitingPop) -> bool:
        """Hold a request. Return False if there are too many, or if the broker stops."""
        place = (held.topic, held.group, held.queue_id)
        settings = self._settings
        if (
            self._is_closed
            or self._count >= settings.pops_held_max
            or self.count(*place) >= settings.pops_held_per_queue_max
        ):
            return False
        assert held not in self._connections.get(held.connection, ()), "a request is held once"
        for topic in _topics_of(held):
            self._waiting.setdefault(topic, {}).setdefault(held.group, {})[held] = None
        self._connections.setdefault(held.connection, {})[held] = None
        self._counts[place] = self.count(*place) + 1
        self._count += 1
        self._light_count += is_light(held.topic)
        at_ms = held.until_ms if held.look_at_ms is None else min(held.until_ms, held.look_at_ms)
        seconds = max(0, at_ms - self._clock.now_ms()) / 1000
        held.timer = self._loop.call_later(seconds, self._check_waiting, held)
        return True

    def arrived(self, requests: Sequence[DispatchRequest]) -> None:
        """Wake one request of each group that waits for these messages."""
        if not self._count:
            return
        if isinstance(requests, StoredSends):
            places = [*requests.places, *(requests.light_places if self._light_count else ())]
            if not any(topic in self._waiting for topic, _ in places):
                return
        woken: set[tuple[str, str, int]] = set()
        for stored in requests:
            groups = self._waiting.get(stored.topic)
            if groups is None:
                continue
            if len(groups) > _AT_ONCE_MAX:
                self._turns.add(map(partial(self._wake_one, stored, woken), list(groups)))
                continue
            for group in groups:
                self._wake_one(stored, woken, group)

    def _wake_one(self, stored: DispatchRequest, woken: set[tuple[str, str, int]], group: str) -> None:
        """Wake one request of a group. ``woken``: topic, group and queue of the requests that are woken already."""
        place = (stored.topic, group, stored.queue_id)
        if place in woken:
            return
        is_retry = stored.topic.startswith(RETRY_PREFIX)
        for held in self._waiting.get(stored.topic, {}).get(group, ()):
            # Requests never name the queue of a retry topic. Its messages have passed the group's filter before.
            is_here = is_retry or held.queue_id in (_ANY_QUEUE, stored.queue_id)
            if is_here and (is_retry or held.wants(stored)) and held not in self._woken:
                woken.add(place)
                self._wake(held)
                break

    def wake(self, topic: str, group: str, queue_id: int = _ANY_QUEUE) -> None:
        """Wake the next request for a queue, or for any queue of the topic, because there are more messages."""
        for held in self._waiting.get(topic, {}).get(group, ()):
            is_meant = queue_id == _ANY_QUEUE or held.queue_id in (_ANY_QUEUE, queue_id)
            if is_meant and held not in self._woken:
                return self._wake(held)
        return None

    def connection_closed(self, connection: Connection) -> None:
        """Drop the requests of a closed connection."""
        for held in list(self._connections.get(connection, ())):
            self._drop(held)

    def close(self) -> None:
        """Answer all waiting requests when the broker stops."""
        self._is_closed = True
        for held in [held for several in self._connections.values() for held in several]:
            self._retry(held, may_hold=False)

    # -- inside

    def _wake(self, held: WaitingPop) -> None:
        """Retry a request in the next tick. A put calls this, and a pop inside a put would put a check point."""
        if not self._woken:
            self._loop.call_soon(self._retry_woken)
        self._woken[held] = None

    def _retry_woken(self) -> None:
        woken, self._woken = self._woken, {}
        if len(woken) > _AT_ONCE_MAX:
            self._turns.add(map(partial(self._retry, may_hold=True), woken))
            return
        for held in woken:
            self._retry(held, may_hold=True)

    def _check_waiting(self, held: WaitingPop) -> None:
        # The loop's timer and the wall clock differ by some ms: the time is over even if the timer fires a bit early.
        self._retry(held, may_hold=self._clock.now_ms() < held.until_ms - _LATE_MS)

    def _retry(self, held: WaitingPop, *, may_hold: bool) -> None:
        # The connection may have closed, or the timer fired, before this call. A pop would then hide messages without
        # sending them to a client.
        if held not in self._connections.get(held.connection, ()):
            return
        self._drop(held)
        try:
            held.retry(may_hold)
        except Exception:  # noqa: BLE001 - the outer edge of a held request: a fault of one must not reach others
            _log.exception("cannot answer a waiting pop of %s by %s", held.topic, held.group)

    def _drop(self, held: WaitingPop) -> None:
        self._woken.pop(held, None)
        assert held.timer is not None, "a held request has a timer"
        held.timer.cancel()
        for topic in _topics_of(held):
            groups = self._waiting[topic]
            del groups[held.group][held]
            if not groups[held.group]:
                del groups[held.group]
                if not groups:
                    del self._waiting[topic]
        del self._connections[held.connection][held]
        if not self._connections[held.connection]:
            del self._connections[held.connection]
        place = (held.topic, held.group, held.queue_id)
        self._counts[place] -= 1
        assert self._counts[place] >= 0, "each waiting request counts once"
        if not self._counts[place]:
            del self._counts[place]
        self._count -= 1
        self._light_count -= is_light(held.topic)


def _topics_of(held: WaitingPop) -> tuple[str, ...]:
    """Return the topics in which messages for a request arrive."""
    return held.topic, *(pop_retry_topic(held.group, held.topic, mark) for mark in "_+")
