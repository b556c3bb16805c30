"""An audit as one HTML file. Each section has a finding in a sentence, plots, and tables of numbers.

The file is self-contained: it needs no scripts, fonts or network. matplotlib draws the plots as SVG (extra ``report``),
in the light or dark colours of the reader's system. Without matplotlib the page has only the tables, and a hint how to
get the plots. Times are UTC.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit import extras
from rmqkit.protocol.names import DLQ_PREFIX
from rmqkit.protocol.schemas.brokers import bytes_text
from rmqkit.spark.jobs.audit import Audit
from rmqkit.spark.jobs.audit_plots import draw, duration_text, has_plots, own_topics, period_text
from rmqkit.store.files import naming

__all__ = ["findings", "write_report"]

_ROWS_MAX = 200
_STYLE = Path(__file__).with_name("audit_report.css")


def write_report(audit: Audit, file: str | os.PathLike[str]) -> None:
    """Write the page atomically: the file is complete, or it does not exist."""
    path = Path(file)
    whole = path.with_name(path.name + ".tmp")
    with naming(path):
        whole.write_text(_page(audit), encoding="utf-8")
        whole.replace(path)


def findings(audit: Audit) -> list[tuple[str, str]]:
    """Return the title of each section of the report, together with its finding in a sentence."""
    return [(title, finding(audit)) for title, finding, _, _ in _SECTIONS]


def _page(audit: Audit) -> str:
    style = _STYLE.read_text(encoding="utf-8")
    sections = "\n".join(_section(audit, *one) for one in _SECTIONS)
    hint = "" if has_plots() else f'<p class="note">Plots are missing here: {escape(extras.install("report"))}</p>'
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in audit.notes)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Audit of {escape(audit.store)}</title>
<style>{style}</style></head>
<body><header><h1>Audit of a RocketMQ store</h1><p class="path">{escape(audit.store)}</p>
{_tiles(audit)}{hint}{notes}</header>
<main>{sections}</main>
<footer>rmqkit · audit of a store · times are UTC</footer></body></html>
"""


def _tiles(audit: Audit) -> str:
    damaged = sum(one.damaged_bytes for one in audit.segments)
    begin, end = audit.first_store_timestamp, audit.last_store_timestamp
    tiles = [
        ("messages", f"{audit.messages:,}"),
        ("on disk", bytes_text(audit.bytes)),
        ("topics of applications", f"{sum(not one.is_internal for one in audit.topics):,}"),
        ("from first to last", duration_text((end - begin) / timedelta(milliseconds=1)) if begin and end else "–"),
        ("behind", f"{sum(one.lag for one in audit.lags):,}"),
        ("dead letters", f"{sum(one.messages for one in audit.retries if one.is_dead):,}"),
        ("damage", bytes_text(damaged) if damaged else "none"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _section(audit: Audit, title: str, finding: Callable[[Audit], str], plots: Sequence[str], tables: Any) -> str:
    drawn = [(name, draw(name, audit)) for name in plots] if has_plots() else []
    figures = "".join(f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn if svg)
    figures = f'<div class="plots">{figures}</div>' if figures else ""
    shown = "".join(_table(name, rows(audit), is_open) for name, rows, is_open in tables)
    kind = "wide" if len(plots) > 1 else ""
    head = f'<h2>{title}</h2><p class="finding">{escape(finding(audit))}</p>'
    return f'<section class="{kind}">{head}{figures}{shown}</section>'


def _table(name: str, rows: Sequence[Struct], is_open: bool) -> str:
    """Return rows as a collapsible table, or an empty text if there are no rows."""
    if not rows:
        return ""
    fields = rows[0].__struct_fields__
    classes = ["n" if _is_number(getattr(rows[0], field)) else "" for field in fields]
    heads = "".join(
        f'<th class="{kind}">{escape(_heading(field))}</th>' for field, kind in zip(fields, classes, strict=True)
    )
    lines = "".join(
        "<tr>" + "".join(
            f'<td class="{kind}">{escape(_cell(field, getattr(row, field)))}</td>'
            for field, kind in zip(fields, classes, strict=True)
        ) + "</tr>"
        for row in rows[:_ROWS_MAX]
    )  # fmt: skip
    more = f"the first {_ROWS_MAX} of {len(rows):,}" if len(rows) > _ROWS_MAX else f"{len(rows):,}"
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(name)} ({more})</summary>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div></details>'
    )


