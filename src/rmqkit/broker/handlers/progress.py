"""How far queues are filled and groups have come: codes 202, 208 (``AdminBrokerProcessor``).

Rates are not counted here and told as 0.0, as a broker tells them that has done nothing yet.
Source: remoting.md §4.4, §6.4.9; behaviour.md §9.9.
"""

from __future__ import annotations

from rmqkit.broker.clients import ClientTable
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.topics import TopicTable
from rmqkit.protocol import fastjson
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.stats import (
    ConsumeOffsets,
    ConsumeStats,
    TopicOffsets,
    TopicStatsTable,
)
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.groups import ConsumeStatsRequest
from rmqkit.protocol.headers.topics import TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.store.message_store import MessageStore

__all__ = ["ProgressHandlers"]


class ProgressHandlers:
    """Compares queues with the offsets of groups."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        store: MessageStore,
        topics: TopicTable,
        clients: ClientTable,
        offsets: OffsetTable,
    ) -> None:
        self._settings = settings
        self._store = store
        self._topics = topics
        self._clients = clients
        self._offsets = offsets

    def register(self, dispatch: Dispatch) -> None:
        """Answer the codes about progress."""
        dispatch.register(RequestCode.GET_TOPIC_STATS_INFO, self.topic_bounds)
        dispatch.register(RequestCode.GET_CONSUME_STATS, self.group_progress)

    def topic_bounds(self, connection: Connection, command: Command) -> Command:
        """The bounds of every queue of a topic, and when its newest message was stored."""
        topic = decode_header(command, TopicRequest).topic
        config = self._topics.get(topic)
        if config is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        table = {}
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            low, high = self._store.min_offset(topic, queue_id), self._store.max_offset(topic, queue_id)
            newest_ms = self._store.store_time_at(topic, queue_id, high - 1) if high else 0
            table[self._queue(topic, queue_id)] = TopicOffsets(low, high, max(0, newest_ms))
        return reply(command, body=fastjson.dumps(TopicStatsTable(table)))

    def group_progress(self, connection: Connection, command: Command) -> Command:
        """How far a group is on its topics, or on those that are asked for."""
        header = decode_header(command, ConsumeStatsRequest)
        name = header.consumer_group
        asked = header.topic_list.split(";") if header.topic_list else [header.topic] if header.topic else None
        group = self._clients.consumers(name)
        stats = ConsumeStats()
        for topic in self._offsets.topics(name) if asked is None else asked:
            is_left = group is not None and bool(group.subscriptions) and topic not in group.subscriptions
            if is_left and self._clients.compensated(name, topic) is None:
                continue
            config = self._topics.get(topic)
            for queue_id in range(config.read_queue_nums if config is not None else 0):
                stats.offset_table[self._queue(topic, queue_id)] = self._progress(name, topic, queue_id)
        return reply(command, body=fastjson.dumps(stats))

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._settings.broker_name, queue_id)

    def _progress(self, group: str, topic: str, queue_id: int) -> ConsumeOffsets:
        consumed = max(0, self._offsets.get(group, topic, queue_id) or 0)
        newest_ms = self._store.store_time_at(topic, queue_id, consumed - 1) if consumed else 0
        return ConsumeOffsets(
            broker_offset=self._store.max_offset(topic, queue_id),
            consumer_offset=consumed,
            pull_offset=self._offsets.pull_offset(group, topic, queue_id),
            last_timestamp=max(0, newest_ms),
        )
