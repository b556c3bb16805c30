"""Findings of literal snapshots: the worst comes first, and an unknown figure is never zero."""

from __future__ import annotations

from typing import Any

import pytest

from rmqkit.admin.cluster.brokers import GroupProgress
from rmqkit.admin.cluster.clients import FleetRow, ProducerRow, fleet
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.cluster.groups import GroupLag, lags, movements
from rmqkit.admin.diagnosis.health import (
    BrokerState,
    GroupState,
    Severity,
    Snapshot,
    clock_skew_ms,
    findings,
    span_text,
    topic_kind,
)
from rmqkit.admin.diagnosis.survey import well_text
from rmqkit.protocol.schemas.brokers import HaConnectionInfo, HaRuntimeInfo
from rmqkit.protocol.schemas.clients import ClientConnection, ConsumerConnection, SubscriptionData

POPPED, MORE = "group billing has popped", "1 more than at the first look"
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
    assert told(state) == [("bad", "broker-a accepts no messages")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # All messages of the first look are consumed: the group keeps up.
        ({"lag": 120_000, "late": 0, "trend": 50.0, "behind_since_ms": NOW - 720_000}, []),
        # There was only one look.
        ({"lag": 120_000, "late": None, "behind_since_ms": NOW - 720_000}, []),
        ({"lag": 12_000, "late": 9}, [("warning", "group billing is 12,000 messages behind")]),
        ({"lag": 9_999, "late": 9}, []),
        (
            {"lag": 500, "late": 480, "behind_since_ms": NOW - 20_000, "trend": 3.0},
            [("bad", "group billing is 500 messages and 20 s behind, falling back by 3.0/s")],
        ),
        ({"lag": 500, "late": 480, "behind_since_ms": NOW - 20_000, "trend": 0.5}, []),
        (
            {"lag": 20_000, "late": 9, "trend": -9.0},
            [("warning", "group billing is 20,000 messages behind, catching up")],
        ),
        (
            {"lag": 20_000, "late": 9, "members": 0},
            [("bad", "group billing is 20,000 messages behind; none of its consumers is online")],
        ),
        ({"lag": 20, "late": 20, "behind_since_ms": NOW - 299_999}, []),
        (
            {"lag": 20, "late": 20, "behind_since_ms": NOW - 300_000},
            [("warning", "group billing is 20 messages and 5 min behind")],
        ),
        ({"lag": None}, []),
        (
            {"dead": 9, "dead_grew": 2, "dead_last_ms": NOW - 2_000},
            [("warning", "group billing has 9 dead letters, the last one 2 s ago, 2 more than at the first look")],
        ),
        (
            {"dead": 9, "dead_grew": 0, "dead_last_ms": NOW - 24 * 3_600_000 + 1},
            [("warning", "group billing has 9 dead letters, the last one 23 h 59 min ago")],
        ),
        (
            {"dead": 9, "dead_grew": 0, "dead_last_ms": NOW - 24 * 3_600_000},
            [("note", "group billing has 9 dead letters, the last one 1 d ago")],
        ),
        ({"dead": 9}, [("note", "group billing has 9 dead letters")]),
        (
            {"popped": 9, "popped_grew": 1, "popped_since_ms": NOW - 30_000},
            [
                ("warning", f"{POPPED} 9 messages and not acknowledged them, the oldest for 30 s; {MORE}"),
            ],
        ),
        ({"popped": 9, "popped_grew": 0, "popped_since_ms": NOW - 30_000}, []),
        ({"popped": 9, "popped_grew": 1, "popped_since_ms": NOW - 29_999}, []),
    ],
)
def test_what_is_wrong_with_a_group(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert told(groups=(group(**changes),)) == expected


@pytest.mark.parametrize(
    ("ms", "severity"), [(0, ""), (4_999, ""), (-5_000, "warning"), (59_999, "warning"), (60_000, "bad"), (None, "")]
)
def test_clocks(ms: int | None, severity: str) -> None:
    found = told(broker(skew_ms=ms))
    assert [one for one, _ in found] == ([severity] if severity else [])
    assert all("clock of broker-a is" in text for _, text in found)


@pytest.mark.parametrize(("age_ms", "count"), [(119_999, 0), (120_000, 1)])
def test_half_messages_that_wait(age_ms: int, count: int) -> None:
    assert len(told(broker(half_since_ms=NOW - age_ms))) == count
    assert told(broker(half_since_ms=0)) == []


def test_name_servers_and_brokers_that_are_gone() -> None:
    gone = broker("broker-b", 1).row
    found = told(broker(), name_servers={"h:9876": "refused", "i:9876": ""}, gone=[gone])
    assert found == [
        ("bad", "name server h:9876 does not answer: refused"),
        ("bad", "broker-b (slave 1) at broker-b:1 is gone: the name servers do not list it any more"),
    ]


def test_a_brokers_clock_is_known_from_when_it_started_and_how_long_it_runs() -> None:
    figures = {"bootTimestamp": str(NOW - 90_061_000), "runtime": "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"}
    assert clock_skew_ms(figures, NOW) == 500
    assert clock_skew_ms(figures, NOW + 20_000) == -19_500
    assert clock_skew_ms({}, NOW) is None
    assert clock_skew_ms({"bootTimestamp": "1", "runtime": "?"}, NOW) is None


def test_nothing_is_claimed_that_two_looks_did_not_show() -> None:
    assert "needs a second one" in well_text(Snapshot(at_ms=NOW, brokers=[broker()]))
    group_known, group_new = group(late=0), GroupState(name="new")
    snapshot = Snapshot(
        at_ms=NOW, compared_ms=10_000, brokers=[broker()], groups={"billing": group_known, "new": group_new}
    )
    text = "nothing is wrong with 1 broker and their clocks, disks and slaves and the lag of 1 group, by two looks 10 s"
    assert well_text(snapshot) == f"{text} apart"
    snapshot.troubles["lags of broker-a"] = "no answer"
    assert well_text(snapshot).endswith("; some requests failed")


@pytest.mark.parametrize(
    ("before", "now", "late", "consumed", "grew"),
    [
        ((100, 90), (200, 100), 0, 10, 90),  # the 10 that the first look saw are consumed; 100 new ones came
        ((100, 90), (200, 99), 1, 9, 91),
        ((100, 90), (100, 90), 10, 0, 0),
        ((100, 90), (100, 80), 20, 0, 10),  # moved back
        ((100, 110), (105, 110), 0, 0, 0),  # an offset ahead of its queue
    ],
)
def test_movement_between_two_looks(
    before: tuple[int, int], now: tuple[int, int], late: int, consumed: int, grew: int
) -> None:
    rows = [[row("Orders", 0, end, at, 0), row("Orders", 1, 7, 7, 0)] for end, at in (before, now)]
    found = movements(rows[0], [*rows[1], row("New", 0, 50, 1, 0)])["g"]
    assert (found.late, found.consumed, found.grew) == (late, consumed, grew)
    assert movements([], rows[1])["g"].late == 0


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
