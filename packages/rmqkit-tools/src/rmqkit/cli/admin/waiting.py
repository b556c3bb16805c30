"""``rmq waiting``: delayed and timed messages, half messages of transactions, popped messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmqkit.cli.frame.nouns import Broker, Noun, Topic, View
from rmqkit.cli.frame.printing import time_text

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.admin.messages.waiting import Delays


WAITING = Noun("waiting", "Messages that wait in brokers: delayed, half and popped ones.")


@WAITING.verb("delays", watch=True)
async def delays(admin: Admin, broker: Broker = None) -> View:
    """Count the messages that wait: in each delay level, and timed messages by topic and by due time.

    Apache's brokers do not report due times."""
    from rmqkit.admin.diagnosis.health import span_text

    found: list[Delays] = await admin.waiting.delays(broker)
    parts: list[object] = []
    for one in found:
        parts.append(f"{one.broker}: {one.trouble or 'delay levels'}")
        parts.append(
            [
                {
                    "level": level.level,
                    "delay": "" if level.delay_ms is None else span_text(level.delay_ms),
                    "waiting": level.waiting,
                    "next due": time_text(level.next_due_ms) if level.next_due_ms else "",
                }
                for level in one.levels
                if level.waiting
            ]
            or "no message with a delay level waits"
        )
        if one.timed is None:
            parts.append("timed messages: unknown, this broker has no timer or does not report them")
            continue
        parts.append(f"timed messages: {one.timed:,}, the timer is {span_text(one.behind_ms or 0)} late")
        if one.due_within_s is None:
            parts.append("due times: unknown, this broker does not report them")
        elif one.timed:
            due = [
                {"due within": span_text(bound * 1000), "messages": count} for bound, count in one.due_within_s.items()
            ]
            later = f"more than {span_text(max(one.due_within_s) * 1000)}" + (", or late" if one.behind_ms else "")
            parts.append([*due, {"due within": later, "messages": one.due_later}])
        parts.append([{"topic": topic, "messages": count} for topic, count in one.timed_by_topic.items()] or [])
    return View(found, [part for part in parts if part])


@WAITING.verb("timed")
async def timed(admin: Admin, broker: Broker = None, topic: Topic = "") -> View:
    """List the timed messages that wait, in the order in which they are due.

    The command reads the newest records of each broker's timer topic: at most 20,000, for at most 3 seconds."""
    found = await admin.waiting.timed(broker, topic)
    rows = [
        {
            "due": time_text(one.due_ms),
            "topic": one.topic,
            "keys": " ".join(one.keys),
            "id": one.msg_id,
            "place": f"{one.broker}@{one.offset}",
        }
        for one in found.rows
    ]
    counts = f"{found.matched:,} timed messages wait"
    return View(
        found, [rows or "no timed message waits", counts, *_rest(found.examined, found.is_whole, found.troubles)]
    )


@WAITING.verb("transactions", watch=True)
async def transactions(admin: Admin, broker: Broker = None) -> View:
    """Show the half messages of transactions: how many are in each state, and which are undecided.

    The command reads at most 20,000 messages, for at most 3 seconds."""
    found = await admin.waiting.transactions(broker)
    rows = [
        {
            "state": one.state,
            "topic": one.topic,
            "group": one.group,
            "asked": one.asked,
            "stored": time_text(one.stored_ms),
            "id": one.msg_id,
        }
        for one in found.rows
    ]
    counts = ", ".join(f"{count:,} {state}" for state, count in found.counts.items())
    return View(
        found, [rows or "no transaction is open", counts, *_rest(found.examined, found.is_whole, found.troubles)]
    )


@WAITING.verb("pop", watch=True)
async def pop(admin: Admin, broker: Broker = None) -> View:
    """Show the popped messages that are not acknowledged: for which group each is invisible, and until when.

    Messages popped in order are not included. The command reads at most 20,000 records, for at most 3 seconds."""
    found = await admin.waiting.pops(broker)
    rows = [
        {
            "topic": one.topic,
            "group": one.group,
            "queue": f"{one.broker}:{one.queue_id}",
            "offsets": ", ".join(map(str, one.offsets[:8])) + (" …" if len(one.offsets) > 8 else ""),
            "until": time_text(one.due_ms),
            "tries": one.tries,
        }
        for one in found.rows
    ]
    counts = f"{found.messages:,} messages of {found.check_points:,} pops are invisible, {found.overdue:,} overdue"
    return View(found, [rows or "nothing is popped", counts, *_rest(found.examined, found.is_whole, found.troubles)])


def _rest(examined: int, is_whole: bool, troubles: dict[str, str]) -> list[str]:
    said = [] if is_whole else [f"examined {examined:,} records, but not all"]
    return said + [f"{name}: {text}" for name, text in troubles.items()]
