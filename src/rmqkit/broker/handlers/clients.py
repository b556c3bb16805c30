"""Heartbeats, members, queue locks: codes 34, 35, 38, 41, 42 (``ClientManageProcessor``, ``ConsumerManageProcessor``).

Source: remoting.md §4.3.4, §9.3; behaviour.md §2.6, §2.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable

import msgspec
from msgspec.structs import replace

from rmqkit.broker.clients import CONSUME_ACTIVELY, Member
from rmqkit.broker.handlers.answers import Handlers, answers
from rmqkit.protocol.bodies.clients import (
    ConsumerData,
    ConsumerIds,
    HeartbeatData,
    MessageQueue,
    SubscriptionGroupConfig,
)
from rmqkit.protocol.bodies.queues import LockBody, LockedQueues
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.clients import ConsumerGroupRequest, UnregisterClientRequest
from rmqkit.protocol.names import retry_topic
from rmqkit.remoting.connection import Connection

__all__ = ["ClientHandlers"]


class ClientHandlers(Handlers):
    """Keeps the client table and the queue locks."""

    @answers(RequestCode.HEART_BEAT)
    def heartbeat(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Take in a client's groups; a group that may not be created is skipped silently.
        Where a retry topic was made the answer waits until the name servers know it: the client may ask them next."""
        data = decode_as(command.payload, HeartbeatData)
        member = Member(data.clientID, command.language, command.version, self._clock.monotonic_ms(), connection.user)
        fingerprint = data.heartbeatFingerprint
        keeps_topics = bool(fingerprint) and data.withoutSub
        topic_count = len(self._topics)
        started_ms = self._clock.monotonic_ms()
        must_resend = not fingerprint  # a client of before the fingerprints always sends everything
        for consumer in data.consumerDataSet:
            if self._settings.reject_pull_consumers and consumer.consume_type == CONSUME_ACTIVELY:
                continue
            config = self._groups.get(consumer.group_name)
            if config is None:
                continue
            differs = self._clients.needs_topics(consumer.group_name, fingerprint, has_topics=not keeps_topics)
            must_resend = must_resend or differs
            self._ensure_retry_topic(consumer, config)
            notify = config.notify_consumer_ids_changed_enable
            self._clients.register_consumer(connection, member, consumer, notify=notify, keeps_topics=keeps_topics)
        consumers_ms = self._clock.monotonic_ms()
        for producer in data.producerDataSet:
            self._clients.register_producer(connection, member, producer.group_name)
        self._statistics.registered("CONSUMER", consumers_ms - started_ms, len(data.consumerDataSet))
        self._statistics.registered("PRODUCER", self._clock.monotonic_ms() - consumers_ms, len(data.producerDataSet))
        changed = "true" if must_resend else "false"
        answer = reply(command, fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": changed})
        return answer if len(self._topics) == topic_count else self._when_told(answer)

    @answers(RequestCode.UNREGISTER_CLIENT)
    def unregister(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, UnregisterClientRequest, missing={"clientID": ""})
        if header.producerGroup:
            self._clients.unregister_producer(connection, header.producerGroup)
        if header.consumerGroup:
            config = self._groups.get(header.consumerGroup)
            notify = config is None or config.notify_consumer_ids_changed_enable
            self._clients.unregister_consumer(connection, header.consumerGroup, notify=notify)
        return reply(command, fields={})

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def consumer_list(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, ConsumerGroupRequest)
        group = self._clients.consumers(header.consumer_group)
        if group is None:
            remark = f"no consumer for this group, {header.consumer_group}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        ids = [member.client_id for member in group.members.values()]
        return reply(command, body=msgspec.json.encode(ConsumerIds(ids)))

    @answers(RequestCode.LOCK_BATCH_MQ)
    def lock_queues(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Lock queues for a client; which of them it holds now."""
        body = decode_as(command.payload, LockBody)
        granted = self._queue_locks.lock(body.consumer_group, body.client_id, body.queues)
        if self._needs_namesakes(body):
            return self._lock_with_namesakes(command, body, granted)
        return reply(command, body=msgspec.json.encode(LockedQueues(granted)))

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def unlock_queues(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        body = decode_as(command.payload, LockBody)
        self._queue_locks.unlock(body.consumer_group, body.client_id, body.queues)
        return self._unlock_with_namesakes(command, body) if self._needs_namesakes(body) else reply(command)

    def _needs_namesakes(self, body: LockBody) -> bool:
        settings = self._settings
        return settings.strict_locks and settings.replica_count > 1 and not body.only_this_broker

    async def _lock_with_namesakes(self, command: Command, body: LockBody, granted: list[MessageQueue]) -> Command:
        """Grant what more than half of the brokers of this name grant (``lockInStrictMode``)."""
        asked = replace(body, queues=granted, only_this_broker=True)
        votes = Counter(granted)
        for answer in await self._ask_namesakes(lambda: _with_body(RequestCode.LOCK_BATCH_MQ, asked)):
            votes.update(decode_as(answer.payload, LockedQueues).queues)
        agreed = [queue for queue in granted if votes[queue] > self._settings.replica_count // 2]
        return reply(command, body=msgspec.json.encode(LockedQueues(agreed)))

    async def _unlock_with_namesakes(self, command: Command, body: LockBody) -> Command:
        asked = replace(body, only_this_broker=True)
        await self._ask_namesakes(lambda: _with_body(RequestCode.UNLOCK_BATCH_MQ, asked))
        return reply(command)

    def _ensure_retry_topic(self, consumer: ConsumerData, config: SubscriptionGroupConfig) -> None:
        topics = [self._topics.get(data.topic) for data in consumer.subscription_data_set]
        self._topics.ensure(
            retry_topic(consumer.group_name),
            config.retry_queue_nums,
            order=any(topic.order for topic in topics if topic is not None),
            unit=consumer.unit_mode,
            soon=True,
        )


def _with_body(code: RequestCode, body: LockBody) -> Command:
    return request(code, body=msgspec.json.encode(body))
