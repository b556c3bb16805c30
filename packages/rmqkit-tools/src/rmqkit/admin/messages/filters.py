"""The test of a filter: the value of each part of a tag or SQL92 expression, for some properties or the last messages.

Each result has the verdict of rmqkit and the verdict of the broker. The broker's verdict comes from a pull with the
expression. A broker compares only the hash of a tag. Many brokers do not filter by SQL92 (``enablePropertyFilter``).
Their error is the ``trouble``. Source: behaviour.md §6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.pulls import Span, pull_request, readers
from rmqkit.errors import RmqError, SettingsError
from rmqkit.filter import SQL92, TAG, matches_tags, subscription
from rmqkit.filter.sql92 import ExpressionRejected, Part, compile_expression
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.properties import TAGS, encode_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.rpc import PullStatus
from rmqkit.sentences import _

__all__ = ["EXPRESSION_MAX", "FilterTest", "Filters", "Tested", "apply_filter", "parse_properties"]

EXPRESSION_MAX = 4_096
MESSAGES_MAX = 200
_BUDGET = Budget(messages=MESSAGES_MAX, body_bytes=8 << 20)
_PULLS_MAX = 40


class Tested(Struct, rename="camel", kw_only=True):
    """The result of a filter for one message or some properties.

    Attributes:
        place: ``broker:queue:offset`` of a message, empty for properties.
        wanted: True if the filter accepts the message.
        broker_says: True if the broker delivers the message; None if the verdict of the broker is missing.
        part: the whole expression with its value and its parts.
    """

    place: str
    wanted: bool
    part: Part
    broker_says: bool | None = None
    properties: dict[str, str] = field(default_factory=dict)


class FilterTest(Struct, rename="camel", kw_only=True):
    """A filter and its results, the newest message first. ``trouble``: the reason if brokers' verdicts are missing."""

    expression: str
    type: str
    tested: list[Tested]
    trouble: str = ""

    @property
    def differ(self) -> int:
        """The number of messages with different verdicts of rmqkit and the broker."""
        return sum(one.broker_says not in (None, one.wanted) for one in self.tested)


def parse_properties(lines: str) -> dict[str, str]:
    """Return the properties in ``name=value`` lines. Raises SettingsError: a line has no name, or no ``=``."""
    found: dict[str, str] = {}
    for line in lines.splitlines():
        if not line.strip():
            continue
        name, sign, value = line.partition("=")
        if not sign or not name.strip():
            raise SettingsError(_("property {line!r} must be NAME=VALUE", line=line.strip()[:80]))
        found[name.strip()] = value.strip()
    return found


def apply_filter(expression: str, kind: str, properties: Mapping[str, str], place: str = "") -> Tested:
    """Return the result of a filter for a message with some properties. This function is pure.

    Raises SettingsError: the expression does not compile, has an unknown kind, or is longer than `EXPRESSION_MAX`.
    """
    if len(expression) > EXPRESSION_MAX:
        raise SettingsError(
            _(
                "the expression has {count:,} characters: {most:,} are tested",
                count=len(expression),
                most=EXPRESSION_MAX,
            )
        )
    if kind not in (TAG, SQL92):
        raise SettingsError(_("type {kind} must be {tag} or {sql92}", kind=kind, tag=TAG, sql92=SQL92))
    try:
        if kind == SQL92:
            compiled, packed = compile_expression(expression), encode_properties(properties)
            part = compiled.explain(packed)
            return Tested(place=place, wanted=compiled.matches(packed), part=part, properties=dict(properties))
        data = subscription("*", expression)
    except ExpressionRejected as error:
        raise SettingsError(_("the expression is refused: {error}", error=error)) from None
    except ValueError as error:
        raise SettingsError(str(error)) from None
    tag = properties.get(TAGS)
    parts = tuple(Part(one, tag == one) for one in data.tags_set or ())
    wanted = matches_tags(data, tag)
    return Tested(
        place=place, wanted=wanted, part=Part(data.sub_string, wanted, tag, parts=parts), properties=dict(properties)
    )


class Filters:
    """Operations that test filters with messages of a cluster. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def test(self, topic: str, expression: str, kind: str = SQL92, count: int = 50) -> FilterTest:
        """Test a filter with the newest messages of a topic: ``count``, but at most `MESSAGES_MAX`.
        Raises UnknownName: there is no such topic. Raises SettingsError: see `apply_filter`."""
        apply_filter(expression, kind, {})
        found = await page(self._calls, topic, Span(), count=min(count, MESSAGES_MAX), budget=_BUDGET)
        outcome = FilterTest(expression=expression, type=kind, tested=[])
        for message in found.messages:
            place = f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"
            outcome.tested.append(apply_filter(expression, kind, message.properties, place))
        try:
            wanted = await self._broker_wants(topic, expression, kind, found.messages)
        except RmqError as error:
            outcome.trouble = str(error)
            return outcome
        for one, message in zip(outcome.tested, found.messages, strict=True):
            at = message.broker_name or "", message.queue_id
            one.broker_says = None if at not in wanted else message.queue_offset in wanted[at]
        return outcome

    async def _broker_wants(
        self, topic: str, expression: str, kind: str, messages: Iterable[ReceivedMessage]
    ) -> dict[tuple[str, int], set[int]]:
        """Return the offsets that brokers deliver to pulls with the expression, by queue. Omit queues that were not
        read to the last message."""
        ranges: dict[tuple[str, int], tuple[int, int]] = {}
        for one in messages:
            key, at = (one.broker_name or "", one.queue_id), one.queue_offset
            low, end = ranges.get(key, (at, at + 1))
            ranges[key] = min(low, at), max(end, at + 1)
        addresses, pulls = await readers(self._calls, topic), 0
        wanted: dict[tuple[str, int], set[int]] = {}
        for (broker, queue_id), (low, end) in ranges.items():
            queue, at, got = MessageQueue(topic, broker, queue_id), low, set[int]()
            while at < end and pulls < _PULLS_MAX:
                header = pull_request(queue, at, expression, self._calls.clock.now_ms(), expression_type=kind)
                pulled = await self._calls.pull(addresses[broker], header, self._calls.timeout_ms)
                pulls += 1
                body = pulled.body if pulled.status is PullStatus.FOUND else b""
                got.update(one.queue_offset for one in read_messages(body))
                if pulled.next_begin_offset <= at:
                    break
                at = pulled.next_begin_offset
            if at >= end:
                wanted[broker, queue_id] = got
        return wanted