def _heading(field: str) -> str:
    return field.removeprefix("is_").replace("_ms", "").replace("_", " ")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(field: str, value: Any) -> str:
    match value:
        case None:
            return "–"
        case datetime():
            return _time(value)
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1%}"
        case int() if "bytes" in field:
            return bytes_text(value)
        case int() if "_ms" in field:
            return duration_text(value)
        case int():
            return f"{value:,}"
    return str(value)


# ---------------------------------------------------------------- findings


def _traffic_finding(audit: Audit) -> str:
    topics = own_topics(audit)
    if not topics:
        return "No message of an application is in the log."
    top = topics[0]
    periods: Counter[datetime] = Counter()
    for one in audit.traffic:
        if one.topic == top.topic:
            periods[one.begin] += one.messages
    busiest, count = max(periods.items(), key=lambda item: (item[1], item[0]))
    total = sum(one.messages for one in topics)
    share = f"{top.messages / total:.0%} of all {total:,}" if len(topics) > 1 else "all there are"
    busy = (
        f"; busiest {period_text(audit.period_seconds)} from {_time(busiest)}, {count:,} messages"
        if len(periods) > 1
        else ""
    )
    uneven = [one for one in topics if one.queues > 1 and one.busiest_queue_share > 2 / one.queues]
    skew = (
        f" Uneven: one of {uneven[0].queues} queues of {uneven[0].topic} has {uneven[0].busiest_queue_share:.0%}."
        if uneven
        else ""
    )
    return f"Topic {top.topic}: {_many(top.messages, 'message')}, {share}{busy}.{skew}"


def _latency_finding(audit: Audit) -> str:
    topics = [one for one in own_topics(audit) if one.latency_ms_p99 is not None]
    if not topics:
        return "No message shows how long it took from its producer to the store."
    slowest = max(topics, key=lambda one: one.latency_ms_p99 or 0)
    skewed = sum(one.skewed for one in topics)
    clocks = f" The clocks differ: {skewed:,} messages were stored before they were born." if skewed else ""
    return (
        f"Slowest is {slowest.topic}: 1 of 100 messages took {duration_text(slowest.latency_ms_p99 or 0)} or longer,"
        f" half of them {duration_text(slowest.latency_ms_p50 or 0)} or less.{clocks}"
    )


def _size_finding(audit: Audit) -> str:
    topics = own_topics(audit)
    if not topics:
        return "There are no records."
    largest = max(topics, key=lambda one: one.bytes)
    mean = largest.bytes / largest.messages
    return (
        f"{largest.topic} takes most room: {bytes_text(largest.bytes)}, {bytes_text(round(mean))} for each message;"
        f" its largest record has {bytes_text(largest.record_bytes_max)}."
    )


def _key_finding(audit: Audit) -> str:
    if not audit.hot_keys:
        return "No key is on more than one message, as far as was counted."
    top = audit.hot_keys[0]
    bound = f" Counts may be low by up to {audit.keys_undercount_max:,}." if audit.keys_undercount_max else ""
    return f"Key {top.key} is on {top.messages:,} messages of {top.topic}, {top.share:.1%} of them.{bound}"


def _lag_finding(audit: Audit) -> str:
    behind: Counter[str] = Counter()
    for one in audit.lags:
        behind[one.group] += one.lag
    if not behind:
        return "No consumer group has left an offset here."
    group, lag = behind.most_common(1)[0]
    if not lag:
        return f"Every group is at the end of its queues ({len(behind):,} in all)."
    longest = max((one.lag_ms or 0 for one in audit.lags if one.group == group), default=0)
    others = sum(1 for one in behind.values() if one) - 1
    also = f" Behind, too: {_many(others, 'other group')}." if others else ""
    waited = f", the oldest of them there for {duration_text(longest)} when the log ends" if longest else ""
    return f"Group {group} is {_many(lag, 'message')} behind{waited}.{also}"


