"""Dead letters: the groups that have dead letters, and the kinds of a group's dead letters.

RocketMQ stores a dead letter with its original content in ``%DLQ%<group>``. rmqkit's consumers add the exception that
their handler raised. Dead letters can be grouped by:

========  ============================================================================================================
by        group of a message
========  ============================================================================================================
kind      its original topic, its tag, and its reason; without a reason, the shape of its body
topic     its original topic
tag       its tag
reason    the property ``rmqkit_reason``, which rmqkit's consumers write, with ``#`` for each number
host      the host of the producer that first sent it
shape     the shape of its body: the keys of a JSON object, JSON list, text, or bytes
a name    the value of a property; ``property:country`` groups by the property ``country``
========  ============================================================================================================

`kind_of` and `grouped` are pure. `Dead` sends requests to brokers. `rmqkit.admin.replay.replay` sends dead letters
again.
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
"""The budget for a listing of dead letters, or for a dry run."""

_PROPERTY = "property:"
_KEYS_MAX = 8
_NUMBERS = re.compile(r"\d+")


class DeadGroup(Struct, rename="camel", kw_only=True):
    """A group with dead letters: the number of stored dead letters, and the store time of the last one in ms."""

    group: str
    topic: str
    count: int
    last_ms: int


class Kind(Struct, rename="camel", kw_only=True):
    """Dead letters of one kind.

    Attributes:
        first_ms, last_ms: the store times of the first and the last dead letter.
        targets: the number of dead letters from each topic; the empty name is for an unknown topic.
        example: the place of the last dead letter, ``broker:queue:offset``.
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
        examined: the number of examined dead letters, of ``total`` stored ones.
        is_whole: True if all dead letters were examined.
        troubles: the queues that could not be read, each with the reason.
    """

    group: str
    by: str
    kinds: list[Kind]
    examined: int
    total: int
    is_whole: bool
    troubles: list[str]


def origin(message: ReceivedMessage) -> str | None:
    """Return the topic to which a message was first sent; None if a retry or dead letter does not name the topic."""
    names = (message.topic, *map(message.properties.get, (RETRY_TOPIC, DLQ_ORIGIN_TOPIC)))
    return next((name for name in names if name and not name.startswith((RETRY_PREFIX, DLQ_PREFIX))), None)


def check_by(by: str) -> str:
    """Return the name of a grouping. Raises SettingsError: the name is neither in `BY` nor ``property:NAME``."""
    if by not in BY and not (by.startswith(_PROPERTY) and len(by) > len(_PROPERTY)):
        raise SettingsError(_("by {by} must be {names}, or property:NAME", by=by, names=", ".join(BY)))
    return by


def kind_of(message: ReceivedMessage, by: str = "kind") -> str:
    """Return the name of the kind to which a message belongs under a grouping, as one line of text."""
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
    """Return the kinds of some messages, the most frequent kind first. This function is pure."""
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
    """Operations on dead letters. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def groups(self) -> list[DeadGroup]:
        """Return every group with dead letters, sorted by their number, the largest number first."""
        topics = [name for name in await self._calls.topic_names() if name.startswith(DLQ_PREFIX)]
        found = await self._calls.fan_out(topics, self._of)
        return sorted((one for one in found.values() if one.count), key=lambda one: (-one.count, one.group))

    async def kinds(self, group: str, by: str = "kind", budget: Budget = DRY_RUN) -> Kinds:
        """Return the kinds of a group's dead letters. Only the newest dead letters within the budget are examined.
        Raises UnknownName: the group has no dead letters. Raises SettingsError: there is no such grouping."""
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
        except UnknownName:  # the topic was deleted after the names were read
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
