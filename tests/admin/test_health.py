"""Findings over literal snapshots: what is wrong is told, the worst first, and unknown is never zero."""

from __future__ import annotations

from typing import Any

import pytest

from rmqkit.admin.brokers import GroupProgress
from rmqkit.admin.clients import FleetRow, ProducerRow, fleet
from rmqkit.admin.clusters import BrokerRow
from rmqkit.admin.groups import GroupLag, lags
from rmqkit.admin.health import BrokerState, GroupState, Severity, Snapshot, findings, span_text, topic_kind
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.schemas.clients import ClientConnection, ConsumerConnection, SubscriptionData

NOW = 1_790_000_000_000


def broker(name: str = "broker-a", number: int = 0, **changes: Any) -> BrokerState:
    row = {"version": "V5_4_0", "disk_ratio": 0.3, "active": True} | changes.pop("row", {})
    found = BrokerRow(cluster_name="c", broker_name=name, broker_id=number, addr=f"{name}:{number}", **row)
    return BrokerState(row=found, figures={"brokerActive": "true"}, since_ms=NOW, **changes)


def group(**changes: Any) -> GroupState:
    return GroupState(name="billing", **{"lag": 0, "members": 1, "trend": 0.0, **changes})


def told(*brokers: BrokerState, groups: tuple[GroupState, ...] = (), **more: Any) -> list[tuple[str, str]]:
    snapshot = Snapshot(at_ms=NOW, brokers=list(brokers), groups={one.name: one for one in groups}, **more)
    return [(str(one.severity), one.text) for one in findings(snapshot)]


def test_a_cluster_that_is_well_has_no_findings() -> None:
    assert told(broker(), broker("broker-b"), groups=(group(), group(lag=9_999))) == []
    assert told() == []


@pytest.mark.parametrize(
    ("state", "severity", "text"),
    [
        (broker(trouble="no answer within 3 s"), "bad", "broker-a does not answer, for 0 s: no answer within 3 s"),
        (broker(row={"disk_ratio": 0.8}), "warning", "the disk of broker-a is 80% full"),
        (broker(row={"disk_ratio": 0.9}), "bad", "the disk of broker-a is 90% full"),
        (
            broker(ha=HaRuntimeInfo(master=True, ha_connection_info=[HaConnectionInfo(addr="s:1", diff=1 << 30)])),
            "warning",
            "slave s:1 of broker-a is 1,024 MiB behind",
        ),
    ],
)
def test_what_is_wrong_with_a_broker(state: BrokerState, severity: str, text: str) -> None:
    assert told(state) == [(severity, text)]


def test_a_master_whose_slaves_are_away() -> None:
    alone = broker(ha=HaRuntimeInfo(master=True))
    assert told(alone) == []  # it never had one
    assert told(alone, broker(number=1))[0][1] == "broker-a has slaves, and none is connected: messages have one copy"


