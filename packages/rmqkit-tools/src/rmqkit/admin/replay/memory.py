"""Dead letters that were replayed: a file remembers their offsets, so that a repeat does not send them again.

A dead letter belongs to one group. The replay therefore sends it to a retry topic of the group, which no other group
reads (`Retries`): ``%RETRY%<group>``, or for groups that only pop, ``%RETRY%<group>_<topic>`` (POP's second version has
``+`` in place of ``_``). `GroupProducer` writes it as a broker writes a retry:

=======================  ==============================================================================================
property, field          value
=======================  ==============================================================================================
``RETRY_TOPIC``          the topic of the first delivery; consumers give this topic to their handlers
``ORIGIN_MESSAGE_ID``    the id of the first delivery
reconsumeTimes           0: the message has all its tries again
``DELAY``                none: the message is delivered at once
=======================  ==============================================================================================

Groups that broadcast read no retry topic. Brokers store whatever is sent to the retry topic of a group that consumes in
order as a dead letter again. `Retries.find` names both. `Replayed` is the memory; one process at a time has it.
Source: behaviour.md §3.3, §3.7, §4.8.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import fcntl
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from rmqkit.admin import Admin
from rmqkit.client.consumer.pull import PullConsumer
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
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import dlq_topic, pop_retry_topic, retry_topic
from rmqkit.protocol.properties import own_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.groups import GroupRequest
from rmqkit.protocol.schemas.topics import TopicList
from rmqkit.sentences import _, joined, plain
from rmqkit.store.files import naming

__all__ = [
    "GroupProducer",
    "Replayed",
    "Retries",
    "RetryMessage",
    "file_name",
    "other_readers",
    "retry_of",
]

_ASKED_MAX = 5


class Replayed(Struct, kw_only=True):
    """The dead letters of a group that were sent to one target.

    Attributes:
        task: the group and the target; the file is not used for others.
        replay_id: begins the unique keys of the copies, in all runs.
        places: half-open ranges of queue offsets that were sent, sorted, by lane (``broker:queue``).
        marks: the highest of these offsets and the message's id, by lane. They show whether the topic was deleted and
            created again since then.
        is_done: False while a run is in progress, and after a run that was interrupted.
    """

    task: str
    replay_id: str
    places: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)
    is_done: bool = True

    @classmethod
    def new(cls, task: str) -> Replayed:
        """Return an empty memory with a new id."""
        return cls(task=task, replay_id=f"replay-{random.getrandbits(40):010x}")

    @classmethod
    def load(cls, path: Path, task: str) -> Replayed:
        """Read a memory; without a file, return an empty one.
        Raises SettingsError: the file has something else, or the memory of another group or target."""
        if path.exists() and not path.is_file():
            raise SettingsError(_("{path} is not a regular file: name another with --state", path=path))
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls.new(task)
        except msgspec.MsgspecError as error:
            why = _("{path} is not the state of a replay of dead letters ({error})", path=path, error=error)
            raise SettingsError(_("{why}: name another file with --state", why=why)) from None
        if found.task != task:
            raise SettingsError(
                _(
                    "{path} is the state of another replay, {task}: name another file for {wanted}",
                    path=path,
                    task=found.task,
                    wanted=task,
                )
            )
        return found

    @staticmethod
    @contextlib.contextmanager
    def held(path: Path) -> Iterator[None]:
        """Keep other processes from using the file. Raises SettingsError: one does."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path.with_name(path.name + ".lock"), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingsError(_("another replay uses {path} now: wait until it has stopped", path=path)) from None
            yield

    def save(self, path: Path) -> None:
        """Replace the file as a whole."""
        whole = path.with_name(path.name + ".tmp")
        with naming(path):
            whole.write_bytes(msgspec.json.encode(self, enc_hook=plain))
            whole.replace(path)

    def has(self, lane: str, offset: int) -> bool:
        """Return whether the dead letter at an offset was sent."""
        ranges = self.places.get(lane, [])
        at = bisect.bisect_right(ranges, offset, key=lambda one: one[0])
        return at > 0 and offset < ranges[at - 1][1]

    def add(self, lane: str, message: ReceivedMessage) -> None:
        """Remember that a dead letter was sent."""
        offset = message.queue_offset
        if self.has(lane, offset):
            return
        ranges = self.places.setdefault(lane, [])
        at = bisect.bisect_right(ranges, offset, key=lambda one: one[0])
        begin, end = offset, offset + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at and ranges[at - 1][1] == begin:
            at -= 1
            begin = ranges.pop(at)[0]
        ranges.insert(at, (begin, end))
        if offset >= self.marks.get(lane, (0, ""))[0]:
            self.marks[lane] = offset, message.offset_msg_id

    async def forget_deleted(self, consumer: PullConsumer, topic: str) -> None:
        """Forget the lanes whose queue was deleted and created again: their offsets name other messages now."""
        for lane, (offset, msg_id) in list(self.marks.items()):
            broker_name, __, queue_id = lane.rpartition(":")
            queue = MessageQueue(topic, broker_name, int(queue_id))
            if queue not in await consumer.queues(topic):
                continue  # the broker is away: its queue has not changed
            first, end = await asyncio.gather(consumer.min_offset(queue), consumer.max_offset(queue))
            is_other = end <= offset
            if first <= offset < end:
                found = (await consumer.pull(queue, offset, max_count=1)).messages
                is_other = bool(found) and found[0].queue_offset == offset and found[0].offset_msg_id != msg_id
            if is_other:
                del self.marks[lane], self.places[lane]


