"""The selection of a replay's messages, and a dry run that counts them.

Source: behaviour.md §4.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.messages.listing import Budget, page
from rmqkit.admin.pulls import Span
from rmqkit.admin.replay.dead import DRY_RUN, check_by, kind_of, origin
from rmqkit.admin.replay.memory import Memory
from rmqkit.admin.replay.retries import Retries
from rmqkit.errors import SettingsError
from rmqkit.filter import matches_tags, subscription
from rmqkit.filter.sql92 import ExpressionRejected, compile_expression
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import is_of_applications
from rmqkit.protocol.properties import encode_properties
from rmqkit.sentences import _

FOREVER_MS = 1 << 62
_SAMPLES_MAX = 5


class Selection(Struct, frozen=True):
    """A selection of messages. A message must pass every test.

    Attributes:
        topic: the topic; None: every topic of a store except system, retry and dead-letter topics.
        begin_ms, end_ms: the bounds of the store time, both included; None: no end.
        keys: a message must have one of these keys or unique keys; empty: any key.
        tags, sql: a tag expression (``A || B``), and an SQL92 expression or an empty text.
        by: the grouping for the kinds of dead letters (`rmqkit.admin.replay.dead.kind_of`).
        kinds, kind_parts: names of kinds, and parts of such names. A message needs a match in one of the two; if both
            are empty, every kind passes.
    """

    topic: str | None = None
    begin_ms: int = 0
    end_ms: int | None = None
    keys: tuple[str, ...] = ()
    tags: str = "*"
    sql: str = ""
    by: str = "kind"
    kinds: tuple[str, ...] = ()
    kind_parts: tuple[str, ...] = ()

    def test(self) -> Callable[[ReceivedMessage], bool]:
        """Return a function that tests if a message is selected. Raises SettingsError: an expression is not valid."""
        try:
            tags = subscription(self.topic or "*", self.tags)
            expression = compile_expression(self.sql) if self.sql else None
        except (ValueError, ExpressionRejected) as error:
            raise SettingsError(_("replay: {error}", error=error)) from None
        keys, end_ms = set(self.keys), FOREVER_MS if self.end_ms is None else self.end_ms
        by, kinds, parts = check_by(self.by), frozenset(self.kinds), self.kind_parts

        def is_of_kind(message: ReceivedMessage) -> bool:
            kind = kind_of(message, by)
            return kind in kinds or any(part in kind for part in parts)

        def is_selected(message: ReceivedMessage) -> bool:
            topic = message.topic
            is_of_topic = is_of_applications(topic) if self.topic is None else topic == self.topic
            return (
                is_of_topic
                and self.begin_ms <= message.store_timestamp <= end_ms
                and (not keys or not keys.isdisjoint((message.msg_id, *message.keys)))
                and matches_tags(tags, message.tags)
                and (expression is None or expression.matches(encode_properties(message.properties)))
                and (not (kinds or parts) or is_of_kind(message))
            )

        return is_selected


class Sample(Struct, rename="camel"):
    """A message of a dry run: its place (``broker:queue:offset``), the topic to which it would be sent, its kind."""

    place: str
    to: str
    kind: str


class Preview(Struct, rename="camel", kw_only=True):
    """The result of a dry run: the messages that a replay would send.

    Attributes:
        count: the number of selected messages among the examined ones.
        targets: the number of messages for each target topic; the empty name is for messages without a known origin.
        kinds: the number of messages of each kind.
        doubles: the number of messages with the unique key of an earlier message; a replay sends them too.
        samples: the first selected messages.
        examined: the number of examined messages.
        is_whole: True if all messages were examined.
        remembered: the number of selected messages that were already replayed; ``count`` does not include them.
        troubles: the queues that could not be read, each with the reason.
    """

    count: int = 0
    remembered: int = 0
    targets: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    doubles: int = 0
    samples: list[Sample] = field(default_factory=list)
    examined: int = 0
    is_whole: bool = True
    troubles: list[str] = field(default_factory=list)

    def add(self, message: ReceivedMessage, to: str, by: str, seen: set[str]) -> None:
        """Count a message that would be sent to topic ``to``. ``seen`` has the unique keys of earlier messages."""
        kind = kind_of(message, by)
        self.count += 1
        self.targets[to] = self.targets.get(to, 0) + 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.doubles += message.msg_id in seen
        seen.add(message.msg_id)
        if len(self.samples) < _SAMPLES_MAX:
            place = f"{message.broker_name}:{message.queue_id}:{message.queue_offset}"
            self.samples.append(Sample(place, to, kind))


async def preview(
    calls: AdminCalls,
    selection: Selection,
    target: str | None,
    budget: Budget = DRY_RUN,
    *,
    retries: Retries | None = None,
    memory: Memory | None = None,
) -> Preview:
    """Return the result of a dry run over a topic, the oldest messages first, within a budget. No message is sent. For
    ``target``, ``retries`` and ``memory``, see `Replay`. Raises the errors of `rmqkit.admin.messages.listing.page`."""
    assert selection.topic is not None, "a dry run has a topic"
    is_selected, span = selection.test(), Span(begin_ms=selection.begin_ms, end_ms=selection.end_ms)
    found = await page(calls, selection.topic, span, newest_first=False, count=budget.messages, budget=budget)
    shown, seen = Preview(examined=found.examined, is_whole=not found.cursor, troubles=found.troubles), set[str]()
    for message in found.messages:
        if not is_selected(message):
            continue
        lane = f"{message.broker_name}:{message.queue_id}"
        if memory is not None and memory.has(lane, message.queue_offset):
            shown.remembered += 1
        else:
            shown.add(message, destination(message, target, retries), selection.by, seen)
    return shown


def destination(message: ReceivedMessage, target: str | None, retries: Retries | None) -> str:
    """Return the topic to which a replay sends a message, or "" if the origin of the message is unknown."""
    first = origin(message)
    if target is not None or first is None or retries is None:
        return target or first or ""
    return retries.topic(first)