def test_a_master_that_takes_nothing() -> None:
    state = broker(row={"active": False})
    state.figures["brokerActive"] = "false"
    assert told(state) == [("bad", "broker-a takes no messages")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lag": 12_000}, [("warning", "group billing is 12,000 messages behind")]),
        (
            {"lag": 500, "behind_since_ms": NOW - 720_000, "trend": 3.0},
            [("bad", "group billing is 500 messages and 12 min behind and falling back")],
        ),
        ({"lag": 20_000, "trend": -9.0}, [("warning", "group billing is 20,000 messages behind, catching up")]),
        (
            {"lag": 20_000, "members": 0},
            [("bad", "group billing is 20,000 messages behind; none of its consumers is online")],
        ),
        ({"lag": 20, "behind_since_ms": NOW - 60_000}, []),
        ({"lag": None}, []),
        ({"dead": 9, "dead_grew": 2}, [("warning", "group billing gave up 2 more messages: 9 dead letters")]),
        ({"dead": 9, "dead_grew": 0}, []),
    ],
)
def test_what_is_wrong_with_a_group(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert told(groups=(group(**changes),)) == expected


def test_mixed_versions_and_an_id_that_two_hosts_use() -> None:
    clients = [
        FleetRow(client_id="c1", language="JAVA", version=399, addresses=["10.0.0.1:5", "10.0.0.2:5"]),
        FleetRow(client_id="c2", language="JAVA", version=399, addresses=["10.0.0.1:5", "10.0.0.1:6"]),
    ]
    found = told(broker(), broker("broker-b", row={"version": "V4_9_7"}), clients=clients)
    assert found == [
        ("warning", "client id c1 is used from 10.0.0.1:5, 10.0.0.2:5"),
        ("note", "brokers of c have unlike versions: V4_9_7, V5_4_0"),
    ]


def test_the_worst_stands_first() -> None:
    found = told(broker(row={"disk_ratio": 0.8}), broker("b", trouble="gone"), broker("d", row={"version": "V4_0_0"}))
    assert [severity for severity, _ in found] == [Severity.BAD, Severity.WARNING, Severity.NOTE]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (59_999, "59 s"),
        (750_000, "12 min"),
        (11_100_000, "3 h 5 min"),
        (273_600_000, "3 d 4 h"),
        (-5, "0 s"),
    ],
)
def test_spans_have_at_most_two_units(ms: int, text: str) -> None:
    assert span_text(ms) == text


def test_kinds_of_topics() -> None:
    kinds = [topic_kind(name) for name in ("Orders", "%RETRY%g", "%DLQ%g", "TBW102", "rmq_sys_wheel_timer")]
    assert kinds == ["normal", "retry", "dlq", "system", "system"]


def row(topic: str, queue: int, end: int, at: int, last_ms: int, name: str = "g") -> GroupProgress:
    return GroupProgress(
        topic=topic,
        group=name,
        broker_name="b",
        queue_id=queue,
        broker_offset=end,
        consumer_offset=at,
        diff=end - at,
        last_timestamp=last_ms,
    )


def test_lags_are_joined_by_group_and_topic() -> None:
    found = lags(
        [
            row("Orders", 0, 100, 90, 5_000),
            row("Orders", 1, 50, 50, 1_000),  # not behind: its time does not count
            row("Orders", 2, 10, 0, 0),  # behind, and the time is unknown
            row("Orders", 3, 7, 9, 9_000),  # an offset ahead of its queue is no lag
            row("Bills", 0, 4, 4, 0),
            row("Orders", 0, 100, 100, 0, "other"),
        ]
    )
    assert found["g", "Orders"] == GroupLag(
        group="g", topic="Orders", count=20, behind_since_ms=5_000, queues=4, end=167
    )
    assert found["g", "Bills"].behind_since_ms is None
    assert found["other", "Orders"].count == 0
    assert lags([]) == {}


def test_the_fleet_has_each_client_once() -> None:
    producers = [
        ProducerRow(
            group=name,
            client_id="c1",
            client_addr="10.0.0.1:5",
            language="GO",
            version=495,
            last_update_timestamp=0,
            broker_name=at,
        )
        for name, at in (("p", "a"), ("p", "b"), ("q", "a"))
    ]
    members = [
        ClientConnection(client_id=one, client_addr="10.0.0.1:6", language="GO", version=495) for one in ("c1", "c2")
    ]
    consumers = {"g": ConsumerConnection(connection_set=members, subscription_table={"T": SubscriptionData(topic="T")})}
    first, second = fleet(producers, consumers)
    assert (first.client_id, first.produces, first.consumes, first.topics) == ("c1", ["p", "q"], ["g"], ["T"])
    assert first.addresses == ["10.0.0.1:5", "10.0.0.1:6"]
    assert not first.is_doubled
    assert (second.client_id, second.produces, second.consumes) == ("c2", [], ["g"])
