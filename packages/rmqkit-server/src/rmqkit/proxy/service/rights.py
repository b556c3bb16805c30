"""The permissions that each call needs (``ProxyAuthorizationContextBuilder``). Source: grpc.md §2.3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rmqkit.policies import topic_resource
from rmqkit.proxy.backend import Wanted
from rmqkit.proxy.schema.status import Code, Refused

__all__ = ["wanted_by", "wanted_of", "wanted_topic"]

_PUB, _SUB = frozenset(["Pub"]), frozenset(["Sub"])
_CONSUMERS = range(2, 7)


def wanted_by(name: str, asked: Any) -> list[Wanted]:
    """Return the resources and actions that a call needs. Raises Refused: a resource has no name."""
    match name:
        case "QueryRoute":
            return [(_topic(asked.topic.name), _PUB | _SUB)]
        case "SendMessage":
            if not asked.messages:
                raise Refused(Code.UNAUTHORIZED, "message is null.")
            return [(_topic(asked.messages[0].topic.name), _PUB)]
        case "EndTransaction" | "RecallMessage":
            return [(_topic(asked.topic.name), _PUB)]
        case "ReceiveMessage":
            return _consumed(asked.group.name, asked.message_queue.topic.name)
        case (
            "SyncLiteSubscription"
            | "AckMessage"
            | "ForwardMessageToDeadLetterQueue"
            | "QueryAssignment"
            | "ChangeInvisibleDuration"
        ):
            # The reference requires only the group for ChangeInvisibleDuration. But with an invented handle a client
            # could move a message of any topic to the group's retry topic.
            return _consumed(asked.group.name, asked.topic.name)
        case "Heartbeat":
            return [(_group(asked.group.name), _SUB)] if asked.client_type in _CONSUMERS else []
        case "NotifyClientTermination":  # the caller adds `wanted_of` the client
            return [(_group(asked.group.name), _SUB)] if asked.group.name else []
        case "Telemetry" if asked.HasField("settings"):
            return _of_settings(asked.settings)
    return []


def wanted_of(group: str | None, topics: Iterable[str]) -> list[Wanted]:
    """Return the permissions that a client's own group and the topics of its producers need."""
    wanted: list[Wanted] = [] if group is None else [(_group(group), _SUB)]
    return wanted + [(_topic(topic), _PUB) for topic in sorted(topics)]


def wanted_topic(topic: str) -> list[Wanted]:
    """Return the permission that a consumer of a topic needs."""
    return [(_topic(topic), _SUB)]


def _of_settings(settings: Any) -> list[Wanted]:
    if settings.HasField("publishing"):
        return [(_topic(topic.name), _PUB) for topic in settings.publishing.topics]
    wanted: list[Wanted] = [(_group(settings.subscription.group.name), _SUB)]
    return wanted + [(_topic(entry.topic.name), _SUB) for entry in settings.subscription.subscriptions]


def _consumed(group: str, topic: str) -> list[Wanted]:
    return [(_group(group), _SUB), (_topic(topic), _SUB)]


def _topic(name: str) -> str:
    if not name.strip():
        raise Refused(Code.UNAUTHORIZED, "topic is null.")
    return topic_resource(name)


def _group(name: str) -> str:
    if not name.strip():
        raise Refused(Code.UNAUTHORIZED, "group is null.")
    return f"Group:{name}"
