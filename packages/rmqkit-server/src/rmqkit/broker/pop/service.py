"""The POP state of a broker: in-flight messages, ordered pops, waiting requests and the revive schedule
(``PopBufferMergeService``, ``PopReviveService``, ``PopLongPollingService``).

==================  ===================================================================================================
`check_points`      check points and acks in the revive topic, and what one tick stores of both
`in_flight`         the pops that are in flight, and when their messages are redelivered
`order`             the messages that were popped in order
`revive`            messages that were not acknowledged in time are put into retry topics
`PopLongPolling`    pops and NOTIFICATION requests that found nothing wait here
==================  ===================================================================================================

Only a master pops; a slave has the revive topic with the rest of the log.

Waiting requests are grouped by topic and group, in the order they came. A message that arrives, in the topic or in one
of the group's retry topics of it, lets one of them look again, in the next tick. A request that takes some of several
messages wakes the next one. A request that finds nothing continues to wait and looks again at the end of its time. If a
message concerns many groups or requests, they look in slices, and the loop runs other tasks in between.
Loop only. Source: behaviour.md §4.7, §4.8.
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
from rmqkit.protocol.names import RETRY_PREFIX, pop_retry_topic
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Tasks, Turns
from rmqkit.store.message_store import DispatchRequest, MessageStore, StoredSends

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["PopLongPolling", "PopService", "WaitingPop"]

_WRITING_MS = 100
"""How long the tables of offsets and groups are on their way to the disk, at the most, where that matters."""
_ANY_QUEUE = -1
_LATE_MS = 20
_AT_ONCE_MAX = 32

_log = logging.getLogger(__name__)


class PopContext(Protocol):
    """The parts of the broker that pops and acks may touch."""

    clients: ClientTable
    clock: Clock
    counts: Counts | None
    durability: Durability | None
    groups: GroupTable
    identity: OwnAddress
    offsets: OffsetTable
    pop: PopService | None
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    topics: TopicTable

    @property
    def older(self) -> OlderMessages | None: ...

    def first_offset(self, topic: str, queue_id: int) -> int: ...


class PopService:
    """Joins the parts of POP of one broker, and starts and stops them.

    Attributes:
        clock: the time of pops. It never goes back, or messages in flight would wait for as long as the clock was set.
        waiting: pops that wait for a message.
        notifications: NOTIFICATION requests that wait for one.
        fetching: pops that waited and now fetch messages which the log has deleted.
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
        self._offsets_path, self._groups_path = folder / "consumerOffset.json", folder / "subscriptionGroup.json"
        self._revive_topic = revive_topic(settings.cluster_name)
        self._topics = topics

    def load(self) -> None:
        """Read what is pending; the store is open."""
        self.orders.load()
        config = self._topics.get(self._revive_topic)
        assert config is not None, "it exists from the start"
        # Of the last run: the start writes both files behind this, and their times would say that they know of
        # everything.
        offsets_at_ms, groups_at_ms = map(_written_ms, (self._offsets_path, self._groups_path))
        self.check_points.load(max(1, config.write_queue_nums), offsets_at_ms=offsets_at_ms, groups_at_ms=groups_at_ms)

    def gather(self) -> Gathered:
        """The values of POP's metrics. Source: behaviour.md §9.10."""
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
        """Answer the requests that wait. Pops that fetch are cancelled: they have hidden no messages yet."""
        self.waiting.close()
        # Behind the pops: each looks a last time as it is closed, and is answered when what it took is stored.
        self.batch.end()
        self.notifications.close()
        await self.fetching.close()

    def persist(self) -> None:
        """Store what only memory has, as the broker stops; the store is still open."""
        self.batch.end()
        # Before the offset: while an ack has no record, the revive group stays in front of its check point.
        self.check_points.write_acks()
        self.check_points.commit()
        if self.orders.is_dirty:
            self.orders.persist()


def _written_ms(path: Path) -> int:
    """The time up to which a table's file knows of everything; 0 for one that was not written yet."""
    return path.stat().st_mtime_ns // 1_000_000 - _WRITING_MS if path.exists() else 0