def _retry_finding(audit: Audit) -> str:
    dead: Counter[str] = Counter()
    back: Counter[str] = Counter()
    for one in audit.retries:
        (dead if one.is_dead else back)[one.group] += one.messages
    if not audit.retries:
        return "No group has sent a message back."
    if not dead:
        group, count = back.most_common(1)[0]
        return f"Group {group} sent most back, {_many(count, 'message')}; none was given up."
    group, count = dead.most_common(1)[0]
    oldest = min(one.oldest for one in audit.retries if one.is_dead and one.group == group)
    where = f"they wait in {DLQ_PREFIX}{group}"
    return f"Group {group} gave up {_many(count, 'message')}, the oldest at {_time(oldest)}; {where}."


def _waiting_finding(audit: Audit) -> str:
    delayed, half = (sum(one.messages for one in rows) for rows in (audit.delayed, audit.half_messages))
    if not delayed and not half:
        return "No message waits for a delay level, and every transaction is decided."
    due = min((one.first for one in audit.delayed), default=None)
    delays = f"{delayed:,} messages wait for a delay level" + (f", the first is due {_time(due)}" if due else "")
    oldest = min((one.first for one in audit.half_messages), default=None)
    halves = f"{half:,} half messages are undecided" + (f", the oldest since {_time(oldest)}" if oldest else "")
    return f"{delays}; {halves}."


def _file_finding(audit: Audit) -> str:
    damages = sum(one.damages for one in audit.segments)
    damaged = sum(one.damaged_bytes for one in audit.segments)
    records = sum(one.records for one in audit.segments)
    if not damages:
        return f"{len(audit.segments):,} files of the log with {records:,} records, no damage met."
    worst = max(audit.segments, key=lambda one: one.damaged_bytes)
    return f"Left out: {_many(damages, 'damaged place')} with {bytes_text(damaged)}, the most in {worst.segment}."


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"


# ---------------------------------------------------------------- rows of tables


class _Queue(Struct):
    topic: str
    queue_id: int
    messages: int
    bytes: int
    busiest_period: datetime
    messages_in_it: int


def _queues(audit: Audit) -> list[_Queue]:
    """Return the traffic by queue."""
    found: dict[tuple[str, int], _Queue] = {}
    for one in audit.traffic:
        queue = found.setdefault((one.topic, one.queue_id), _Queue(one.topic, one.queue_id, 0, 0, one.begin, 0))
        queue.messages += one.messages
        queue.bytes += one.bytes
        if one.messages > queue.messages_in_it:
            queue.busiest_period, queue.messages_in_it = one.begin, one.messages
    return list(found.values())


_SECTIONS: Sequence[tuple[str, Callable[[Audit], str], Sequence[str], Any]] = (
    (
        "Traffic",
        _traffic_finding,
        ("Messages stored", "Messages by topic"),
        (
            ("topics", lambda audit: [*own_topics(audit), *(one for one in audit.topics if one.is_internal)], True),
            ("queues", _queues, False),
            ("periods", lambda audit: audit.traffic, False),
        ),
    ),
    ("From producer to store", _latency_finding, ("Time taken, by topic", "Time taken, all messages"), ()),
    ("Sizes", _size_finding, ("Bytes of a record",), ()),
    ("Hot keys", _key_finding, ("Messages with the same key",), (("keys", lambda audit: audit.hot_keys, False),)),
    (
        "Consumers",
        _lag_finding,
        ("Messages behind, by group",),
        (("groups and queues", lambda audit: audit.lags, False),),
    ),
    (
        "Retries and dead letters",
        _retry_finding,
        ("Sent back and given up, by group",),
        (("groups", lambda audit: audit.retries, True),),
    ),
    (
        "Waiting",
        _waiting_finding,
        (),
        (
            ("delay levels", lambda audit: audit.delayed, True),
            ("producer groups with half messages", lambda audit: audit.half_messages, True),
        ),
    ),
    ("Files", _file_finding, (), (("files of the log", lambda audit: audit.segments, False),)),
)
