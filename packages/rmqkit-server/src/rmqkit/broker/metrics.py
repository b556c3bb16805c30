"""The values that Prometheus reads from a broker: its counters (`Counts`), and the sizes of its tables and its store.
The values are gathered in parts, and the loop runs other tasks in between. Use this module only on the event loop.
Source: behaviour.md §9.10.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rmqkit.broker.counts import NOT_COUNTED, Counts, text
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import WAITING_MAX, Durability
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.lite.subscriptions import LiteGroup
from rmqkit.broker.operations.brokers import earliest_store_time
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.long_polling import HELD_MAX, LongPolling
from rmqkit.broker.replication.copies import SlaveCopies
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import CONSUME_ACTIVELY, ClientTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.exporter import lane_values
from rmqkit.metrics import Gathered, Histogram
from rmqkit.protocol import names
from rmqkit.protocol.codes import version_name
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.store.message_store import MessageStore
from rmqkit.system import disk

__all__ = ["BrokerMetrics"]

# The lane of requests for each thread pool of the reference. Most requests have no lane: they are handled immediately.
_PROCESSORS = {
    **dict.fromkeys(("pull", "lite_pull", "query_message", "client_manager", "consumer_manager", "heartbeat"), ""),
    **dict.fromkeys(("transaction", "ack", "async_put"), ""),
    "send": "send",
    "reply": "reply",
    "admin": "relays",
}

_GIVEN = {"rocketmq_messages_out_total": "GROUP_GET_NUMS", "rocketmq_throughput_out_total": "GROUP_GET_SIZE"}
_BEHIND = (
    *("rocketmq_consumer_lag_messages", "rocketmq_consumer_inflight_messages", "rocketmq_consumer_ready_messages"),
    *("rocketmq_consumer_lag_latency", "rocketmq_consumer_queueing_latency"),
)
_OF_LITE_GROUPS: dict[str, Callable[[LiteGroup], int]] = {
    "rmqkit_lite_clients": lambda group: len(group.clients),
    "rmqkit_lite_subscriptions": lambda group: group.subscription_count,
    "rmqkit_lite_dirty": lambda group: len(group.dirty) + sum(len(one.dirty) for one in group.clients.values()),
    "rmqkit_lite_batches": lambda group: len(group.batches),
}
_LOCAL = ("local", "disk")
_QUEUES_PER_TICK = 200
_Key = tuple[str, ...]


class MetricsContext(Protocol):
    """The parts of the broker from which metrics are read."""

    clients: ClientTable
    clock: Clock
    durability: Durability | None
    groups: GroupTable
    lite: LiteService | None
    long_polling: LongPolling
    offsets: OffsetTable
    pop: PopService | None
    settings: BrokerSettings
    statistics: Statistics
    store: MessageStore
    timer: Timer | None
    topics: TopicTable


class BrokerMetrics:
    """The values of a broker's metrics."""

    def __init__(
        self,
        counts: Counts,
        context: MetricsContext,
        copies: SlaveCopies | None,
        dispatch: Router,
        servers: list[RemotingServer],
    ) -> None:
        self._counts = counts
        self._context = context
        self._copies = copies
        self._dispatch = dispatch
        self._servers = servers

    def common(self) -> dict[str, str]:
        """Return the labels of every sample."""
        settings = self._context.settings
        own = {"cluster": settings.cluster_name, "node_type": "broker", "node_id": settings.broker_name}
        return settings.metric_labels.pairs | own

    async def gather(self) -> Gathered:
        """Return all current values."""
        self._counts.fold()
        # Drop series of deleted topics: any client may create topics, so the number of series would grow without limit.
        self._counts.drop_topics(self._is_gone)
        return (
            self._counted()
            | self._tables()
            | await self._timed()
            | (self._context.pop.gather() if self._context.pop is not None else {})
            | self._clients()
            | self._storage()
            | self._lanes()
            | await self._lag()
            | self._lite()
        )

    def _is_gone(self, topic: str) -> bool:
        return self._context.topics.get(topic) is None and not self._is_system(topic)

    def _is_system(self, topic: str, group: str = "") -> bool:
        is_system_group = group in names.SYSTEM_GROUPS or group.startswith(names.SYSTEM_GROUP_PREFIX)
        return is_system_group or self._context.topics.is_system(topic)

    def _counted(self) -> Gathered:
        counts = self._counts
        came = {(*key, text(self._is_system(key[0]))): came for key, came in counts.came.items()}
        gathered: Gathered = {
            "rocketmq_messages_in_total": {key: one.messages for key, one in came.items()},
            "rocketmq_throughput_in_total": {key: one.bytes for key, one in came.items()},
            "rocketmq_message_size": {key: one.sizes for key, one in came.items()},
            "rocketmq_rpc_latency": counts.meter.gather(),
            "rmqkit_flush_latency": {(): counts.flush_ms},
            "rmqkit_dispatch_latency": {(): counts.dispatch_ms},
            "rmqkit_event_loop_lag": {(): counts.lag_ms},
        }
        totals: dict[str, dict[_Key, int]] = {name: dict(table) for name, table in counts.totals.items()}
        for name, statistic in _GIVEN.items():
            given = self._context.statistics.totals(statistic)
            totals.setdefault(name, {}).update(
                {
                    key: total
                    for key, total in given.items()
                    if key[0] != names.SCHEDULE_TOPIC and not key[0].startswith(NOT_COUNTED)
                }
            )
        for name, table in totals.items():
            gathered[name] = {self._with_system(key): total for key, total in table.items()}
        return gathered | counts.times

    def _with_system(self, key: _Key) -> _Key:
        """Add ``is_system`` to the label values of a topic and a group. The label value of a topic alone does not
        change."""
        return (*key, text(self._is_system(*key))) if len(key) > 1 else key

    def _tables(self) -> Gathered:
        context = self._context
        return {
            "rocketmq_broker_permission": {(): context.settings.broker_permission},
            "rocketmq_topic_number": {(): len(context.topics)},
            "rocketmq_lmq_number": {
                (): sum(map(names.is_light, context.store.topics)) + context.store.lite.table.live_count
            },
            "rocketmq_consumer_group_number": {(): len(context.groups.stored.subscription_group_table)},
        }

    def _clients(self) -> Gathered:
        producers: Counter[_Key] = Counter()
        consumers: Counter[_Key] = Counter()
        for members in self._context.clients.all_producers.values():
            producers.update((*_client(one.language, one.version), "remoting") for one in members.values())
        for name, group in self._context.clients.all_consumers.items():
            mode, is_system = "pull" if group.consume_type == CONSUME_ACTIVELY else "push", self._is_system("", name)
            for one in group.members.values():
                consumers[name, *_client(one.language, one.version), mode, "remoting", text(is_system)] += 1
        return {"rocketmq_producer_connections": producers, "rocketmq_consumer_connections": consumers}

    def _storage(self) -> Gathered:
        store, now_ms = self._context.store, self._context.clock.now_ms()
        oldest_ms, space = earliest_store_time(store), disk.space(store.root)
        slaves = [] if self._copies is None else self._copies.status().ha_connection_info
        return {
            "rocketmq_storage_size": {_LOCAL: (space.f_blocks - space.f_bfree) * space.f_frsize},
            "rocketmq_storage_flush_behind": {_LOCAL: max(0, store.max_physical_offset - store.durable_offset)},
            "rocketmq_storage_dispatch_behind": {_LOCAL: store.dispatch_behind_bytes},
            "rocketmq_storage_message_reserve_time": {_LOCAL: now_ms - oldest_ms} if oldest_ms > 0 else {},
            "rmqkit_replication_lag": {(slave.addr,): slave.diff for slave in slaves},
            "rmqkit_replication_in_sync": {(slave.addr,): slave.in_sync for slave in slaves},
        }

    async def _timed(self) -> Gathered:
        """Return the timer's metrics. They include counts of messages by the time until they are due, from the
        wheel."""
        timer = self._context.timer
        if timer is None:
            return {}
        state = timer.state
        ahead: dict[_Key, int] = {(*_LOCAL, str(bound)): count for bound, count in (await timer.due_within_s()).items()}
        topics: dict[str, Mapping[str, float | Histogram]] = {
            "rocketmq_timing_messages": {topic: one.count for topic, one in timer.metrics.timing_count.items()},
            "rocketmq_timer_enqueue_total": state.enqueued,
            "rocketmq_timer_dequeue_total": state.dequeued,
            "rocketmq_delay_message_latency": state.delay_seconds,
        }
        return {
            "rocketmq_timer_enqueue_lag": {_LOCAL: timer.offset_behind},
            "rocketmq_timer_enqueue_latency": {_LOCAL: timer.enqueue_behind_ms},
            "rocketmq_timer_dequeue_lag": {_LOCAL: timer.pending},
            "rocketmq_timer_dequeue_latency": {_LOCAL: timer.read_behind_ms},
            "rocketmq_timer_message_snapshot": ahead,
            **{
                name: {(*_LOCAL, topic): value for topic, value in of.items() if not self._is_gone(topic)}
                for name, of in topics.items()
            },
        }

    def _lanes(self) -> Gathered:
        durability = self._context.durability
        lanes = {lane.name: (lane.requests, lane.requests_max) for lane in self._dispatch.lanes}
        lanes["send"] = 0 if durability is None else durability.waiting_count, WAITING_MAX
        lanes["pull"] = len(self._context.long_polling), HELD_MAX
        waiting = {processor: lanes.get(lane, (0, 0))[0] for processor, lane in _PROCESSORS.items()}
        return lane_values(lanes, self._servers) | {
            "rocketmq_processor_watermark": {(p,): n for p, n in waiting.items()}
        }

    def _lite(self) -> Gathered:
        """Return the metrics of the parents of lite topics. A parent has one series of each, however many lite topics
        it has. Source: lite.md §12."""
        lite, table = self._context.lite, self._context.store.lite.table
        configs = self._context.topics.snapshot().topic_config_table
        parents = {name: table.parents.get(name) for name, one in configs.items() if one.is_lite}
        gathered: dict[str, dict[_Key, int]] = {
            "rmqkit_lite_topics": {(name,): 0 if one is None else one.live_count for name, one in parents.items()},
            "rmqkit_lite_expired_total": {
                (name,): 0 if one is None else one.expired_count for name, one in parents.items()
            },
        }
        groups = [group for group in lite.groups.values() if group.parent in parents] if lite is not None else []
        for name, value in _OF_LITE_GROUPS.items():
            counted = gathered[name] = {(parent,): 0 for parent in parents if lite is not None}
            for group in groups:
                counted[group.parent,] += value(group)
        return {**gathered}

    async def _lag(self) -> Gathered:
        """Return the lag of the online groups, and of lite groups if it is wanted. Source: behaviour.md §9.10."""
        found: dict[_Key, tuple[int, int, int, int, int]] = {}
        looked_at = 0
        # Copy the groups: clients may connect and leave while the loop runs.
        for group, topic, queue_count in list(self._consumed()):
            looked_at += queue_count
            # Pause regularly: a queue needs three reads of the store, so a thousand groups would block for a second.
            if looked_at > _QUEUES_PER_TICK:
                await asyncio.sleep(0)
                looked_at = 0
            key = topic, group, "false", text(self._is_system(topic, group))
            found[key] = self._behind(group, topic, queue_count)
        gathered = {name: {key: values[place] for key, values in found.items()} for place, name in enumerate(_BEHIND)}
        gathered[_BEHIND[0]].update(await self._lite_lags())
        return {**gathered}

    async def _lite_lags(self) -> dict[_Key, int]:
        """Return the lag of each lite group that has clients, over all its lite topics."""
        lite = self._context.lite
        if lite is None or not self._context.settings.lite_lag_metrics:
            return {}
        groups = [group for group in lite.groups.values() if group.clients]
        return {(group.parent, group.name, "false", "false"): await lite.lag_of(group) for group in groups}

    def _consumed(self) -> Iterator[tuple[str, str, int]]:
        """Yield the online groups, their readable topics, and the number of queues of each topic."""
        for name, group in self._context.clients.all_consumers.items():
            for topic in group.subscriptions:
                config = self._context.topics.get(topic)
                if config is not None and config.perm & Permission.READ and not topic.startswith(names.RETRY_PREFIX):
                    yield name, topic, config.read_queue_nums

    def _behind(self, group: str, topic: str, queue_count: int) -> tuple[int, int, int, int, int]:
        """Return the lag of a group for a topic as five numbers: messages that are not consumed, pulled but not
        consumed, and not pulled; the ages in ms of the oldest message that is not consumed, and of the oldest that is
        not pulled. A queue without an offset has no lag."""
        store, offsets, now_ms = self._context.store, self._context.offsets, self._context.clock.now_ms()
        lag = inflight = ready = 0
        ages = [0, 0]
        for queue_id in range(queue_count):
            end = store.max_offset(topic, queue_id)
            consumed = offsets.get(group, topic, queue_id)
            consumed = end if consumed is None else consumed  # without an offset there is no lag
            pulled = offsets.pull_offset(group, topic, queue_id) or consumed
            lag += max(0, end - consumed)
            inflight += max(0, pulled - consumed)
            ready += max(0, end - pulled)
            for place, offset in enumerate((consumed, pulled)):
                stored_ms = store.store_time_at(topic, queue_id, offset) if offset < end else 0
                ages[place] = max(ages[place], now_ms - stored_ms if stored_ms > 0 else 0)
        return lag, inflight, ready, ages[0], ages[1]


def _client(language: str | None, version: int) -> tuple[str, str]:
    return (language or "unknown").lower(), version_name(version).lower()
