"""Topics, and the deletion of unused data: codes 17, 18, 21, 215, 305, 306, 316, 329, 351,
5002 (``AdminBrokerProcessor``).

A change is on the disk, and sent to the name servers, before the answer. Retention deletes expired files by itself. The
cleaning codes request this deletion now. They always succeed, unless the disk refuses.

A change of attributes of a topic or group is a map of signed names (``TopicAttributes``,
``SubscriptionGroupAttributes``, ``AttributeUtil``): ``+name`` → value adds or alters an attribute, and ``-name``
deletes an attribute. A topic request contains the map as ``+message.type=DELAY,-reserve.time``. The table has the names
without signs. The texts of refusals are the same as in a 5.4.0 broker.
Source: remoting.md §4.3.7, §4.4; behaviour.md §5.5, §9.5, §9.9; store.md §9.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import filterfalse

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations import OperationsContext
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, decode_header_leniently, reply
from rmqkit.protocol.names import is_light, retry_topic, split_lite_queue, topic_fault
from rmqkit.protocol.schemas.topics import (
    CreateTopicRequest,
    TopicConfig,
    TopicConfigList,
    TopicConfigsResponse,
    TopicList,
    TopicNameList,
    TopicQueueMappingDetail,
    TopicRequest,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_aside, decode_body
from rmqkit.remoting.tasks import Slice

_LONG = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Attribute:
    """The values that an attribute can have: a few words, the integers in a range, or any text (None)."""

    values: tuple[str, ...] | range | None
    is_changeable: bool = True

    def check(self, value: str) -> None:
        """Check a value. Raises ValueError: the value is not allowed."""
        if self.values is None:
            return
        if isinstance(self.values, tuple):
            if value not in self.values:
                raise ValueError(f"value is not in set: [{', '.join(self.values)}]")
            return
        try:
            number = int(value)
        except ValueError:
            number = _LONG.stop
        if number not in _LONG:
            raise ValueError(f'For input string: "{value}"')
        if number not in self.values:
            raise ValueError(f"value is not in range({self.values.start}, {self.values.stop - 1})")


TOPIC_ATTRIBUTES: Mapping[str, Attribute] = {
    "queue.type": Attribute(("SimpleCQ", "BatchCQ"), is_changeable=False),
    "cleanup.policy": Attribute(("DELETE", "COMPACTION"), is_changeable=False),
    "message.type": Attribute(("UNSPECIFIED", "MIXED", "TRANSACTION", "PRIORITY", "FIFO", "DELAY", "LITE", "NORMAL")),
    "lite.topic.expiration": Attribute(range(-1, 43_201)),
    "reserve.time": Attribute(_LONG),
}
_BOOLEAN = ("true", "false")
GROUP_ATTRIBUTES: Mapping[str, Attribute] = {
    "priority.factor": Attribute(range(101)),
    "lite.bind.topic": Attribute(None),
    "lite.sub.model": Attribute(("Shared", "Exclusive")),
    "lite.sub.wildcard": Attribute(None),
    "lite.sub.reset.offset.exclusive": Attribute(_BOOLEAN),
    "lite.sub.reset.offset.unsubscribe": Attribute(_BOOLEAN),
    "lite.sub.client.quota": Attribute(range(-1, _LONG.stop)),
    "lite.sub.client.max.event.cnt": Attribute(range(10, _LONG.stop)),
}


def parse_changes(text: str) -> dict[str, str]:
    """Return the changes in the text of a topic request: signed name → value. Raises ValueError: the text is
    malformed."""
    changes: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if equals and "+" not in name:
            raise ValueError(f"add/alter attribute format is wrong: {name}")
        if not equals and "-" not in name:
            raise ValueError(f"delete attribute format is wrong: {name}")
        if name in changes:
            raise ValueError(f"key duplication: {name}")
        changes[name] = value
    return changes


def alter(
    current: Mapping[str, str], changes: Mapping[str, str], known: Mapping[str, Attribute], *, is_new: bool
) -> dict[str, str]:
    """Return the attributes after a change. Raises ValueError: a name is unknown or its attribute cannot change, a
    value is not allowed, or a deleted attribute is missing."""
    attributes = dict(current)
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if is_new and name and sign != "+":
            raise ValueError(f"only add attribute is supported while creating topic. key: {name}")
        if sign not in ("+", "-") or not name:
            raise ValueError("kv string format wrong.")
        attribute = known.get(name)
        if attribute is None:
            raise ValueError(f"unsupported key: {name}")
        # Check in the reference's order, so that a change with two faults has the same answer.
        if sign == "-" and name not in current:
            raise ValueError(f"attempt to delete a nonexistent key: {name}")
        if not is_new and not attribute.is_changeable:
            raise ValueError(f"attempt to update an unchangeable attribute. key: {name}")
        if sign == "+":
            attribute.check(value)
            attributes[name] = value
        else:
            del attributes[name]
    return attributes


_NO_COMPACTION = (
    "cleanup.policy=COMPACTION is not supported: messages are deleted by their age, not by their keys; "
    "create the topic without it"
)
_FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")


class TopicHandlers(Handlers[OperationsContext]):
    """The handlers that create, change, delete and show topics, and that clean up."""

    def __init__(self, context: OperationsContext) -> None:
        super().__init__(context)
        self._altering = asyncio.Lock()

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC, admins_only=True)
    async def create(self, connection: Connection, command: Command) -> Command:
        return await self._create(command)

    async def _create(self, command: Command, detail: TopicQueueMappingDetail | None = None) -> Command:
        header = decode_header_leniently(command, CreateTopicRequest, drops_unreadable=False)
        if header.topic_filter_type not in _FILTER_TYPES:
            remark = f"topicFilterType = [{header.topic_filter_type}] value invalid"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        wanted = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
        )
        try:
            wanted.attributes = parse_changes(header.attributes or "")
        except ValueError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        return await self._put(command, [wanted], detail)

    @answers(RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, admins_only=True)
    async def create_static(self, connection: Connection, command: Command) -> Command:
        """Create a static topic. Its queues are numbered over several brokers, and the body has the queues on this
        broker."""
        static, detail = self._context.topics.static, await decode_aside(command, TopicQueueMappingDetail)
        fault = static.fault(detail, force=decode_fields(command).get("force") == "true")
        if fault:
            return reply(command, ResponseCode.SYSTEM_ERROR, fault)
        return await self._create(command, detail)

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, admins_only=True)
    async def create_several(self, connection: Connection, command: Command) -> Command:
        """Create or change several topics. If one topic is refused, change none."""
        return await self._put(command, decode_body(command, TopicConfigList).topic_config_list)

    @answers(RequestCode.DELETE_TOPIC_IN_BROKER, admins_only=True)
    def delete(self, connection: Connection, command: Command) -> Command:
        """Delete a topic if it exists, with its queues, the offsets of its groups, and the groups' POP retry topics.
        The name of a light queue of a lite topic deletes this lite topic."""
        topic = decode_header_leniently(command, TopicRequest, missing={"topic": ""}).topic
        fault = topic_fault(topic) if not topic.strip() else self._conflict(topic)
        if fault is not None:
            return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        self._delete({topic})
        return reply(command)

    @answers(RequestCode.DELETE_TOPIC_IN_BROKER_LIST, admins_only=True)
    def delete_several(self, connection: Connection, command: Command) -> Command:
        """Delete several topics like `delete`, all with one write of each table. If one topic is refused, delete none.
        (Apache's broker deletes 10 topics per second and keeps its caller waiting.)"""
        names = dict.fromkeys(decode_body(command, TopicNameList).topic_list if command.payload else ())
        fault = None if names else "The specified topic list is blank."
        for topic in names:
            fault = fault or (self._conflict(topic) if topic.strip() else topic_fault(""))
        if fault is not None:
            return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        self._delete(names.keys())
        return reply(command)

    @answers(RequestCode.GET_ALL_TOPIC_CONFIG)
    def all_topics(self, connection: Connection, command: Command) -> Command:
        """Return all topics and the version of the table. Slaves copy them."""
        table = self._context.topics.snapshot()
        table.mapping_data_version = self._context.topics.static.data_version
        # Send the mapping details, which slaves read. The infos of `snapshot` are for name servers.
        table.topic_queue_mapping_info_map = {}
        table.topic_queue_mapping_detail_map = self._context.topics.static.details
        header = TopicConfigsResponse(len(table.topic_config_table))
        return reply(command, header=header, body=msgspec.json.encode(table))

    @answers(RequestCode.GET_TOPIC_CONFIG)
    def topic(self, connection: Connection, command: Command) -> Command:
        name = decode_header(command, TopicRequest).topic
        config = self._context.topics.get(name)
        if config is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        detail = self._context.topics.static.details.get(name)
        if detail is None or decode_fields(command).get("lo") != "true":
            return reply(command, body=msgspec.json.encode(config))
        return reply(command, body=fastjson.dumps({**msgspec.to_builtins(config), "mappingDetail": detail}))

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def system_topics(self, connection: Connection, command: Command) -> Command:
        """Return the names of the system topics."""
        return reply(command, body=msgspec.json.encode(TopicList(topic_list=self._context.topics.system_topics)))

    @answers(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, admins_only=True)
    def expired_queue_files(self, connection: Connection, command: Command) -> Command:
        """Delete queue files in which all entries point before the start of the log."""
        self._context.store.retention_round()
        return reply(command)

    @answers(RequestCode.DELETE_EXPIRED_COMMITLOG, admins_only=True)
    def expired_log_files(self, connection: Connection, command: Command) -> Command:
        """Delete expired log files now, at any hour."""
        self._context.store.retention.request()
        return reply(command)

    @answers(RequestCode.CLEAN_UNUSED_TOPIC, admins_only=True)
    def unused_topics(self, connection: Connection, command: Command) -> Command:
        """Delete the queues and offsets of topics that are not in the table, and the offsets of abandoned groups."""
        known = self._context.store.topics | self._context.offsets.all_topics
        unknown = [topic for topic in known if self._context.topics.get(topic) is None and not is_light(topic)]
        # Skip light queues, which are never in the table, and system topics, which are created when they are needed.
        unused = [topic for topic in unknown if not self._context.topics.is_system(topic)]
        assert not any(map(self._context.topics.get, unused)), "unused topics are not in the table"
        self._context.store.delete_topic(*unused)
        for topic in unused:
            self._context.offsets.remove_topic(topic)
        for topic in self._context.offsets.all_topics:
            for group in self._context.offsets.groups(topic):
                if not self._context.topics.is_system(topic) and self._is_abandoned(topic, group):
                    self._context.offsets.remove(group, topic)
        return reply(command)

    async def _put(
        self, command: Command, wanted: list[TopicConfig], detail: TopicQueueMappingDetail | None = None
    ) -> Command:
        """Create topics, or change topics that differ. The attributes of ``wanted`` are signed changes.
        ``detail``: the queues of a static topic."""
        changed, now = [], Slice()
        # Only one request at a time until the table has the changes: otherwise two could change the same old row.
        async with self._altering:
            for config in wanted:
                await now.pause_if_over()
                known = self._context.topics.get(config.topic_name)
                changes = config.attributes or {}
                fault = topic_fault(config.topic_name) or self._conflict(config.topic_name)
                if (
                    fault is None
                    and changes.get("+message.type") == "MIXED"
                    and not self._context.settings.mixed_topics
                ):
                    fault = "MIXED message type is not supported."
                if fault is None and known is None and changes.get("+cleanup.policy") == "COMPACTION":
                    fault = _NO_COMPACTION
                if fault is None and detail is not None and detail.topic != config.topic_name:
                    fault = f"the mapping of topic {detail.topic} was given to topic {config.topic_name}"
                if fault is not None:
                    return reply(command, ResponseCode.INVALID_PARAMETER, fault)
                current = (known.attributes or {}) if known is not None else {}
                try:
                    config.attributes = alter(current, changes, TOPIC_ATTRIBUTES, is_new=known is None)
                except ValueError as error:
                    return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
                if config != known or detail is not None:
                    changed.append(config)
        if detail is not None:
            self._context.topics.static.put(detail)  # put it first: the topic is registered with its mapping
        if changed:
            await self._context.topics.put_shared(*changed)
            # Tools send the next request, or a message, right after this answer and need the routes.
            await self._context.topics_published()
        return reply(command)

    def _delete(self, topics: Set[str]) -> None:
        """Delete topics with their queues, the offsets of their groups, and the groups' POP retry topics.
        Raises StoreUnavailable: the disk refused."""
        names = {topic for topic in topics if not self._drop_lite(topic)}
        if not names:
            return
        if self._context.settings.deletes_retry_topics:
            for group, consumed in self._context.offsets.topics_by_group.items():
                retries = [retry_topic(f"{group}{mark}{topic}") for topic in topics & set(consumed) for mark in "_+"]
                names.update(filter(self._context.topics.get, retries))
        # Delete the queues first. If the disk refuses that, nothing is deleted.
        self._context.store.delete_topic(*names)
        self._context.topics.remove(*names)
        self._context.offsets.remove_topic(*names)
        assert not any(map(self._context.topics.get, filterfalse(is_light, names))), (
            "deleted topics are not in the table"
        )
        self._context.statistics.drop_counters(topics=names)

    def _drop_lite(self, name: str) -> bool:
        """Delete a lite topic. Return False if the name is not the light queue of a lite topic."""
        lite = self._context.lite
        is_lite = lite is not None and is_light(name) and split_lite_queue(name) is not None
        return is_lite and lite is not None and lite.drop(name)

    def _is_abandoned(self, topic: str, group: str) -> bool:
        """Return True if a group is not online for a topic, and its next message in every queue was deleted."""
        online = self._context.clients.consumers(group)
        if online is not None and topic in online.subscriptions:
            return False
        lows = {
            queue_id: self._context.store.min_offset(topic, queue_id)
            for queue_id in self._context.offsets.queues(group, topic)
        }
        return bool(lows) and all(offset < lows[q] for q, offset in self._context.offsets.queues(group, topic).items())

    def _conflict(self, topic: str) -> str | None:
        return f"The topic[{topic}] is conflict with system topic." if self._context.topics.is_system(topic) else None
