"""POP, as far as it is kept: who has which message, what was popped in order, who waits, what comes again.

================  ====================================================================================================
`pop_log`         check points and acks in the revive topic, and which are pending
`pop_pending`     when what is pending comes again
`pop_turn`        what pops and acks of one turn of the loop put there, with one write
`pop_order`       what was popped in order
`pop_polling`     pops, and questions whether there is something to pop, that wait
`pop_revive`      messages that were not acknowledged in time come again
================  ====================================================================================================

A master alone pops; a slave has the revive topic with the rest of the log. Source: behaviour.md §4.7.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.pop.check_points import CheckPointStore, revive_topic
from rmqkit.broker.pop.order import OrderTable
from rmqkit.broker.pop.polling import PopLongPolling
from rmqkit.broker.pop.revive import Revive
from rmqkit.broker.pop.write_batch import PopWriteBatch
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.metrics.values import Gathered
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import Arrival, MessageStore

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts

__all__ = ["PopService"]

_WRITING_MS = 100
"""How long the table of offsets is on its way to the disk, at the most, where that matters."""


class PopContext(Protocol):
    """What pops and acks may touch."""

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


class PopService:
    """The parts of POP of one broker.

    Attributes:
        waiting: pops that wait for a message.
        asking: NOTIFICATION requests that wait for one.
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
    ) -> None:
        self.check_points = CheckPointStore(store, groups, offsets, settings, clock, store_host)
        self.batch = PopWriteBatch(self.check_points)
        self.orders = OrderTable(folder, clock)
        self.waiting = PopLongPolling(settings, clock)
        self.notifications = PopLongPolling(settings, clock)
        self.revive = Revive(self.check_points, store, topics, groups, offsets, settings, store_host)
        self._offsets_path = folder / "consumerOffset.json"
        self._revive_topic = revive_topic(settings.cluster_name)
        self._topics = topics

    def load(self) -> None:
        """Read what is pending; the store is open."""
        self.orders.load()
        config = self._topics.get(self._revive_topic)
        assert config is not None, "it exists from the start"
        path = self._offsets_path
        offsets_at_ms = path.stat().st_mtime_ns // 1_000_000 - _WRITING_MS if path.exists() else 0
        self.check_points.load(max(1, config.write_queue_nums), offsets_at_ms=offsets_at_ms)

    def gather(self) -> Gathered:
        """What metrics tell of it. Source: behaviour.md §9.10."""
        counts, late = self.check_points.counts, self.check_points.late
        counts.forget(lambda topic: self._topics.get(topic) is None)
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

    def arrived(self, arrivals: list[Arrival]) -> None:
        """Tell those who wait."""
        self.waiting.arrived(arrivals)
        self.notifications.arrived(arrivals)

    def connection_closed(self, connection: Connection) -> None:
        self.waiting.connection_closed(connection)
        self.notifications.connection_closed(connection)

    def close(self) -> None:
        """Answer those who wait."""
        self.waiting.close()
        self.batch.end()
        self.notifications.close()

    def persist(self) -> None:
        """Write down what only memory has, as the broker stops; the store is still open."""
        self.batch.end()
        self.check_points.write_acks()
        self.check_points.commit()
        if self.orders.is_dirty:
            self.orders.persist()
