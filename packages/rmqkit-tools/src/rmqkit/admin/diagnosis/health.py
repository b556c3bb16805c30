"""The faults of a cluster. `findings` returns the faults in a `Snapshot` of reported figures, and sends no request.

===========================  =======================================================================================
finding                      when
===========================  =======================================================================================
name server does not answer  a configured name server did not respond
broker does not answer       a broker that the name servers list did not respond
broker is gone               the name servers no longer list a broker of the first sample
disk nearly full             `DISK_WARN` of the disk is used; from `DISK_BAD` on brokers delete early or refuse sends
clock is wrong               it differs from this machine's clock by `CLOCK_WARN_MS`; bad from `CLOCK_BAD_MS` on
broker takes no messages     a master reports that it is not active
master without a slave       slaves with the master's name are registered, but no slave is connected
slave is behind              the slave must copy more than `SLAVE_BYTES`
half messages wait           the oldest half message has waited for a decision longer than `HALF_AGE_MS`
group falls back             messages of the first sample are not consumed at the second sample, and the lag grew
group is behind              messages of the first sample are not consumed at the second sample, and the lag is
                             `LAG_COUNT`, or its oldest message is `LAG_AGE_MS` old
popped messages pile up      more messages wait for an ack than in the first sample, the oldest for `POP_AGE_MS`
dead letters                 their number grew since the first sample, or the last one is younger than
                             `DEAD_AGE_MS`; older dead letters are a note
versions mixed               brokers of one cluster run different versions
client id twice              two hosts use one client id
===========================  =======================================================================================

A finding about a lag needs two samples (``compared_ms``). One sample shows neither growth nor progress: even a group
that keeps up always has a lag, because consumers commit their offsets every 5 s. If more than 5 s are between the
samples, a group that keeps up has consumed all messages of the first sample at the second sample.

A figure that no broker reported is None instead of 0, and causes no finding. ``rmq cluster findings`` and the pages of
the console use the same rules. All functions here are pure. Source: behaviour.md §1.5, §5, §9.10.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from rmqkit.admin.cluster.clients import FleetRow
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.cluster.groups import GroupLag, Movement
from rmqkit.protocol import names
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.sentences import _

__all__ = [
    "BrokerState",
    "Finding",
    "GroupState",
    "Severity",
    "Snapshot",
    "TopicState",
    "clock_skew_ms",
    "findings",
    "group_findings",
    "span_text",
]

DISK_WARN, DISK_BAD = 0.75, 0.85
LAG_AGE_MS = 5 * 60_000
LAG_COUNT = 10_000
SLAVE_BYTES = 64 << 20
CLOCK_WARN_MS, CLOCK_BAD_MS = 5_000, 60_000
HALF_AGE_MS = 120_000
"""The maximum age of a half message. Brokers send a check-back every 30 or 60 s, so at least two had no answer then."""
POP_AGE_MS = 30_000
DEAD_AGE_MS = 24 * 3_600_000
_GROWTH = 0.5
"""The minimum change of a lag in messages per second. A lag that changes more slowly counts as steady."""


class Severity(enum.StrEnum):
    """The severity of a finding."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, rename="camel", kw_only=True):
    """A fault of a cluster.

    Attributes:
        text: a sentence for the user.
        kind: ``name server``, ``broker``, ``group`` or ``client``.
        name: the name of the broker, group or client, or the address of the name server.
        remedy: the recommended action, or empty.
    """

    severity: Severity
    text: str
    kind: str
    name: str
    remedy: str = ""


class BrokerState(Struct, rename="camel", kw_only=True):
    """The last known state of a broker.

    Attributes:
        row: the figures that ``rmq cluster list`` shows.
        figures: all runtime information of the broker, empty if the broker never answered.
        ha: the state of replication, or None if the broker does not report it.
        trouble: the reason why there are no fresh figures, or empty.
        since_ms: the time of the last answer.
        half_since_ms: the born time of the oldest half message that the check-back of the broker has not passed; 0 if
            there is no such message, None if the broker has not reported it.
        skew_ms: the time by which the broker's clock is ahead of this machine's clock; None if unknown.
    """

    row: BrokerRow
    figures: dict[str, str] = field(default_factory=dict)
    ha: HaRuntimeInfo | None = None
    trouble: str = ""
    since_ms: int | None = None
    half_since_ms: int | None = None
    skew_ms: int | None = None

    @property
    def is_master(self) -> bool:
        return self.row.broker_id == 0