@dataclass(slots=True, eq=False)
class WaitingPop:
    """One waiting request.

    Attributes:
        queue_id: -1 for all queues of the topic.
        until_ms: the end of its time, in the time of pops.
        retry: looks again; its argument says whether it may continue to wait. It answers, or holds itself again.
        wants: whether a message that arrives is of interest.
        look_at_ms: when there may be something although nothing arrives; None: never.
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
        self._count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._count

    def count(self, topic: str, group: str, queue_id: int) -> int:
        """Requests that wait for a queue, or with -1 for any queue."""
        return self._counts.get((topic, group, queue_id), 0)

    def hold(self, held: WaitingPop) -> bool:
        """Keep a request; False when there is no room for it, or the broker stops."""
        place = (held.topic, held.group, held.queue_id)
        settings = self._settings
        if (
            self._is_closed
            or self._count >= settings.pops_held_max
            or self.count(*place) >= settings.pops_held_per_queue_max
        ):
            return False
        assert held not in self._connections.get(held.connection, ()), "a request waits once, until it looks again"
        for topic in _topics_of(held):
            self._waiting.setdefault(topic, {}).setdefault(held.group, {})[held] = None
        self._connections.setdefault(held.connection, {})[held] = None
        self._counts[place] = self.count(*place) + 1
        self._count += 1
        at_ms = held.until_ms if held.look_at_ms is None else min(held.until_ms, held.look_at_ms)
        seconds = max(0, at_ms - self._clock.now_ms()) / 1000
        held.timer = self._loop.call_later(seconds, self._check_waiting, held)
        return True

    def arrived(self, requests: Sequence[DispatchRequest]) -> None:
        """Let one request of each group that waits for these messages look again, soon."""
        if not self._count:
            return
        if isinstance(requests, StoredSends) and not any(topic in self._waiting for topic, _ in requests.places):
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
        """Wake one request of a group; ``woken``: the queues of groups that these messages woke already."""
        place = (stored.topic, group, stored.queue_id)
        if place in woken:
            return
        is_retry = stored.topic.startswith(RETRY_PREFIX)
        for held in self._waiting.get(stored.topic, {}).get(group, ()):
            # A retry topic has one queue, which no request names, and only what passed the group's filter before.
            is_here = is_retry or held.queue_id in (_ANY_QUEUE, stored.queue_id)
            if is_here and (is_retry or held.wants(stored)) and held not in self._woken:
                woken.add(place)
                self._wake(held)
                break

    def wake(self, topic: str, group: str, queue_id: int = _ANY_QUEUE) -> None:
        """Let the next request for a queue, or any of the topic, look again: there is more."""
        for held in self._waiting.get(topic, {}).get(group, ()):
            is_meant = queue_id == _ANY_QUEUE or held.queue_id in (_ANY_QUEUE, queue_id)
            if is_meant and held not in self._woken:
                return self._wake(held)
        return None

    def connection_closed(self, connection: Connection) -> None:
        """Drop the requests of a connection that is gone."""
        for held in list(self._connections.get(connection, ())):
            self._drop(held)

    def close(self) -> None:
        """Answer everything that waits, as the broker stops."""
        self._is_closed = True
        for held in [held for several in self._connections.values() for held in several]:
            self._retry(held, may_hold=False)

    # -- inside

    def _wake(self, held: WaitingPop) -> None:
        """Not at once: whoever puts messages must not find itself in the middle of a pop that puts a check point."""
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
        # The loop's timer and the wall clock differ by some ms: what fires a little early ends all the same.
        self._retry(held, may_hold=self._clock.now_ms() < held.until_ms - _LATE_MS)

    def _retry(self, held: WaitingPop, *, may_hold: bool) -> None:
        # Its timer, or the end of its connection, was quicker than its turn: it would take messages that nobody gets.
        if held not in self._connections.get(held.connection, ()):
            return
        self._drop(held)
        try:
            held.retry(may_hold)
        except Exception:  # noqa: BLE001 - the outer edge of a held request: a fault of one must not reach another
            _log.exception("cannot answer a waiting pop of %s by %s", held.topic, held.group)

    def _drop(self, held: WaitingPop) -> None:
        self._woken.pop(held, None)
        assert held.timer is not None, "it was held"
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


def _topics_of(held: WaitingPop) -> tuple[str, ...]:
    """Return where messages for a request arrive."""
    return held.topic, *(pop_retry_topic(held.group, held.topic, mark) for mark in "_+")
