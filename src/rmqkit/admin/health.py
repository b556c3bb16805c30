"""What is wrong with a cluster: `findings` reads a `Snapshot`, which holds what brokers told, and asks nobody.

==============================  ===================================================================================
finding                         when
==============================  ===================================================================================
broker does not answer          it is in the name servers' list, and gave no figures
disk nearly full                `DISK_WARN` of the disk is used; from `DISK_BAD` on brokers delete early or refuse sends
group is behind                 its oldest unread message is older than `LAG_AGE_MS`, or it is more than `LAG_COUNT`
                                behind; worse where it falls back further
broker takes no messages        a master says that it is not active
master without a slave          slaves of its name are registered, and none is connected to it
slave is behind                 by more than `SLAVE_BYTES`
dead letters grow               since the oldest figure that is known
versions mixed                  brokers of one cluster run unlike versions
client id twice                 two hosts use one client id
==============================  ===================================================================================

Unknown is not zero: a figure that nobody told is None, and no finding rests on it. Everything here is pure.
Source: behaviour.md §1.5, §5, §9.10.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from rmqkit.admin.clients import FleetRow
from rmqkit.admin.clusters import BrokerRow
from rmqkit.admin.groups import GroupLag
from rmqkit.protocol import names
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig

__all__ = ["BrokerState", "Finding", "GroupState", "Severity", "Snapshot", "TopicState", "findings", "span_text"]

DISK_WARN, DISK_BAD = 0.75, 0.85
LAG_AGE_MS = 5 * 60_000
LAG_COUNT = 10_000
SLAVE_BYTES = 64 << 20


class Severity(enum.StrEnum):
    """How bad a finding is."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, rename="camel", kw_only=True):
    """One thing that is wrong.

    Attributes:
        text: a sentence for people.
        kind: ``broker``, ``group``, ``topic`` or ``client``.
        name: which one.
        remedy: what to do, or empty.
    """

    severity: Severity
    text: str
    kind: str
    name: str
    remedy: str = ""


class BrokerState(Struct, rename="camel", kw_only=True):
    """A broker as it was told last.

    Attributes:
        row: its figures, as ``rmq admin cluster list`` has them.
        figures: all of its runtime information; empty when it never answered.
        ha: how replication is, None when it does not tell.
        trouble: why there are no fresh figures, or empty.
        since_ms: when it answered last.
        half_since_ms: when the oldest half message was born that its check-back is not past; 0 when there is none, None
            when it was not told.
    """

    row: BrokerRow
    figures: dict[str, str] = field(default_factory=dict)
    ha: HaRuntimeInfo | None = None
    trouble: str = ""
    since_ms: int | None = None
    half_since_ms: int | None = None

    @property
    def is_master(self) -> bool:
        return self.row.broker_id == 0


