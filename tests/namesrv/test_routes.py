"""The route table's transitions (behaviour.md §1.3–§1.6)."""

from __future__ import annotations

import pytest

from rmqkit.namesrv.routes import Registration, RouteTable
from rmqkit.protocol.bodies.topics import DataVersion, TopicConfig, TopicConfigTable


class Time:
    ms = 0.0

    def __call__(self):
        return self.ms


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def routes(time):
    return RouteTable(time)


def topics(*names, version=1, queues=4, perm=6):
    table = {name: TopicConfig(name, queues, queues, perm) for name in names}
    return TopicConfigTable(DataVersion(counter=version), table)


def registration(table, *, address="10.0.0.1:1", name="a", broker_id=0, cluster="C", connection="c1", timeout_ms=None):
    return Registration(
        cluster=cluster,
        address=address,
        broker_name=name,
        broker_id=broker_id,
        ha_address="10.0.0.1:2",
        timeout_ms=timeout_ms,
        enable_acting_master=False,
        topics=table,
        connection=connection,
    )


def queue_counts(routes, topic):
    route = routes.route(topic)
    return None if route is None else {q.broker_name: (q.read_queue_nums, q.perm) for q in route.queue_datas}


def test_a_topic_is_found_on_every_broker_that_registered_it(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X", queues=8), address="10.0.0.2:1", name="b"))
    assert queue_counts(routes, "T") == {"a": (4, 6), "b": (8, 6)}
    assert queue_counts(routes, "U") == {"a": (4, 6)}
    assert routes.route("nobody") is None
    assert {b.broker_name: b.broker_addrs for b in routes.route("T").broker_datas} == {
        "a": {0: "10.0.0.1:1"},
        "b": {0: "10.0.0.2:1"},
    }
    assert routes.clusters().cluster_addr_table == {"C": ["a", "b"]}


def test_topics_change_only_with_the_data_version(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "U", queues=9)))
    assert queue_counts(routes, "T") == {"a": (4, 6)}
    routes.register(registration(topics("T", "U", queues=9, version=2)))
    assert queue_counts(routes, "T") == {"a": (9, 6)}


def test_topics_missing_from_a_later_table_stay(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X", version=2)))
    assert queue_counts(routes, "U") == {"a": (4, 6)}


def test_one_topic_alone_is_refused_before_the_whole_table(routes):
    assert not routes.register(registration(topics("T")))
    assert routes.route("T") is None
    assert routes.register(registration(topics("T", "U")))
    assert routes.register(registration(topics("NEW", version=2)))
    assert queue_counts(routes, "NEW") == {"a": (4, 6)}


def test_a_slave_adds_its_address_and_no_topics(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("S", "R"), address="10.0.0.3:1", broker_id=1))
    assert routes.route("S") is None
    assert routes.route("T").broker_datas[0].broker_addrs == {0: "10.0.0.1:1", 1: "10.0.0.3:1"}
    assert routes.master_of("C", "a") == ("10.0.0.1:1", "10.0.0.1:2")


def test_an_address_has_only_one_id(routes):
    routes.register(registration(topics("T", "U"), broker_id=1))
    routes.register(registration(topics("T", "U", version=2), broker_id=0))
    assert routes.clusters().broker_addr_table["a"].broker_addrs == {0: "10.0.0.1:1"}


def test_an_older_state_does_not_take_over_a_living_id(routes):
    newer = TopicConfigTable(DataVersion(state_version=2), topics("T", "U").topic_config_table)
    routes.register(registration(newer))
    assert routes.register(registration(topics("T", "U"), address="10.0.0.9:1"))
    assert routes.clusters().broker_addr_table["a"].broker_addrs == {0: "10.0.0.1:1"}


def test_the_last_address_takes_queues_topics_and_cluster_along(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b"))
    routes.unregister([("C", "10.0.0.1:1")])
    assert queue_counts(routes, "T") == {"b": (4, 6)}
    assert routes.route("U") is None
    routes.unregister([("C", "10.0.0.2:1")])
    assert routes.topics() == []
    assert routes.clusters().cluster_addr_table == {}


def test_the_master_goes_and_its_slave_stays(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "U"), address="10.0.0.3:1", broker_id=1))
    routes.unregister([("C", "10.0.0.1:1")])
    assert routes.route("T").broker_datas[0].broker_addrs == {1: "10.0.0.3:1"}


def test_silence_beyond_the_time_out_is_noticed(routes, time):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b", timeout_ms=1000))
    time.ms = 1001
    assert [key for key, _ in routes.silent()] == [("C", "10.0.0.2:1")]
    assert routes.refresh(("C", "10.0.0.2:1")) == DataVersion(counter=1)
    assert routes.silent() == []
    time.ms = 120_001
    assert len(routes.silent()) == 2
    assert routes.refresh(("C", "nobody")) is None


def test_a_closed_connection_names_its_brokers(routes):
    routes.register(registration(topics("T", "U"), connection="c1"))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b", connection="c2"))
    assert routes.registered_over("c2") == [("C", "10.0.0.2:1")]
    assert routes.registered_over("c3") == []
