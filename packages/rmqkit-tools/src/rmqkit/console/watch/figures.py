"""The figures for history and alert rules: their names and units, and the calculation of each from a `Snapshot`.

===========  =======================  =====================================================================
figure       of                       value
===========  =======================  =====================================================================
``lag``      a group                  its lag in messages, the sum of ``rmq group progress``
``age``      a group                  seconds since its oldest unread message was stored
``dead``     a group                  dead letters that are stored
``growth``   a group                  dead letters that were added within an hour; only for rules
``members``  a group                  clients online
``offline``  a group                  1 while no client of the group is online, else 0; only for rules
``put``      a topic                  messages stored per second
``in``       a broker                 messages stored per second
``out``      a broker                 messages delivered to consumers per second
``disk``     a broker                 share of the log's disk that is used, 0 to 1
``slave``    a broker ``@`` a host    bytes of the master's log that the slave on the host has not acknowledged
``unsynced`` a broker                 slaves that are registered or connected, and not in sync
``timer``    a broker                 seconds by which timed messages are late
``half``     a broker                 age in seconds of the oldest half message that its check-back has not passed
``gone``     a broker                 seconds since its last answer; only for rules
``boot``     a broker                 the time of its start in ms; a changed time shows a restart
===========  =======================  =====================================================================

None means that no broker has reported the figure. It is stored as unknown. A figure over several brokers is unknown
while a broker does not answer, because the last figure of this broker is old. A slave is named by its host, because its
port changes with each connection. If a host has several slaves, the slave with the most missing bytes is used. All
functions here are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from rmqkit.admin.diagnosis.health import Snapshot, span_text
from rmqkit.console.html import render
from rmqkit.sentences import _

__all__ = ["FIGURES", "Figure", "Value", "values_of"]

DAY_S = 86_400
_VALUE_MAX = 1 << 61
_SPANS_S = (10, 20, 30, 60, 120, 240, 600, 1200, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, DAY_S)

Value = tuple[str, str, float | None]
"""The name of a figure, the name of its object, and its value."""


class Figure(Struct, frozen=True, kw_only=True):
    """The definition of a figure.

    Attributes:
        of: the kind of object: ``group``, ``topic`` or ``broker``.
        unit: the unit of its axis.
        show: a function that returns a value with its unit as text.
        top: a function that returns the end of an axis for the highest value.
        scale: the factor by which a value is multiplied before it is rounded and stored.
        is_kept: True if it has a history; figures without a history are only for rules.
        hint: the format of the value in a rule.
    """

    title: str
    of: str
    unit: str
    show: Callable[[float], str]
    top: Callable[[float], float]
    scale: int = 1
    is_kept: bool = True
    hint: str = ""


def nice(highest: float) -> float:
    """Return the next higher number that is 1, 2 or 4 times a power of ten. Half of such a number has few digits."""
    if highest <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(highest))
    return next(size * factor for factor in (1, 2, 4, 10) if size * factor >= highest)


def _count_top(highest: float) -> float:
    return max(2.0, nice(highest))


def _bytes_top(highest: float) -> float:
    return float(1 << max(10, math.ceil(math.log2(max(1.0, highest)))))


def _seconds_top(highest: float) -> float:
    return next((float(one) for one in _SPANS_S if one >= highest), DAY_S * _count_top(highest / DAY_S))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _span(value: float) -> str:
    return span_text(value * 1000)


_COUNT: dict[str, Any] = {"show": _count, "top": _count_top}
_RATE: dict[str, Any] = {
    "show": lambda value: str(render.rate(value)),
    "top": nice,
    "scale": 100,
    "unit": _("messages per second"),
}
_SECONDS: dict[str, Any] = {"show": _span, "top": _seconds_top, "unit": _("time"), "hint": _("seconds")}

FIGURES: dict[str, Figure] = {
    "lag": Figure(of="group", title=_("Lag"), unit=_("messages"), **_COUNT),
    "age": Figure(of="group", title=_("Age of the oldest unread"), **_SECONDS),
    "dead": Figure(of="group", title=_("Dead letters stored"), unit=_("messages"), **_COUNT),
    "growth": Figure(of="group", title=_("Dead letters within an hour"), unit=_("messages"), is_kept=False, **_COUNT),
    "members": Figure(of="group", title=_("Members online"), unit=_("clients"), **_COUNT),
    "offline": Figure(of="group", title=_("Offline"), unit=_("1 or 0"), is_kept=False,
        hint=_("1: no consumer is online"), **_COUNT),
    "put": Figure(of="topic", title=_("Messages in"), **_RATE),
    "in": Figure(of="broker", title=_("Messages in"), **_RATE),
    "out": Figure(of="broker", title=_("Messages out"), **_RATE),
    "disk": Figure(
        of="broker", title=_("Disk used"), unit=_("share of the log's disk"), scale=10_000, hint=_("0.8 is 80 %"),
        show=lambda value: f"{value:.1%}", top=lambda _: 1.0,
    ),
    "slave": Figure(
        of="broker", title=_("Slaves behind"), unit=_("bytes"), hint=_("bytes; the name is BROKER@HOST"),
        show=lambda value: str(render.size(value)), top=_bytes_top,
    ),
    "unsynced": Figure(of="broker", title=_("Slaves not in sync"), unit=_("slaves"), **_COUNT),
    "timer": Figure(of="broker", title=_("Timed messages late"), **_SECONDS),
    "half": Figure(of="broker", title=_("Oldest half message"), **_SECONDS),
    "gone": Figure(of="broker", title=_("Broker does not answer"), is_kept=False, **_SECONDS),
}  # fmt: skip
"""All figures, by the name that addresses and rules use."""
BOOT = "boot"


def values_of(snapshot: Snapshot) -> Iterator[Value]:
    """Yield all figures of a snapshot: first brokers, then groups (the largest lag first), then topics."""
    for figure, name, value in _values_of(snapshot):
        # A broker may report a value that is not a number, or is too large.
        yield figure, name, value if value is not None and -_VALUE_MAX < value < _VALUE_MAX else None


def _values_of(snapshot: Snapshot) -> Iterator[Value]:
    silent = {one.row.broker_name for one in snapshot.brokers if one.is_master and one.trouble}
    silent |= {what.rpartition(" ")[2] for what in snapshot.troubles if what.startswith("lags of ")}
    yield from _brokers(snapshot, snapshot.at_ms)
    for group in sorted(snapshot.groups.values(), key=lambda one: -(one.lag or 0)):
        is_known = not silent & set(group.configs)
        lag = group.lag if is_known else None
        since_ms = group.behind_since_ms
        age_s = None if lag is None else 0.0 if lag == 0 else (snapshot.at_ms - since_ms) / 1000 if since_ms else None
        yield "lag", group.name, lag
        yield "age", group.name, age_s
        yield "dead", group.name, group.dead if is_known else None
        yield "members", group.name, group.members
        yield "offline", group.name, None if group.members is None else float(not group.members)
    for topic in snapshot.topics.values():
        if topic.kind == "normal":
            yield "put", topic.name, None if silent & set(topic.brokers) else topic.in_tps


def _brokers(snapshot: Snapshot, now_ms: int) -> Iterator[Value]:
    registered: dict[str, int] = {}
    for state in snapshot.brokers:
        if not state.is_master:
            registered[state.row.broker_name] = registered.get(state.row.broker_name, 0) + 1
    for state in snapshot.brokers:
        name = state.row.broker_name if state.is_master else f"{state.row.broker_name}:{state.row.broker_id}"
        is_known = not state.trouble and bool(state.figures)
        yield "disk", name, state.row.disk_ratio if is_known else None
        boot = state.figures.get("bootTimestamp", "") if is_known else ""
        yield BOOT, name, int(boot) if boot.isdecimal() else None
        if not state.is_master:
            continue
        yield "in", name, state.row.in_tps if is_known else None
        yield "out", name, state.row.out_tps if is_known else None
        late = state.figures.get("timerReadBehind", "") if is_known else ""
        if late or not is_known:
            yield "timer", name, float(late) if late.lstrip("-").isdecimal() else None
        since_ms = state.half_since_ms if is_known else None
        yield "half", name, None if since_ms is None else max(0, now_ms - since_ms) / 1000 if since_ms else 0.0
        if not is_known or state.ha is None:
            continue
        slaves = state.ha.ha_connection_info
        in_sync = sum(one.in_sync for one in slaves)
        yield "unsynced", name, max(len(slaves), registered.get(name, 0)) - in_sync
        behind: dict[str, int] = {}
        for one in slaves:
            host = f"{name}@{one.addr.rpartition(':')[0].lstrip('/')}"
            behind[host] = max(behind.get(host, 0), one.diff)
        yield from (("slave", host, diff) for host, diff in behind.items())
