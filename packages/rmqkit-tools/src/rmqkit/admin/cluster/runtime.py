"""The runtime figures of a broker (GET_BROKER_RUNTIME_INFO) in groups, with their meaning and unit.

A broker reports about 70 keys with a text each. `grouped` puts the known keys into groups, in the order of `_GROUPS`.
Empty figures of Java's thread pools are left out. rmqkit's brokers have no thread pools, and report these figures only
because Java's tools expect them. All functions here are pure. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rmqkit.sentences import _

__all__ = ["FigureGroup", "FigureRow", "grouped", "release"]

# Key, meaning, and kind: number, "ms", "at" (ms since the epoch), "bytes", "share", "rates" per second, or text.
_GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (_("Messages"), (
        ("putTps", _("Stored, over 10 s, 1 min, 10 min"), "rates"),
        ("getTransferredTps", _("Given to consumers, over 10 s, 1 min, 10 min"), "rates"),
        ("getFoundTps", _("Pulls that found messages"), "rates"),
        ("getMissTps", _("Pulls that found none"), "rates"),
        ("msgPutTotalTodayNow", _("Stored since the start"), "number"),
        ("msgGetTotalTodayNow", _("Given since the start"), "number"),
        ("putMessageAverageSize", _("Mean size"), "bytes"),
        ("putMessageFailedTimes", _("Stores that failed"), "number"),
    )),
    (_("Times"), (
        ("putLatency99", _("99 % of stores took at most"), "ms"),
        ("putLatency999", _("99.9 % of stores took at most"), "ms"),
        ("putMessageEntireTimeMax", _("Longest store"), "ms"),
        ("getMessageEntireTimeMax", _("Longest read"), "ms"),
        ("pageCacheLockTimeMills", _("The store under way has locked the log for"), "ms"),
        ("sendThreadPoolQueueHeadWaitTimeMills", _("Longest waiting send"), "ms"),
        ("pullThreadPoolQueueHeadWaitTimeMills", _("Longest waiting pull"), "ms"),
    )),
    (_("Store"), (
        ("commitLogMinOffset", _("Log begins at"), "number"),
        ("commitLogMaxOffset", _("Log ends at"), "number"),
        ("earliestMessageTimeStamp", _("Oldest message"), "at"),
        ("dispatchBehindBytes", _("Not in queues and index yet"), "bytes"),
        ("remainHowManyDataToFlush", _("Not on the disk yet"), "text"),
        ("commitLogDiskRatio", _("Disk of the log, used"), "share"),
        ("consumeQueueDiskRatio", _("Disk of the queues, used"), "share"),
        ("commitLogDirCapacity", _("Disk, with the part for root"), "text"),
    )),
    (_("Timer"), (
        ("timerCongestNum", _("Timed messages that wait"), "number"),
        ("timerReadBehind", _("Late by, seconds"), "number"),
        ("timerOffsetBehind", _("Not on the wheel yet"), "number"),
        ("timerEnqueueTps", _("In"), "rates"),
        ("timerDequeueTps", _("Delivered"), "rates"),
    )),
    (_("Process"), (
        ("bootTimestamp", _("Started"), "at"),
        ("brokerActive", _("Accepts messages"), "text"),
        ("brokerVersionDesc", _("Protocol of RocketMQ"), "release"),
    )),
)  # fmt: skip
_POOL = "ThreadPoolQueue"
_KNOWN = {key for __, rows in _GROUPS for key, __, __ in rows}
_EMPTY = frozenset(("", "0", "0.0", "-1"))


class FigureRow(Struct, rename="camel"):
    """One figure: its key, its meaning, its kind, and the value that the broker reports."""

    key: str
    label: str
    kind: str
    value: str


class FigureGroup(Struct, rename="camel"):
    """Figures of one subject."""

    title: str
    rows: list[FigureRow]


def grouped(figures: Mapping[str, str]) -> tuple[list[FigureGroup], dict[str, str]]:
    """Return the known figures in groups, and the other figures without the empty ones of thread pools."""
    groups = [
        FigureGroup(title, [FigureRow(key, label, kind, figures[key]) for key, label, kind in rows if key in figures])
        for title, rows in _GROUPS
    ]
    rest = {key: text for key, text in figures.items() if key not in _KNOWN and not _is_of_a_pool(key, text)}
    return [one for one in groups if one.rows], rest


def _is_of_a_pool(key: str, text: str) -> bool:
    is_capacity = key.endswith("Capacity")
    return (_POOL in key or key == "EndTransactionQueueSize") and (is_capacity or text in _EMPTY)


def release(name: str) -> str:
    """Return the usual form of a version name: 5.4.0 for ``V5_4_0``."""
    parts = name.removeprefix("V").split("_")
    return ".".join(parts) if name.startswith("V") and len(parts) > 1 else name
