"""Dead letters: which groups have them, and of which kinds they are.

RocketMQ stores a dead letter as the message it was, in ``%DLQ%<group>``. rmqkit's consumers add the exception. These
tell kinds apart:

========  ============================================================================================================
by        what a message is put under
========  ============================================================================================================
kind      the topic it came from, its tag, and its reason; without one the shape of its body
topic     the topic it came from
tag       its tag
reason    the property ``rmqkit_reason``, which rmqkit's consumers write; its numbers are made one, ``#``
host      the host it was first sent from
shape     what its body looks like: keys of a JSON object, text, bytes
a name    the value of that property, as ``property:country``
========  ============================================================================================================

`kind_of` and `grouped` are pure. `Dead` asks brokers. `rmqkit.admin.replay.replay` sends dead letters again.
Source: behaviour.md §6.4, §9.7.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.pulls import Span
from rmqkit.errors import SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import DLQ_PREFIX, RETRY_PREFIX, dlq_topic
from rmqkit.protocol.properties import BORN_HOST, DEAD_LETTER_REASON, DLQ_ORIGIN_TOPIC, RETRY_TOPIC
from rmqkit.protocol.schemas.offsets import TopicStatsTable
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.sentences import _

__all__ = ["BY", "DRY_RUN", "Dead", "DeadGroup", "Kind", "Kinds", "check_by", "grouped", "kind_of", "origin"]

BY = ("kind", "topic", "tag", "reason", "host", "shape")
DRY_RUN = Budget(ms=10_000.0)
"""What a look at dead letters, or a dry run over them, may cost."""

_PROPERTY = "property:"
_KEYS_MAX = 8
_NUMBERS = re.compile(r"\d+")


class DeadGroup(Struct, rename="camel", kw_only=True):
    """A group with dead letters: how many are stored, and when the last one was, in ms."""

    group: str
    topic: str
    count: int
    last_ms: int


class Kind(Struct, rename="camel", kw_only=True):
    """Dead letters of one kind.

    Attributes:
        first_ms, last_ms: store time of the first and the last one.
        targets: how many came from each topic; the empty name is of those that do not say it.
        example: place of the last one, ``broker:queue:offset``.
    """

    kind: str
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0
    targets: dict[str, int] = field(default_factory=dict)
    example: str = ""


class Kinds(Struct, rename="camel", kw_only=True):
    """The kinds of a group's dead letters, the most frequent first.

    Attributes:
        examined: how many were looked at, of ``total``.
        is_whole: whether that were all.
        troubles: queues that could not be read, each with the reason.
    """

    group: str
    by: str
    kinds: list[Kind]
    examined: int
    total: int
    is_whole: bool
    troubles: list[str]


def origin(message: ReceivedMessage) -> str | None:
    """The topic a message was first sent to; None for a retry or dead letter that does not say it."""
    names = (message.topic, *map(message.properties.get, (RETRY_TOPIC, DLQ_ORIGIN_TOPIC)))
    return next((name for name in names if name and not name.startswith((RETRY_PREFIX, DLQ_PREFIX))), None)


def check_by(by: str) -> str:
    """Return the name of a grouping if it is valid. Raises SettingsError: it is none of `BY`, nor a property."""
    if by not in BY and not (by.startswith(_PROPERTY) and len(by) > len(_PROPERTY)):
        raise SettingsError(_("by {by} must be {names}, or property:NAME", by=by, names=", ".join(BY)))
    return by


def kind_of(message: ReceivedMessage, by: str = "kind") -> str:
    """Return the group of a message under a grouping, in one line."""
    topic, tag = _line(origin(message) or "") or _("unknown topic"), _line(message.tags or "") or _("no tag")
    match by:
        case "topic":
            return topic
        case "tag":
            return tag
        case "reason":
            return _reason(message) or _("no reason")
        case "host":
            return _host(message)
        case "shape":
            return _shape(message.body)
        case "kind":
            what = _reason(message) or _shape(message.body)
            return _("{topic} · {tag} · {what}", topic=topic, tag=tag, what=what)
    name = by.removeprefix(_PROPERTY)
    return _line(message.properties[name]) if name in message.properties else _("no {name}", name=name)


def _line(text: str) -> str:
    return " ".join(text.split())


def _reason(message: ReceivedMessage) -> str:
    return _line(_NUMBERS.sub("#", message.properties.get(DEAD_LETTER_REASON, "")))


def _host(message: ReceivedMessage) -> str:
    first = _line(message.properties.get(BORN_HOST, "")) or message.born_host
    host, colon, port = first.rpartition(":")
    return host if colon and port.isdecimal() else first


def _shape(body: bytes) -> str:
    if not body:
        return _("empty")
    if body[:1] in (b"{", b"["):
        try:
            value = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _("text that begins like JSON")
        if isinstance(value, dict):
            keys = sorted(value)
            if not keys:
                return _("JSON without keys")
            first = _line(", ".join(keys[:_KEYS_MAX]))
            if (more := len(keys) - _KEYS_MAX) > 0:
                return _("JSON {keys} and {more} more", keys=first, more=more)
            return _("JSON {keys}", keys=first)
        return _("JSON list")
    try:
        return _("bytes") if "\x00" in body.decode() else _("text")
    except UnicodeDecodeError:
        return _("bytes")


def grouped(messages: Iterable[ReceivedMessage], by: str = "kind") -> list[Kind]:
    """Messages by their kind, the most frequent first. Pure."""
    found: dict[str, Kind] = {}
    targets: dict[str, Counter[str]] = {}
    for message in messages:
        name, stored_ms = kind_of(message, by), message.store_timestamp
        kind = found.get(name)
        if kind is None:
            kind = found[name] = Kind(kind=name, first_ms=stored_ms)
            targets[name] = Counter()
        kind.count += 1
        targets[name][origin(message) or ""] += 1
        kind.first_ms = min(kind.first_ms, stored_ms)
        if stored_ms > kind.last_ms or not kind.example:
            kind.last_ms = stored_ms
            kind.example = f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"
    for name, kind in found.items():
        kind.targets = dict(targets[name].most_common())
    return sorted(found.values(), key=lambda one: (-one.count, one.kind))


class Dead:
    """Operations on dead letters; each raises what `AdminCalls` raises."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def groups(self) -> list[DeadGroup]:
        """Every group that has dead letters, the most of them first."""
        topics = [name for name in await self._calls.topic_names() if name.startswith(DLQ_PREFIX)]
        found = await self._calls.fan_out(topics, self._of)
        return sorted((one for one in found.values() if one.count), key=lambda one: (-one.count, one.group))

    async def kinds(self, group: str, by: str = "kind", budget: Budget = DRY_RUN) -> Kinds:
        """The kinds of a group's dead letters, of as many of the newest ones as a budget lets be examined.
        Raises UnknownName: the group has none. Raises SettingsError: there is no such way to tell them apart."""
        found = await page(self._calls, dlq_topic(group), Span(), count=budget.messages, budget=budget)
        return Kinds(
            group=group,
            by=check_by(by),
            kinds=grouped(found.messages, by),
            examined=found.examined,
            total=found.total,
            is_whole=not found.cursor or found.examined >= found.total,
            troubles=found.troubles,
        )

    async def _of(self, topic: str) -> DeadGroup:
        group, code = topic.removeprefix(DLQ_PREFIX), RequestCode.GET_TOPIC_STATS_INFO
        try:
            masters = await self._calls.masters_of_topic(topic)
        except UnknownName:  # it was deleted since the names were read
            masters = {}
        tables = await self._calls.fan_out(
            masters.values(), lambda address: self._calls.fetch(TopicStatsTable, address, code, TopicRequest(topic))
        )
        queues = [queue for table in tables.values() for queue in table.offset_table.values()]
        return DeadGroup(
            group=group,
            topic=topic,
            count=sum(queue.max_offset - queue.min_offset for queue in queues),
            last_ms=max((queue.last_update_timestamp for queue in queues), default=0),
        )