class TopicState(Struct, rename="camel", kw_only=True):
    """A topic over all brokers; figures that nobody told are None.

    Attributes:
        kind: ``normal``, ``retry``, ``dlq``, ``system``.
        message_type: what it says of its messages, such as ``FIFO``.
        stored: messages that are in its queues.
        end: the sum of the offsets at which its queues end.
        in_tps: messages per second put to it, between the last two looks.
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
    groups: list[str] = field(default_factory=list)
    lag: int | None = None
    behind_since_ms: int | None = None
    differs: bool = False


class GroupState(Struct, rename="camel", kw_only=True):
    """A consumer group over all brokers; figures that nobody told are None.

    Attributes:
        trend: messages per second by which its lag grows; negative while it catches up.
        members: clients online.
        dead: dead letters that are stored.
        dead_grew: by how many that is more than when this was first known.
    """

    name: str
    topics: list[str] = field(default_factory=list)
    lag: int | None = None
    behind_since_ms: int | None = None
    trend: float | None = None
    members: int | None = None
    consume_type: str = ""
    message_model: str = ""
    orderly: bool = False
    enabled: bool = True
    retry_max: int | None = None
    dead: int | None = None
    dead_grew: int | None = None
    configs: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)


class Snapshot(Struct, rename="camel", kw_only=True):
    """A cluster as it was known at one moment.

    Attributes:
        at_ms: when the last round of questions ended.
        lags: how far each group is behind on each topic.
        troubles: what could not be asked, by what it is.
    """

    at_ms: int = 0
    brokers: list[BrokerState] = field(default_factory=list)
    topics: dict[str, TopicState] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    lags: list[GroupLag] = field(default_factory=list)
    clients: list[FleetRow] = field(default_factory=list)
    troubles: dict[str, str] = field(default_factory=dict)


def findings(snapshot: Snapshot) -> list[Finding]:
    """What is wrong, the worst first."""
    found = [
        *_brokers(snapshot),
        *_replication(snapshot),
        *_groups(snapshot),
        *_versions(snapshot),
        *_clients(snapshot),
    ]
    order = list(Severity)
    return sorted(found, key=lambda one: order.index(one.severity))


def _brokers(snapshot: Snapshot) -> Iterator[Finding]:
    for broker in snapshot.brokers:
        name, row = broker_label(broker.row), broker.row
        about: dict[str, Any] = {"kind": "broker", "name": row.broker_name}
        if broker.trouble:
            since = f", for {span_text(snapshot.at_ms - broker.since_ms)}" if broker.since_ms else ""
            remedy = "look whether it runs and can be reached; its figures here are unknown"
            yield Finding(
                severity=Severity.BAD, text=f"{name} does not answer{since}: {broker.trouble}", remedy=remedy, **about
            )
            continue
        if row.disk_ratio >= DISK_WARN:
            text = f"the disk of {name} is {row.disk_ratio:.0%} full"
            severity = Severity.BAD if row.disk_ratio >= DISK_BAD else Severity.WARNING
            yield Finding(
                severity=severity, text=text, remedy="free space, or lower fileReservedTime (hours kept)", **about
            )
        if broker.is_master and not row.active and broker.figures.get("brokerActive") == "false":
            yield Finding(
                severity=Severity.BAD,
                text=f"{name} takes no messages",
                remedy="look in its log why it does not write",
                **about,
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
                text=f"{name} has slaves, and none is connected: messages have one copy",
                remedy="look in the slave's log why it does not connect",
                **about,
            )
        for slave in broker.ha.ha_connection_info:
            if slave.diff > SLAVE_BYTES:
                text = f"slave {slave.addr} of {name} is {slave.diff / (1 << 20):,.0f} MiB behind"
                yield Finding(
                    severity=Severity.WARNING, text=text, remedy="look at its disk and at the link to it", **about
                )


def _groups(snapshot: Snapshot) -> Iterator[Finding]:
    for group in snapshot.groups.values():
        about: dict[str, Any] = {"kind": "group", "name": group.name}
        age_ms = snapshot.at_ms - group.behind_since_ms if group.behind_since_ms else 0
        lag = group.lag or 0
        if lag and (age_ms >= LAG_AGE_MS or lag >= LAG_COUNT):
            age = f" and {span_text(age_ms)}" if age_ms >= 1000 else ""
            trend = group.trend or 0.0
            how = " and falling back" if trend > 0.5 else ", catching up" if trend < -0.5 else ""
            nobody = "; none of its consumers is online" if group.members == 0 else ""
            severity = Severity.BAD if trend > 0.5 or group.members == 0 else Severity.WARNING
            remedy = "start its consumers" if group.members == 0 else "add consumers, or see what its handlers wait for"
            yield Finding(
                severity=severity,
                text=f"group {group.name} is {lag:,} messages{age} behind{how}{nobody}",
                remedy=remedy,
                **about,
            )
        if group.dead_grew:
            text = f"group {group.name} gave up {group.dead_grew:,} more messages: {group.dead or 0:,} dead letters"
            yield Finding(severity=Severity.WARNING, text=text, remedy="mend its handler, then: rmq replay", **about)


def _versions(snapshot: Snapshot) -> Iterator[Finding]:
    by_cluster: dict[str, set[str]] = {}
    for broker in snapshot.brokers:
        if broker.row.version:
            by_cluster.setdefault(broker.row.cluster_name, set()).add(broker.row.version)
    for cluster, versions in by_cluster.items():
        if len(versions) > 1:
            text = f"brokers of {cluster} have unlike versions: {', '.join(sorted(versions))}"
            yield Finding(severity=Severity.NOTE, text=text, kind="broker", name="")


def _clients(snapshot: Snapshot) -> Iterator[Finding]:
    for client in snapshot.clients:
        if client.is_doubled:
            text = f"client id {client.client_id} is used from {', '.join(sorted(client.addresses))}"
            remedy = "give each process an instance name of its own: they take each other's queues"
            yield Finding(severity=Severity.WARNING, text=text, kind="client", name=client.client_id, remedy=remedy)


def broker_label(row: BrokerRow) -> str:
    """A broker as people name it."""
    return row.broker_name if row.broker_id == 0 else f"{row.broker_name} (slave {row.broker_id})"


def span_text(ms: float) -> str:
    """A span of time in at most two units: ``12 min``, ``3 d 4 h``."""
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
    """Whether a topic is an application's, or what it is for."""
    if name.startswith(names.RETRY_PREFIX):
        return "retry"
    if name.startswith(names.DLQ_PREFIX):
        return "dlq"
    return "system" if names.is_system_topic(name) else "normal"