def file_name(name_servers: str, group: str, target: str | None) -> str:
    """Return a name for the memory of a group and target of a cluster."""
    cluster = ";".join(sorted(name_servers.replace(",", ";").split(";")))
    digest = hashlib.sha256("\n".join((cluster, group, target or "")).encode()).hexdigest()[:12]
    legible = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in group)
    return f"{legible}-{digest}"


class Retries(Struct, kw_only=True):
    """The retry topics of a group.

    Attributes:
        pops: the group only pops, and reads a retry topic for each of its topics.
        is_online: whether a client of the group is connected.
        known: names of retry topics that exist.
    """

    group: str
    pops: bool
    is_online: bool
    known: set[str]

    @classmethod
    async def find(cls, admin: Admin, group: str) -> Retries:
        """Find out how a group gets its retries.
        Raises SettingsError: its clients would not handle what is sent to a retry topic."""
        own = retry_topic(group)
        known = {name for name in await admin.calls.topic_names() if name.startswith(own)}
        remedy = _("to send to all groups of a topic: rmq replay --dlq {group} --to TOPIC", group=group)
        try:
            connection = await admin.clients.consumers(group)
        except PeerRefused:  # nobody is online: the group's offsets show how it read its retries
            read = await _topics_read(admin, group)
            pops = own not in read and any(name.startswith(own) for name in read)
            return cls(group=group, pops=pops, is_online=False, known=known)
        if connection.message_model == "BROADCASTING":
            raise SettingsError(
                _("group {group} broadcasts, and reads no retry topic; {remedy}", group=group, remedy=remedy)
            )
        for member in connection.connection_set[:_ASKED_MAX]:
            info = (await admin.clients.running(group, member.client_id))[member.client_id]
            if info is not None and info.properties.get("PROP_CONSUMEORDERLY") == "true":
                why = _(
                    "group {group} consumes in order: brokers store what is sent to {own} in {dead}",
                    group=group,
                    own=own,
                    dead=dlq_topic(group),
                )
                raise SettingsError(joined("; ", [why, remedy]))
        return cls(group=group, pops=own not in connection.subscription_table, is_online=True, known=known)

    def topic(self, origin: str) -> str:
        """Return the retry topic for messages that were first sent to a topic."""
        if not self.pops:
            return retry_topic(self.group)
        newer = pop_retry_topic(self.group, origin, "+")
        return newer if newer in self.known else pop_retry_topic(self.group, origin)


async def _topics_read(admin: Admin, group: str) -> set[str]:
    """Return the topics that have an offset of a group at some broker."""
    header = GroupRequest(group)
    found: set[str] = set()
    for address in (await admin.calls.masters()).values():
        with contextlib.suppress(PeerRefused):  # a broker that does not know the group
            answer = await admin.calls.fetch(TopicList, address, RequestCode.QUERY_TOPICS_BY_CONSUMER, header)
            found.update(answer.topic_list)
    return found


class RetryMessage(PlacedMessage, kw_only=True):
    """A dead letter as it goes to its group's retry topic; ``own`` has RocketMQ's properties of it."""

    own: dict[str, str]


def retry_of(message: ReceivedMessage, origin: str, retries: Retries, msg_id: str) -> RetryMessage:
    """Return the retry of a dead letter that was first sent to topic ``origin``."""
    properties = message.properties
    first_id = properties.get(names.ORIGIN_MESSAGE_ID, "").strip() or message.offset_msg_id
    own = {names.RETRY_TOPIC: origin, names.ORIGIN_MESSAGE_ID: first_id}
    if names.SHARDING_KEY in properties:
        own[names.SHARDING_KEY] = properties[names.SHARDING_KEY]
    return RetryMessage(
        topic=retries.topic(origin),
        body=message.body,
        tags=message.tags,
        keys=message.keys,
        properties=own_properties(properties),
        flag=message.flag,
        msg_id=msg_id,
        own=own,
    )


class GroupProducer:
    """Sends retries of dead letters; the interface is the part of `Producer` that `send_chunk` uses."""

    def __init__(self, producer: Producer, runtime: ClientRuntime, admin: Admin, retries: Retries) -> None:
        self._producer, self._admin, self._retries = producer, admin, retries
        self._creating = asyncio.Lock()
        self.settings = producer.settings
        self._sender = Sender(runtime, producer.group, producer.settings)

    async def send(self, message: PlacedMessage, *, queue: MessageQueue | None = None) -> SendResult:
        """Send one retry. Raises what `Producer.send` raises."""
        assert isinstance(message, RetryMessage), "dead letters go out as retries"
        assert message.msg_id is not None, "a retry has the key of its place"
        await self._create(message.topic)
        encoded = encode_message(message, message.msg_id, self.settings, message.own)
        return await self._sender.send(encoded, timeout_ms=self.settings.send_timeout_ms, queue=queue)

    async def send_batch(self, messages: Sequence[PlacedMessage], *, queue: MessageQueue | None = None) -> SendResult:
        """Raises MessageIllegal: brokers refuse batches for retry topics; `send_chunk` then sends one by one."""
        raise MessageIllegal(
            _("a batch cannot be sent to retry topic {topic}: send its messages one by one", topic=messages[0].topic)
        )

    async def _create(self, topic: str) -> None:
        """Create a retry topic of which no message has come yet, as a broker does."""
        async with self._creating:
            if topic not in self._retries.known:
                await self._admin.topics.create(topic, read_queues=1, write_queues=1)
                self._retries.known.add(topic)

    async def queues(self, topic: str) -> list[MessageQueue]:
        return await self._producer.queues(topic)

    def status(self) -> ProducerStatus:
        return self._producer.status()


async def other_readers(admin: Admin, topic: str, group: str) -> list[str]:
    """Return the other groups that read a topic, and therefore get what is sent to it."""
    return [one for one in await admin.topics.groups(topic) if one != group]