class TopicState(Struct, rename="camel", kw_only=True):
    """A topic on all brokers. None means that no broker has reported the figure.

    Attributes:
        kind: ``normal``, ``retry``, ``dlq``, ``system``.
        message_type: the type of messages in the topic, such as ``FIFO``.
        stored: the number of messages in its queues.
        end: the sum of the end offsets of its queues.
        in_tps: messages per second that were stored in the topic between the last two samples.
        out_tps: messages per second that all groups together consume, according to their committed offsets.
    """

    name: str
    kind: str = "normal"
    message_type: str = ""
    read_queues: int = 0
    write_queues: int = 0
    perm: int = 6
    order: bool = False
    brokers: list[str] = field(default_factory=list)
    stored: int | None = None
    end: int | None = None
    in_tps: float | None = None
    out_tps: float | None = None
    groups: list[str] = field(default_factory=list)
    lag: int | None = None
    behind_since_ms: int | None = None
    differs: bool = False


class GroupState(Struct, rename="camel", kw_only=True):
    """A consumer group on all brokers. None means that no broker has reported the figure.

    Attributes:
        late: the number of messages that were stored at the first sample and are not consumed at the second sample.
        trend: the growth of the lag in messages per second, negative while the group catches up.
        consumed: the growth of the committed offsets in messages per second.
        members: the number of online clients.
        popped: the number of messages that clients have popped and not acknowledged.
        popped_since_ms: the time at which the oldest of these messages was popped.
        popped_grew: the growth of ``popped`` since the first sample.
        dead: the number of stored dead letters.
        dead_last_ms: the store time of the last dead letter.
        dead_grew: the growth of ``dead`` since the first sample.
    """

    name: str
    topics: list[str] = field(default_factory=list)
    lag: int | None = None
    behind_since_ms: int | None = None
    late: int | None = None
    trend: float | None = None
    consumed: float | None = None
    members: int | None = None
    popped: int | None = None
    popped_since_ms: int | None = None
    popped_grew: int | None = None
    consume_type: str = ""
    message_model: str = ""
    orderly: bool = False
    enabled: bool = True
    retry_max: int | None = None
    dead: int | None = None
    dead_last_ms: int | None = None
    dead_grew: int | None = None
    configs: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)


class Snapshot(Struct, rename="camel", kw_only=True):
    """The known state of a cluster at one moment.

    Attributes:
        at_ms: the time at which the last answers were complete.
        compared_ms: the time between the first sample and ``at_ms``; None if there is only one sample.
        name_servers: for each configured name server, the reason why it does not answer, or an empty text.
        gone: brokers that the name servers no longer list.
        lags: the lag of each group on each topic.
        troubles: the errors of failed requests, by the subject of the request.
    """

    at_ms: int = 0
    compared_ms: float | None = None
    name_servers: dict[str, str] = field(default_factory=dict)
    gone: list[BrokerRow] = field(default_factory=list)
    brokers: list[BrokerState] = field(default_factory=list)
    topics: dict[str, TopicState] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    lags: list[GroupLag] = field(default_factory=list)
    clients: list[FleetRow] = field(default_factory=list)
    troubles: dict[str, str] = field(default_factory=dict)


def findings(snapshot: Snapshot) -> list[Finding]:
    """Return the faults of a cluster, the most severe first."""
    found = [
        *_name_servers(snapshot),
        *_brokers(snapshot),
        *_replication(snapshot),
        *(one for name in snapshot.groups for one in group_findings(snapshot, name)),
        *_versions(snapshot),
        *_clients(snapshot),
    ]
    order = list(Severity)
    return sorted(found, key=lambda one: order.index(one.severity))


