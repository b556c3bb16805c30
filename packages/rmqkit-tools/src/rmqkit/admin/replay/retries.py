"""The retry topics of a group, and the producer that sends dead letters to them.

A dead letter belongs to one group. The replay therefore sends it to a retry topic of the group, because no other group
reads this topic (`Retries`). The topic is ``%RETRY%<group>``, or for groups that only pop, ``%RETRY%<group>_<topic>``
(with ``+`` instead of ``_`` in POP's second version). `GroupProducer` sends the message as a broker stores a retry:

=======================  ==============================================================================================
property, field          value
=======================  ==============================================================================================
``RETRY_TOPIC``          the topic of the first delivery; handlers get this topic
``ORIGIN_MESSAGE_ID``    the id of the first delivery
reconsumeTimes           0: the message has all its retries again
``DELAY``                not set: the message is delivered immediately
=======================  ==============================================================================================

Groups that broadcast do not read a retry topic. If a group consumes in order, brokers store each message for its retry
topic as a dead letter again. `Retries.find` refuses both kinds of groups. Source: behaviour.md §3.3, §3.7, §4.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence

from msgspec import Struct

from rmqkit.admin import Admin
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.observe.status import ProducerStatus
from rmqkit.client.producer.encode import encode_message
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import MessageIllegal, PeerRefused, SettingsError
from rmqkit.protocol import properties as names
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import ReceivedMessage, copied
from rmqkit.protocol.names import RETRY_PREFIX, dlq_topic, pop_retry_topic, retry_topic
from rmqkit.protocol.schemas.clients import ConsumerConnection, MessageQueue
from rmqkit.protocol.schemas.groups import GroupRequest
from rmqkit.protocol.schemas.topics import TopicList
from rmqkit.sentences import _, joined

__all__ = ["GroupProducer", "Retries", "RetryMessage", "other_readers", "retry_of"]

_ASKED_MAX = 5


class Retries(Struct, kw_only=True):
    """The retry topics of a group.

    Attributes:
        pops: True if the group only pops. It then has a retry topic for each of its topics.
        is_online: True if a client of the group is connected.
        known: the names of the existing retry topics.
    """

    group: str
    pops: bool
    is_online: bool
    known: set[str]

    @classmethod
    async def find(cls, admin: Admin, group: str) -> Retries:
        """Return the retry topics of a group.
        Raises SettingsError: the clients of the group would not handle messages of a retry topic."""
        own = retry_topic(group)
        known = {name for name in await admin.calls.topic_names() if name.startswith(own)}
        try:
            connection = await admin.clients.consumers(group)
        except PeerRefused:  # no client is online: the offsets of the group show which retry topics the group has read
            read = await _topics_read(admin, group)
            pops = own not in read and any(name.startswith(own) for name in read)
            return cls(group=group, pops=pops, is_online=False, known=known)
        if connection.message_model == "BROADCASTING":
            why = _("group {group} broadcasts, and reads no retry topic", group=group)
            raise SettingsError(joined("; ", [why, _to_all_groups(group, connection)]))
        for member in connection.connection_set[:_ASKED_MAX]:
            info = (await admin.clients.running(group, member.client_id))[member.client_id]
            if info is not None and info.properties.get("PROP_CONSUMEORDERLY") == "true":
                why = _(
                    "group {group} consumes in order: brokers store what is sent to {own} in {dead}",
                    group=group,
                    own=own,
                    dead=dlq_topic(group),
                )
                raise SettingsError(joined("; ", [why, _to_all_groups(group, connection)]))
        return cls(group=group, pops=own not in connection.subscription_table, is_online=True, known=known)

    def topic(self, origin: str) -> str:
        """Return the retry topic for messages that were first sent to a topic."""
        if not self.pops:
            return retry_topic(self.group)
        newer = pop_retry_topic(self.group, origin, "+")
        return newer if newer in self.known else pop_retry_topic(self.group, origin)


def _to_all_groups(group: str, connection: ConsumerConnection) -> str:
    """Return the remedy for a group without a usable retry topic: to send to a topic that other groups can read,
    too."""
    topics = sorted(name for name in connection.subscription_table if not name.startswith(RETRY_PREFIX))
    if len(topics) != 1:
        return _("choose a topic with --to; all groups that read the topic get the messages")
    return _(
        "to send to all groups of topic {topic}: rmq replay --dlq {group} --to {topic}",
        group=shlex.quote(group),
        topic=shlex.quote(topics[0]),
    )


async def _topics_read(admin: Admin, group: str) -> set[str]:
    """Return the topics in which a group has offsets at some broker."""
    header = GroupRequest(group)
    found: set[str] = set()
    for address in (await admin.calls.masters()).values():
        with contextlib.suppress(PeerRefused):  # the broker does not know the group
            answer = await admin.calls.fetch(TopicList, address, RequestCode.QUERY_TOPICS_BY_CONSUMER, header)
            found.update(answer.topic_list)
    return found


class RetryMessage(PlacedMessage, kw_only=True):
    """A message for a retry topic, made from a dead letter. ``own`` has the properties that RocketMQ sets."""

    own: dict[str, str]


def retry_of(message: ReceivedMessage, origin: str, retries: Retries, msg_id: str) -> RetryMessage:
    """Return the message for the retry topic from a dead letter that was first sent to topic ``origin``."""
    first_id = message.properties.get(names.ORIGIN_MESSAGE_ID, "").strip() or message.offset_msg_id
    own = {names.RETRY_TOPIC: origin, names.ORIGIN_MESSAGE_ID: first_id}
    fields = copied(message)
    if (key := fields.pop("sharding_key")) is not None:
        own[names.SHARDING_KEY] = key
    return RetryMessage(topic=retries.topic(origin), msg_id=msg_id, own=own, **fields)


class GroupProducer:
    """A producer of retries of dead letters, with the methods of `Producer` that `send_chunk` uses."""

    def __init__(self, producer: Producer, runtime: ClientRuntime, admin: Admin, retries: Retries) -> None:
        self._producer, self._admin, self._retries = producer, admin, retries
        self._creating = asyncio.Lock()
        self.settings = producer.settings
        self._sender = Sender(runtime, producer.group, producer.settings)

    async def send(self, message: PlacedMessage, *, queue: MessageQueue | None = None) -> SendResult:
        """Send one retry. Raises the errors of `Producer.send`."""
        assert isinstance(message, RetryMessage), "every message is a retry"
        assert message.msg_id is not None, "a retry has a unique key"
        await self._create(message.topic)
        encoded = encode_message(message, message.msg_id, self.settings, message.own)
        return await self._sender.send(encoded, timeout_ms=self.settings.send_timeout_ms, queue=queue)

    async def send_batch(self, messages: Sequence[PlacedMessage], *, queue: MessageQueue | None = None) -> SendResult:
        """Raise MessageIllegal: brokers refuse batches for retry topics. `send_chunk` then sends each message alone."""
        raise MessageIllegal(
            _("a batch cannot be sent to retry topic {topic}: send its messages one by one", topic=messages[0].topic)
        )

    async def _create(self, topic: str) -> None:
        """Create a retry topic before its first message is sent, with one queue, as a broker does."""
        async with self._creating:
            if topic not in self._retries.known:
                await self._admin.topics.create(topic, read_queues=1, write_queues=1)
                self._retries.known.add(topic)

    async def queues(self, topic: str) -> list[MessageQueue]:
        return await self._producer.queues(topic)

    def status(self) -> ProducerStatus:
        return self._producer.status()


async def other_readers(admin: Admin, topic: str, group: str) -> list[str]:
    """Return the other groups that read a topic. They receive each message that is sent to the topic."""
    return [one for one in await admin.topics.groups(topic) if one != group]
