"""The events of a message, reconstructed from its stored copies. Traces only add the duration of handlers.

RocketMQ stores a message again at every step, each time with the same unique key: as a half message, as a scheduled
message, in its topic, in a retry topic, and as a dead letter. The store times of the copies form a timeline.

==============  =====================================================================
source          content
==============  =====================================================================
the message     its born time (by the producer's clock), its born host and its store time
a copy          half message, delay or timer, retry n, dead letter
a queue entry   the due time of a scheduled copy
the group       its current offset
a trace         the start, the duration and the result of a handler
==============  =====================================================================

All functions here are pure. Source: behaviour.md §3, §5, §6, §9.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from rmqkit.admin.diagnosis.causes import Facts, why_dead
from rmqkit.admin.messages.messages import TraceRow
from rmqkit.protocol import names
from rmqkit.protocol import properties as prop
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.sentences import _

__all__ = ["Event", "merged", "timeline"]

_KINDS = {
    names.HALF_TOPIC: _("stored as a half message: its transaction is open"),
    names.TRANS_CHECK_MAX_TIME_TOPIC: _("transaction given up: it was never decided"),
    names.SCHEDULE_TOPIC: _("waiting for its delay"),
    names.TIMER_TOPIC: _("waiting for its time"),
}


class Event(Struct, frozen=True, rename="camel"):
    """A past or future event of a message.

    Attributes:
        at_ms: the time of the event, in ms since the epoch.
        what: the event in words.
        where: broker, queue and offset, or empty.
        who: the client or group of the event, or empty.
        source: the record that shows the event.
        is_due: True if the event is in the future.
    """

    at_ms: int
    what: str
    where: str = ""
    who: str = ""
    source: str = ""
    is_due: bool = False


def timeline(facts: Facts) -> list[Event]:
    """Return the events of a message and a group, in order. Future events are last."""
    return merged([_events(facts)])


def merged(several: Iterable[Iterable[Event]]) -> list[Event]:
    """Return the events of several timelines in order, without duplicates."""
    events = dict.fromkeys(event for events in several for event in events)
    return sorted(events, key=lambda event: (event.is_due, event.at_ms))


def _events(facts: Facts) -> Iterator[Event]:
    stored = facts.message
    copies = [one for one in (stored, *facts.copies) if one is not None]
    if (first := min(copies, key=lambda one: one.store_timestamp, default=None)) is not None:
        yield Event(first.born_timestamp, _("sent by its producer"), "", first.born_host, _("the message's born time"))
    for copy in facts.copies:
        yield _copy(copy, facts)
    if stored is not None:
        failed = _(", after {times} failed tries", times=stored.reconsume_times) if stored.reconsume_times else ""
        where = place_text(stored)
        yield Event(
            stored.store_timestamp,
            _("stored in {topic}{failed}", topic=stored.topic, failed=failed),
            where,
            "",
            _("broker {broker}", broker=stored.broker_name),
        )
    yield from map(_trace, facts.traces)
    if facts.due_ms is not None and facts.scheduled is not None:
        is_due = facts.due_ms > facts.now_ms
        what = _("will be delivered") if is_due else _("its time came")
        yield Event(facts.due_ms, what, "", "", _("queue entry"), is_due)
    yield from _standing(facts)


def _copy(copy: ReceivedMessage, facts: Facts) -> Event:
    what = _KINDS.get(copy.topic, "")
    group = ""
    if copy.topic.startswith(names.DLQ_PREFIX):
        what, group = (
            _(
                "given up after {times} failed tries, {why}: it is a dead letter",
                times=copy.reconsume_times,
                why=why_dead(facts, copy),
            ),
            facts.group,
        )
    elif copy.topic.startswith(names.RETRY_PREFIX):
        what, group = _("retry {times} can be consumed", times=copy.reconsume_times), facts.group
    elif copy.topic in (names.SCHEDULE_TOPIC, names.TIMER_TOPIC) and copy.properties.get(
        prop.REAL_TOPIC, facts.topic
    ).startswith(names.RETRY_PREFIX):
        what, group = (
            _("failed: retry {times} follows later", times=copy.reconsume_times),
            facts.group,
        )
    elif copy.topic == names.TIMER_TOPIC and prop.TIMER_DELETE_KEY in copy.properties:
        what = _("recalled by its producer")
    elif copy.topic == names.HALF_TOPIC and (checks := copy.properties.get(prop.TRANSACTION_CHECK_TIMES)):
        what = _("half message: its producer was asked, check {checks}", checks=checks)
    return Event(
        copy.store_timestamp,
        what or _("stored in {topic}", topic=copy.topic),
        place_text(copy),
        group,
        _("broker {broker}", broker=copy.broker_name),
    )


def _trace(trace: TraceRow) -> Event:
    took = "" if trace.cost_ms is None else _(" after {cost:,} ms", cost=trace.cost_ms)
    again = _(", retry {number}", number=trace.retry_times) if trace.retry_times else ""
    ended = _("{status}{took}", status=_(trace.status) if trace.status else "", took=took)
    match trace.kind:
        case "Sub":
            what = _("handler began{again}: {ended}", again=again, ended=ended)
        case "Pub":
            what = _("send began{again}: {ended}", again=again, ended=ended)
        case "EndTransaction":
            what = _("transaction began{again}: {ended}", again=again, ended=ended)
        case _other:
            what = f"{trace.kind.lower()} began{again}: {ended}"
    who = _("{group} at {host}", group=trace.group, host=trace.client_host) if trace.group else trace.client_host
    return Event(trace.timestamp, what, "", who, _("trace"))


def _standing(facts: Facts) -> Iterator[Event]:
    """Yield the current position of the group as an event. Brokers do not record when a group passed a message."""
    place = facts.place
    if place is None or (facts.message is None and facts.retry is None) or not facts.group:
        return
    where = _("{broker} queue {queue}", broker=place.broker, queue=place.queue_id)
    if facts.is_past:
        at = _(
            "its offset is {at:,}, past {offset:,}",
            at=facts.consumed_offset,
            offset=place.offset,
        )
        yield Event(facts.now_ms, _("group is past it: {at}", at=at), where, facts.group, _("offsets, now"))
    elif acks := sum(facts.waiting_acks.values()):
        yield Event(
            facts.now_ms,
            _("{acks:,} popped messages of its queue are unacknowledged", acks=acks),
            where,
            facts.group,
            _("clients"),
        )
    else:
        ahead = max(0, place.offset - max(facts.consumed_offset or 0, place.min_offset))
        yield Event(
            facts.now_ms,
            _("group has not reached it: {ahead:,} before it", ahead=ahead),
            where,
            facts.group,
            _("offsets, now"),
        )


def place_text(message: ReceivedMessage) -> str:
    """Return the place of a stored message as text."""
    return _(
        "{broker} queue {queue} offset {offset:,}",
        broker=message.broker_name,
        queue=message.queue_id,
        offset=message.queue_offset,
    )