def clock_skew_ms(figures: dict[str, str], here_ms: float) -> int | None:
    """Return the milliseconds by which a broker's clock is ahead of this machine's clock. The result is calculated from
    the broker's start time and its run time in seconds. Return None if the broker does not report these times."""
    parts = re.findall(r"(\d+) [dhms]", figures.get("runtime", ""))
    boot = figures.get("bootTimestamp", "")
    if len(parts) != 4 or not boot.isdecimal():
        return None
    days, hours, minutes, seconds = map(int, parts)
    there_ms = int(boot) + (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + 500
    return round(there_ms - here_ms)


def _name_servers(snapshot: Snapshot) -> Iterator[Finding]:
    for address, trouble in snapshot.name_servers.items():
        if trouble:
            yield Finding(
                severity=Severity.BAD,
                text=_("name server {address} does not answer: {trouble}", address=address, trouble=trouble),
                kind="name server",
                name=address,
                remedy=_("start it: rmq namesrv --port {port}", port=address.rpartition(":")[2]),
            )


def _brokers(snapshot: Snapshot) -> Iterator[Finding]:
    for broker in snapshot.brokers:
        name, row = broker_label(broker.row), broker.row
        about: dict[str, Any] = {"kind": "broker", "name": row.broker_name}
        if broker.trouble:
            remedy = _("check whether it runs and can be reached; its figures here are unknown")
            text = _("{name} does not answer: {trouble}", name=name, trouble=broker.trouble)
            if broker.since_ms:
                age = span_text(snapshot.at_ms - broker.since_ms)
                text = _("{name} does not answer, for {age}: {trouble}", name=name, age=age, trouble=broker.trouble)
            yield Finding(severity=Severity.BAD, text=text, remedy=remedy, **about)
            continue
        if broker.skew_ms is not None and abs(broker.skew_ms) >= CLOCK_WARN_MS:
            skew = span_text(abs(broker.skew_ms))
            yield Finding(
                severity=Severity.BAD if abs(broker.skew_ms) >= CLOCK_BAD_MS else Severity.WARNING,
                text=_("the clock of {name} is {skew} ahead of this machine's", name=name, skew=skew)
                if broker.skew_ms > 0
                else _("the clock of {name} is {skew} behind this machine's", name=name, skew=skew),
                remedy=_("delays and look-ups by time go wrong: run chrony on both machines"),
                **about,
            )
        if row.disk_ratio >= DISK_WARN:
            text = _("the disk of {name} is {ratio:.0%} full", name=name, ratio=row.disk_ratio)
            severity = Severity.BAD if row.disk_ratio >= DISK_BAD else Severity.WARNING
            yield Finding(
                severity=severity, text=text, remedy=_("free space, or lower fileReservedTime (hours kept)"), **about
            )
        if broker.is_master and not row.active and broker.figures.get("brokerActive") == "false":
            yield Finding(
                severity=Severity.BAD,
                text=_("{name} accepts no messages", name=name),
                remedy=_("check its log for why it does not write"),
                **about,
            )
        if broker.half_since_ms and snapshot.at_ms - broker.half_since_ms >= HALF_AGE_MS:
            age = span_text(snapshot.at_ms - broker.half_since_ms)
            yield Finding(
                severity=Severity.WARNING,
                text=_("a half message on {name} has waited {age} for a decision", name=name, age=age),
                remedy=_(
                    "see its group: rmq waiting transactions -b {broker}; start its producers",
                    broker=shlex.quote(row.broker_name),
                ),
                **about,
            )
    for row in snapshot.gone:
        yield Finding(
            severity=Severity.BAD,
            text=_(
                "{broker} at {addr} is gone: the name servers do not list it any more",
                broker=broker_label(row),
                addr=row.addr,
            ),
            kind="broker",
            name=row.broker_name,
            remedy=_("check whether it runs and reaches the name servers"),
        )


def _replication(snapshot: Snapshot) -> Iterator[Finding]:
    slaves = {one.row.broker_name for one in snapshot.brokers if not one.is_master}
    for broker in snapshot.brokers:
        name = broker.row.broker_name
        about: dict[str, Any] = {"kind": "broker", "name": name}
        if not broker.is_master or broker.ha is None or broker.trouble:
            continue
        if name in slaves and not broker.ha.ha_connection_info:
            yield Finding(
                severity=Severity.BAD,
                text=_("{name} has slaves, and none is connected: messages have one copy", name=name),
                remedy=_("check the slave's log for why it does not connect"),
                **about,
            )
        for slave in broker.ha.ha_connection_info:
            if slave.diff > SLAVE_BYTES:
                text = _(
                    "slave {addr} of {name} is {diff:,.0f} MiB behind",
                    addr=slave.addr,
                    name=name,
                    diff=slave.diff / (1 << 20),
                )
                yield Finding(
                    severity=Severity.WARNING, text=text, remedy=_("look at its disk and at the link to it"), **about
                )


def group_findings(snapshot: Snapshot, name: str) -> list[Finding]:
    """Return the faults of one group, the most severe first."""
    group = snapshot.groups.get(name)
    if group is None:
        return []
    found = [*_lag(snapshot, group), *_popped(snapshot, group), *_dead(snapshot, group)]
    return sorted(found, key=lambda one: list(Severity).index(one.severity))


def _lag(snapshot: Snapshot, group: GroupState) -> Iterator[Finding]:
    lag, trend = group.lag or 0, group.trend or 0.0
    # If every message of the first sample is consumed, the group keeps up, even if its current lag is large.
    if not group.late or not lag:
        return
    age_ms = snapshot.at_ms - group.behind_since_ms if group.behind_since_ms else 0
    is_falling = trend > _GROWTH
    if not is_falling and lag < LAG_COUNT and age_ms < LAG_AGE_MS:
        return
    age = _(" and {age}", age=span_text(age_ms)) if age_ms >= 1000 else ""
    how = (
        _(", falling back by {trend:,.1f}/s", trend=trend)
        if is_falling
        else _(", catching up")
        if trend < -_GROWTH
        else ""
    )
    nobody = _("; none of its consumers is online") if group.members == 0 else ""
    yield Finding(
        severity=Severity.BAD if is_falling or group.members == 0 else Severity.WARNING,
        text=_(
            "group {name} is {lag:,} messages{age} behind{how}{nobody}",
            name=group.name,
            lag=lag,
            age=age,
            how=how,
            nobody=nobody,
        ),
        kind="group",
        name=group.name,
        remedy=_("start its consumers")
        if group.members == 0
        else _(
            "add consumers, or see what its handlers wait for: rmq consumer status {name}", name=shlex.quote(group.name)
        ),
    )


def _popped(snapshot: Snapshot, group: GroupState) -> Iterator[Finding]:
    if not group.popped or not group.popped_grew or group.popped_grew < 0 or group.popped_since_ms is None:
        return
    age_ms = snapshot.at_ms - group.popped_since_ms
    if age_ms >= POP_AGE_MS:
        yield Finding(
            severity=Severity.WARNING,
            text=_(
                "group {name} has popped {popped:,} messages and not acknowledged them, the oldest for {age}; "
                "{more:,} more than at the first look",
                name=group.name,
                popped=group.popped,
                age=span_text(age_ms),
                more=group.popped_grew,
            ),
            kind="group",
            name=group.name,
            remedy=_("see which ones: rmq waiting pop; their handlers are stuck, or do not acknowledge"),
        )


def _dead(snapshot: Snapshot, group: GroupState) -> Iterator[Finding]:
    if not group.dead:
        return
    age_ms = snapshot.at_ms - group.dead_last_ms if group.dead_last_ms else None
    last = _(", the last one {age} ago", age=span_text(age_ms)) if age_ms is not None else ""
    grew = _(", {more:,} more than at the first look", more=group.dead_grew) if group.dead_grew else ""
    is_recent = bool(group.dead_grew) or (age_ms is not None and age_ms < DEAD_AGE_MS)
    yield Finding(
        severity=Severity.WARNING if is_recent else Severity.NOTE,
        text=_(
            "group {name} has {dead:,} dead letters{last}{grew}", name=group.name, dead=group.dead, last=last, grew=grew
        ),
        kind="group",
        name=group.name,
        remedy=_(
            "see why: rmq dead kinds {name}; fix its handler, then: rmq replay --dlq {name}",
            name=shlex.quote(group.name),
        ),
    )


def add_movement(group: GroupState, moved: Movement, span_ms: float) -> None:
    """Add the movement between two samples to the state of a group."""
    group.late = moved.late
    if span_ms > 0:
        group.trend, group.consumed = moved.grew * 1000 / span_ms, moved.consumed * 1000 / span_ms


def _versions(snapshot: Snapshot) -> Iterator[Finding]:
    by_cluster: dict[str, set[str]] = {}
    for broker in snapshot.brokers:
        if broker.row.version:
            by_cluster.setdefault(broker.row.cluster_name, set()).add(broker.row.version)
    for cluster, versions in by_cluster.items():
        if len(versions) > 1:
            text = _(
                "brokers of {cluster} have unlike versions: {versions}",
                cluster=cluster,
                versions=", ".join(sorted(versions)),
            )
            yield Finding(severity=Severity.NOTE, text=text, kind="broker", name="")


def _clients(snapshot: Snapshot) -> Iterator[Finding]:
    for client in snapshot.clients:
        if client.is_doubled:
            text = _(
                "client id {client} is used from {addresses}",
                client=client.client_id,
                addresses=", ".join(sorted(client.addresses)),
            )
            remedy = _("give each process an instance name of its own: they take each other's queues")
            yield Finding(severity=Severity.WARNING, text=text, kind="client", name=client.client_id, remedy=remedy)


def broker_label(row: BrokerRow) -> str:
    """Return the name of a broker for users. The name of a slave includes its id."""
    return (
        row.broker_name if row.broker_id == 0 else _("{broker} (slave {id})", broker=row.broker_name, id=row.broker_id)
    )


def span_text(ms: float) -> str:
    """Return a span of time as a text with at most two units: ``12 min``, ``3 d 4 h``."""
    seconds = max(0, int(ms / 1000))
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    parts = []
    for name, size in units:
        if seconds >= size:
            parts.append(f"{seconds // size} {name}")
            seconds %= size
        elif parts:
            break
        if len(parts) == 2 or (parts and name == "min"):
            break
    return " ".join(parts) or "0 s"


def topic_kind(name: str) -> str:
    """Return the kind of a topic: ``normal`` for an application's topic, ``retry``, ``dlq`` or ``system``."""
    if name.startswith(names.RETRY_PREFIX):
        return "retry"
    if name.startswith(names.DLQ_PREFIX):
        return "dlq"
    return "system" if names.is_system_topic(name) else "normal"
