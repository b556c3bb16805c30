"""Which messages a replay sends, and a dry run that counts them.

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
    """Which messages; without a topic all of a store but those of the system, of retries and dead letters. Times are
    bounds of ``storeTimestamp`` in ms; ``tags`` is ``A || B``, ``sql`` an SQL92 text; one of ``keys`` is enough.
    ``kinds`` are names of `rmqkit.admin.replay.dead.kind_of`, distinguished ``by``; ``kind_parts`` are texts that the
    name of a kind contains. One of both is enough; without any, all kinds are selected."""

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
        """Return a test for selected messages. Raises SettingsError: an expression cannot be understood."""
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
    """A message of a dry run: where it is, ``broker:queue:offset``, and the topic it would go to."""

    place: str
    to: str
    kind: str


class Preview(Struct, rename="camel", kw_only=True):
    """A dry run: what a replay would send.

    Attributes:
        count: messages that are selected, of those that were examined.
        targets: how many go to each topic; the empty name is of those that do not say where they came from.
        kinds: how many are of each kind.
        doubles: messages whose unique key was there before: all of them are sent.
        samples: the first ones.
        examined: how many were looked at.
        is_whole: whether everything was looked at.
        remembered: how many are selected and were replayed before; they are not counted in ``count``.
        troubles: queues that could not be read, each with the reason.
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
        """Count a message that would go to a topic; ``seen`` are the unique keys of the messages before it."""
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
    """Make a dry run over a topic, as far as a budget lets messages be examined, the oldest first; nothing is sent.
    ``target``, ``retries``, ``memory``: as of `Replay`.
    Raises what `rmqkit.admin.messages.listing.page` raises."""
    assert selection.topic is not None, "a dry run of a store is its command's"
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
    """Return the topic to which a message is sent, or "" if it does not say where it came from."""
    first = origin(message)
    if target is not None or first is None or retries is None:
        return target or first or ""
    return retries.topic(first)
