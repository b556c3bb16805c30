"""The rights that requests require: resources and actions by request code (the header annotations and
``DefaultAuthorizationContextBuilder``; the annotations were read out of 5.4.0's jar).

`Operation.right` declares the right of a code. Its actions are alternatives: the user needs one of them. Its fields
name the resources, and the user needs the right on each of these resources. A field whose name contains ``group`` holds
a group. Every other field holds a topic. A right without fields is about the broker's cluster. Flags at the end of a
field's name:

========== ===========================================================================================
``topic``  a missing field needs no right; a retry topic means its group
``topic-`` the same, and a blank field needs no right
``topic;`` the field holds several names; ``topic,`` with the other separator
``topic!`` a missing field needs a right on a resource called null, as in the reference
``topic~`` like ``!``, and a retry topic needs no right: its group is in another field
``topic=`` like ``!``, and a retry topic is a topic like others
========== ===========================================================================================

A code without a declared right needs no right, as at Apache's brokers. Some codes need a right only here, because
otherwise everybody could read, write and acknowledge everything. LITE_PULL_MESSAGE needs the rights of a pull,
BATCH_ACK_MESSAGE the rights of acks, a deletion of several topics or groups the rights of their single deletions, and
SEND_REPLY_MESSAGE the rights of a send, unless its topic is the cluster's reply topic. A pull from a retry topic also
needs Sub on its group. A request that names a message by its physical offset or id needs a right on the message's topic
(`Right.message`).
Source: behaviour.md §9.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from rmqkit.errors import ProtocolError
from rmqkit.policies import Actions, Resource, group_resource, topic_resource
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.codes import Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.names import HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, is_light, split_lite_queue
from rmqkit.protocol.operation import actions_of
from rmqkit.protocol.properties import INNER_MULTI_DISPATCH, REAL_TOPIC, find_property
from rmqkit.protocol.record import Record
from rmqkit.protocol.schemas.clients import HeartbeatData, LockBody
from rmqkit.protocol.schemas.groups import GroupNameList
from rmqkit.protocol.schemas.lite import LiteSubscriptionCtlBody
from rmqkit.protocol.schemas.pop import BatchAckBody
from rmqkit.protocol.schemas.topics import TopicNameList
from rmqkit.remoting.router import decode_body

__all__ = ["NotReadable", "needed"]

_PUB, _SUB = actions_of("Pub"), actions_of("Sub")
_NULL = "null"
_FLAGS = "-;,!~="

# Code → actions, and fields with their flags. Sends and requests with resources in their body are not included.
_BY_CODE = {
    code: (
        actions_of(row.right.actions),
        [(name.rstrip(_FLAGS), name.removeprefix(name.rstrip(_FLAGS))) for name in row.right.fields.split()],
    )
    for code, row in CATALOG.items()
    if row.right is not None and not row.right.is_send and not row.right.is_body
}
# Code → the field that holds the topic. A send to a topic requires Pub, a send to a retry topic Sub on its group.
_SENDS = {code: row.right.fields for code, row in CATALOG.items() if row.right is not None and row.right.is_send}
_REPLIES = {Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2}

# Code → actions on the groups and topics in the body. Consumers do not need them on retry topics.
_IN_BODIES = {
    code: actions_of(row.right.actions) for code, row in CATALOG.items() if row.right is not None and row.right.is_body
}

# Code → the field with a physical offset, or with an id that holds one, and the actions on the topic of that message.
# The user needs one of these actions in addition to the right of the row. For a message that is sent back, a right on
# one of its light queues is enough: the consumer may have read the message there, but the request does not name it.
_PLACES = {
    code: (row.right.message, actions_of(row.right.message_actions))
    for code, row in CATALOG.items()
    if row.right is not None and row.right.message
}

_KEPT_ELSEWHERE = {HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC}


class NotReadable(Exception):
    """The resources that a request names cannot be read."""


def needed(
    command: Command,
    fields: Mapping[str, str],
    cluster: str,
    message_at: Callable[[int], Record | None] = lambda physical_offset: None,
) -> Iterator[tuple[Resource, Actions]]:
    """Yield the resources (``Topic:orders``) of a request, in the reference's order, with their actions. One action of
    each resource must be allowed. ``message_at``: returns the record at a physical offset. Raises NotReadable."""
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
        topic = fields.get(_SENDS[code], _NULL)
        if code not in _REPLIES or not topic.endswith(f"{cluster}_REPLY_TOPIC"):
            yield (group_resource(topic), _SUB) if topic.startswith(RETRY_PREFIX) else (f"Topic:{topic}", _PUB)
    elif code in _IN_BODIES:
        for resource in dict.fromkeys(_said(command)):
            yield resource, _IN_BODIES[code]


def _resources(field: str, flag: str, value: str | None) -> Iterator[str]:
    if value is None and flag and flag in "!~=":
        value = _NULL
    if value is None or (flag == "-" and not value.strip()):
        return
    for name in filter(None, dict.fromkeys(value.split(flag))) if flag and flag in ";," else (value,):
        if "roup" in field:
            yield f"Group:{name}"
        elif flag == "=" or not name.startswith(RETRY_PREFIX):
            yield _topic(name)
        elif flag != "~":
            yield group_resource(name)


def _of_place(
    code: int, fields: Mapping[str, str], message_at: Callable[[int], Record | None]
) -> Iterator[tuple[Resource, Actions]]:
    field, actions = _PLACES[code]
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
        yield (resource, *map(_topic, names)), actions


def _offset_in(message_id: str) -> int:
    """Return the physical offset in a message id, or -1 for an invalid id, which the request's handler refuses."""
    try:
        return decode_offset_id(message_id)[2]
    except ValueError:
        return -1


def _said(command: Command) -> Iterator[str]:
    """Yield the groups and topics in a body."""
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
        elif command.code == Code.LITE_SUBSCRIPTION_CTL:
            changes = decode_body(command, LiteSubscriptionCtlBody).subscription_set if command.payload else []
            for group, topic in dict.fromkeys((one.group or "", one.topic or "") for one in changes):
                yield group_resource(group)
                yield from _topics([topic])
        elif command.code == Code.DELETE_TOPIC_IN_BROKER_LIST:
            names = decode_body(command, TopicNameList).topic_list
            yield from (_topic(name) if is_light(name) else topic_resource(name) for name in names)
        elif command.code == Code.DELETE_SUBSCRIPTION_GROUP_LIST:
            yield from (f"Group:{group}" for group in decode_body(command, GroupNameList).group_name_list)
        else:
            locks = decode_body(command, LockBody)
            yield group_resource(locks.consumer_group)
            yield from _topics(queue.topic for queue in locks.queues)
    except ProtocolError:
        raise NotReadable from None


def _topics(names: Iterable[str]) -> Iterator[str]:
    return (_topic(name) for name in names if not name.startswith(RETRY_PREFIX))


def _topic(name: str) -> str:
    """Return the resource of a topic. A lite topic belongs to its parent."""
    place = split_lite_queue(name) if is_light(name) else None
    return f"Topic:{name if place is None else place[0]}"
