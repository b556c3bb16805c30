"""What a request needs its user to be allowed: resources and actions by request code (the header annotations and
``DefaultAuthorizationContextBuilder``; the annotations were read out of 5.4.0's jar).

A row names actions, of which any one is enough, and the fields that hold resources, each of which is asked for; a field
whose name says group holds a group, all others a topic. A row without fields is about the broker's cluster.

========== ===========================================================================================
``topic``  nothing is asked for when it is missing; a retry topic stands for its group
``topic-`` nor when it is blank
``topic;`` holds several names; ``topic,`` with the other separator
``topic!`` when it is missing, a resource called null is asked for, as the reference does
``topic~`` the same, and a retry topic is not asked for: the group is
``topic=`` the same, and a retry topic is a topic like others
========== ===========================================================================================

A code that is not here needs no right: Apache's brokers ask for none, either. Some that they leave open are closed, as
everybody could read, write and acknowledge everything: LITE_PULL_MESSAGE is taken as a pull, BATCH_ACK_MESSAGE as acks,
SEND_REPLY_MESSAGE as a send unless it is to the cluster's reply topic, and a pull needs Sub on a retry topic's group,
too. What names a message by its physical offset or id needs a right on the topic that lies there (`_PLACES`).
Source: behaviour.md §9.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from rmqkit.errors import ProtocolError
from rmqkit.protocol.codes import Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.names import HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, is_light
from rmqkit.protocol.properties import INNER_MULTI_DISPATCH, REAL_TOPIC, find_property
from rmqkit.protocol.record import Record
from rmqkit.protocol.schemas.clients import HeartbeatData, LockBody
from rmqkit.protocol.schemas.pop import BatchAckBody
from rmqkit.remoting.policies import Actions, Resource, group_resource, topic_resource
from rmqkit.remoting.router import decode_body

__all__ = ["NotReadable", "needed"]

_PUB, _SUB, _GET, _CREATE, _UPDATE, _DELETE = (
    frozenset([name]) for name in ("Pub", "Sub", "Get", "Create", "Update", "Delete")
)
_NULL = "null"
_FLAGS = "-;,!~="

_ROWS: tuple[tuple[Actions, str, tuple[Code, ...]], ...] = (
    (_PUB, "topic=", (Code.RECALL_MESSAGE,)),
    (_PUB, "topic-", (Code.END_TRANSACTION,)),
    (_SUB, "group!", (Code.CONSUMER_SEND_MSG_BACK,)),
    (_SUB, "topic! consumerGroup!", (Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)),
    (_SUB, "consumerGroup-", (Code.UNREGISTER_CLIENT,)),
    (_SUB, "consumerGroup topic", (Code.POP_MESSAGE, Code.ACK_MESSAGE)),
    (_SUB, "consumerGroup topic", (Code.CHANGE_MESSAGE_INVISIBLETIME, Code.NOTIFICATION)),
    (_SUB, "topic consumerGroup", (Code.PEEK_MESSAGE,)),
    (_SUB, "consumerGroup topic", (Code.CONSUME_MESSAGE_DIRECTLY,)),
    (_SUB | _GET, "topic=", (Code.QUERY_MESSAGE,)),
    (_SUB | _GET, "consumerGroup!", (Code.GET_CONSUMER_LIST_BY_GROUP,)),
    (_SUB | _GET, "topic~ consumerGroup!", (Code.QUERY_CONSUMER_OFFSET,)),
    (_SUB | _UPDATE, "topic~ consumerGroup!", (Code.UPDATE_CONSUMER_OFFSET,)),
    (_CREATE, "topic", (Code.UPDATE_AND_CREATE_TOPIC,)),
    (_DELETE, "topic", (Code.DELETE_TOPIC_IN_BROKER,)),
    (_DELETE, "groupName", (Code.DELETE_SUBSCRIPTIONGROUP,)),
    (_UPDATE, "group topic", (Code.INVOKE_BROKER_TO_RESET_OFFSET, Code.UPDATE_AND_GET_GROUP_FORBIDDEN)),
    (_UPDATE, "destGroup topic", (Code.CLONE_GROUP_OFFSET,)),
    (_UPDATE, "topic", (Code.RESUME_CHECK_HALF_MESSAGE,)),
    (_UPDATE, "", (Code.NOTIFY_MIN_BROKER_ID_CHANGE, Code.EXCHANGE_BROKER_HA_INFO, Code.RESET_MASTER_FLUSH_OFFSET)),
    (_UPDATE, "", (Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER, Code.AUTH_DELETE_USER)),
    (_UPDATE, "", (Code.AUTH_CREATE_ACL, Code.AUTH_UPDATE_ACL, Code.AUTH_DELETE_ACL)),
    (_GET, "", (Code.AUTH_GET_USER, Code.AUTH_LIST_USER, Code.AUTH_GET_ACL, Code.AUTH_LIST_ACL)),
    (_GET, "", (Code.GET_PRODUCER_CONNECTION_LIST, Code.GET_ALL_PRODUCER_INFO)),
    (_GET, "", (Code.VIEW_BROKER_STATS_DATA, Code.GET_BROKER_CONSUME_STATS)),
    (_GET, "topic", (Code.GET_MIN_OFFSET, Code.GET_MAX_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP)),
    (_GET, "topic", (Code.GET_EARLIEST_MSG_STORETIME, Code.GET_TOPIC_STATS_INFO, Code.GET_TOPIC_CONFIG)),
    (_GET, "topic", (Code.QUERY_TOPIC_CONSUME_BY_WHO,)),
    (_GET, "topic", (Code.VIEW_MESSAGE_BY_ID,)),
    (_GET, "topic consumerGroup", (Code.QUERY_CONSUME_QUEUE,)),
    (_GET, "topic group", (Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.QUERY_CONSUME_TIME_SPAN)),
    (_GET, "group", (Code.GET_SUBSCRIPTIONGROUP_CONFIG, Code.QUERY_TOPICS_BY_CONSUMER)),
    (_GET, "group topic", (Code.QUERY_SUBSCRIPTION_BY_CONSUMER,)),
    (_GET, "consumerGroup", (Code.GET_CONSUMER_CONNECTION_LIST, Code.GET_CONSUMER_RUNNING_INFO)),
    (_GET, "consumerGroup topic", (Code.POLLING_INFO,)),
    (_GET, "consumerGroup topic topicList;", (Code.GET_CONSUME_STATS,)),
    (_GET, "filterGroups, compareGroup topic", (Code.QUERY_CORRECTION_OFFSET,)),
)
_BY_CODE = {
    int(code): (actions, [(name.rstrip(_FLAGS), name.removeprefix(name.rstrip(_FLAGS))) for name in names.split()])
    for actions, names, codes in _ROWS
    for code in codes
}
# Pub on the topic, which this field holds; who sends to a retry topic needs Sub on its group.
_SENDS = {
    Code.SEND_MESSAGE: "topic",
    Code.SEND_MESSAGE_V2: "b",
    Code.SEND_BATCH_MESSAGE: "b",
    Code.SEND_REPLY_MESSAGE: "topic",
    Code.SEND_REPLY_MESSAGE_V2: "b",
}
_REPLIES = {Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2}

# What consumers say in a body: Sub on the groups, and on topics that are no retry topics.
_IN_BODIES = {Code.HEART_BEAT, Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ, Code.BATCH_ACK_MESSAGE}

# The field with a physical offset, or with an id that holds one, and what is needed on the topic of the message there,
# besides the row. For a message that is sent back the right on one of its light queues will do: its consumer may have
# read it there, which the request does not say.
_PLACES = {
    Code.END_TRANSACTION: ("commitLogOffset", _PUB),
    Code.CONSUMER_SEND_MSG_BACK: ("offset", _SUB),
    Code.VIEW_MESSAGE_BY_ID: ("offset", _SUB | _GET),
    Code.CONSUME_MESSAGE_DIRECTLY: ("msgId", _SUB | _GET),
    Code.RESUME_CHECK_HALF_MESSAGE: ("msgId", _UPDATE),
}

_KEPT_ELSEWHERE = {HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC}


class NotReadable(Exception):
    """A request does not say what it is about."""


def needed(
    command: Command,
    fields: Mapping[str, str],
    cluster: str,
    message_at: Callable[[int], Record | None] = lambda physical_offset: None,
) -> Iterator[tuple[Resource, Actions]]:
    """Resources (``Topic:orders``) and the actions of which one has to be allowed on each, in the reference's order.
    ``message_at``: what lies at a physical offset. Raises NotReadable."""
    code = command.code
    if (row := _BY_CODE.get(code)) is not None:
        actions, named = row
        if not named:
            yield f"Cluster:{cluster}", actions
        for field, flag in named:
            for resource in _resources(field, flag, fields.get(field)):
                yield resource, actions
        if code in _PLACES:
            yield from _of_place(code, fields, message_at)
    elif code in _SENDS:
        topic = fields.get(_SENDS[Code(code)], _NULL)
        if code not in _REPLIES or not topic.endswith(f"{cluster}_REPLY_TOPIC"):
            yield (group_resource(topic), _SUB) if topic.startswith(RETRY_PREFIX) else (f"Topic:{topic}", _PUB)
    elif code in _IN_BODIES:
        for resource in dict.fromkeys(_said(command)):
            yield resource, _SUB


def _resources(field: str, flag: str, value: str | None) -> Iterator[str]:
    if value is None and flag and flag in "!~=":
        value = _NULL
    if value is None or (flag == "-" and not value.strip()):
        return
    for name in filter(None, dict.fromkeys(value.split(flag))) if flag and flag in ";," else (value,):
        if "roup" in field:
            yield f"Group:{name}"
        elif flag == "=" or not name.startswith(RETRY_PREFIX):
            yield f"Topic:{name}"
        elif flag != "~":
            yield group_resource(name)


def _of_place(
    code: int, fields: Mapping[str, str], message_at: Callable[[int], Record | None]
) -> Iterator[tuple[Resource, Actions]]:
    field, actions = _PLACES[Code(code)]
    if field not in fields:
        return
    try:
        offset = _offset_in(fields[field]) if field == "msgId" else msgspec.convert(fields[field], Int64, strict=False)
    except msgspec.ValidationError:
        raise NotReadable from None
    record = message_at(offset)
    if record is None:
        return
    topic = record.topic
    if topic in _KEPT_ELSEWHERE:
        topic = (find_property(record.properties, REAL_TOPIC.encode()) or topic.encode()).decode("utf-8", "replace")
    resource = topic_resource(topic)
    light = find_property(record.properties, INNER_MULTI_DISPATCH.encode())
    if light is None or code != Code.CONSUMER_SEND_MSG_BACK:
        yield resource, actions
    else:
        names = filter(is_light, light.decode("utf-8", "replace").split(","))
        yield (resource, *(f"Topic:{name}" for name in names)), actions


def _offset_in(message_id: str) -> int:
    """The physical offset in a message id, -1 in what is none: its handler refuses that."""
    try:
        return decode_offset_id(message_id)[2]
    except ValueError:
        return -1


def _said(command: Command) -> Iterator[str]:
    """The groups in a body, each with its topics behind it."""
    try:
        if command.code == Code.HEART_BEAT:
            for one in decode_body(command, HeartbeatData).consumerDataSet:
                yield group_resource(one.group_name)
                yield from _topics(each.topic for each in one.subscription_data_set)
        elif command.code == Code.BATCH_ACK_MESSAGE:
            acks = decode_body(command, BatchAckBody).acks
            for group, topic in dict.fromkeys((ack.group, ack.topic) for ack in acks):
                yield group_resource(group)
                yield from _topics([topic])
        else:
            locks = decode_body(command, LockBody)
            yield group_resource(locks.consumer_group)
            yield from _topics(queue.topic for queue in locks.queues)
    except ProtocolError:
        raise NotReadable from None


def _topics(names: Iterable[str]) -> Iterator[str]:
    return (f"Topic:{name}" for name in names if not name.startswith(RETRY_PREFIX))
