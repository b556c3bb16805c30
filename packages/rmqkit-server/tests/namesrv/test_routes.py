"""The route table's transitions (behaviour.md §1.3–§1.6)."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.namesrv.routes import BrokerRegistration, Departure, MemberChange, Registered, RouteTable
from rmqkit.protocol.schemas.topics import DataVersion, QueueData, TopicConfig, TopicConfigTable, TopicQueueMappingInfo


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


def topics(*names, version=1, queues=4, perm=6, state=0, flags=0):
    table = {name: TopicConfig(name, queues, queues, perm, topic_sys_flag=flags) for name in names}
    return TopicConfigTable(DataVersion(counter=version, state_version=state), table)


def registration(table, **changes):
    fields = {
        "cluster": "C",
        "address": "10.0.0.1:1",
        "broker_name": changes.pop("name", "a"),
        "broker_id": 0,
        "ha_address": "10.0.0.1:2",
        "timeout_ms": None,
        "enable_acting_master": False,
        "connection": "c1",
    }
    return BrokerRegistration(**{**fields, "topics": table, **changes})


def leave(routes, address, name="a", connection=None):
    return routes.unregister([Departure("C", address, name, connection)])


def addresses(routes, name="a"):
    return dict(routes.members(name))


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
    assert not routes.register(registration(topics("T"))).is_accepted
    assert routes.route("T") is None
    assert routes.clusters().cluster_addr_table == {}
    assert routes.register(registration(topics("T", "U"))).is_accepted
    assert routes.register(registration(topics("NEW", version=2))).is_accepted
    assert queue_counts(routes, "NEW") == {"a": (4, 6)}


def test_a_slave_adds_its_address_and_no_topics_and_learns_its_master(routes):
    assert routes.register(registration(topics("T", "U"))).master is None
    slave = routes.register(registration(topics("S", "R"), address="10.0.0.3:1", broker_id=1))
    assert slave == Registered(master=("10.0.0.1:1", "10.0.0.1:2"))
    assert routes.route("S") is None
    assert routes.route("T").broker_datas[0].broker_addrs == {0: "10.0.0.1:1", 1: "10.0.0.3:1"}


def test_a_slave_learns_no_master_that_is_not_there(routes):
    assert routes.register(registration(topics("T", "U"), broker_id=1)) == Registered()


def test_an_address_has_only_one_id(routes):
    routes.register(registration(topics("T", "U"), broker_id=1))
    routes.register(registration(topics("T", "U", version=2), broker_id=0))
    assert addresses(routes) == {0: "10.0.0.1:1"}


def test_an_address_has_only_one_broker_name(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "U"), name="renamed"))
    assert queue_counts(routes, "T") == {"renamed": (4, 6)}
    assert routes.clusters().cluster_addr_table == {"C": ["renamed"]}


def test_another_address_takes_over_an_id(routes):
    routes.register(registration(topics("T", "U", state=1)))
    routes.register(registration(topics("T", "U", state=1, version=2, queues=9), address="10.0.0.9:1"))
    assert addresses(routes) == {0: "10.0.0.9:1"}
    leave(routes, "10.0.0.1:1")
    assert addresses(routes) == {0: "10.0.0.9:1"}, "the former broker removes nothing with it"
    assert queue_counts(routes, "T") == {"a": (9, 6)}


def test_an_older_state_does_not_take_over_a_living_id(routes):
    routes.register(registration(topics("T", "U", state=2)))
    routes.register(registration(topics("T", "U"), address="10.0.0.9:1", broker_id=1))
    refused = registration(topics("T", "U", state=1, queues=9, version=2), address="10.0.0.9:1")
    assert routes.register(refused) == Registered()
    assert addresses(routes) == {0: "10.0.0.1:1"}
    assert queue_counts(routes, "T") == {"a": (4, 6)}
    assert routes.refresh(refused.key) is None, "a refused broker is not alive"


def test_an_older_state_takes_over_the_id_of_a_dead_one(routes):
    routes.register(registration(topics("T", "U", state=2)))
    routes.register(registration(topics("T", "U", state=2), address="10.0.0.3:1", broker_id=1))
    leave(routes, "10.0.0.1:1")
    routes.register(registration(topics("T", "U"), address="10.0.0.9:1"))
    assert addresses(routes) == {0: "10.0.0.9:1", 1: "10.0.0.3:1"}


# -- the prime slave


def test_the_lowest_slave_writes_read_only_queues_while_there_is_no_master(routes):
    routes.register(registration(topics("T", "U"), broker_id=2, address="10.0.0.3:1", enable_acting_master=True))
    assert queue_counts(routes, "T") == {"a": (4, 4)}
    later = topics("T", "U", queues=9)
    routes.register(registration(later, broker_id=3, address="10.0.0.4:1", enable_acting_master=True))
    assert queue_counts(routes, "T") == {"a": (4, 4)}, "only the lowest slave writes"


def test_a_prime_slave_without_acting_master_keeps_the_write_bit(routes):
    routes.register(registration(topics("T", "U"), broker_id=2, enable_acting_master=False))
    assert queue_counts(routes, "T") == {"a": (4, 6)}


def test_a_slave_too_old_to_know_of_acting_masters_writes_nothing(routes):
    routes.register(registration(topics("T", "U"), broker_id=1, enable_acting_master=None))
    assert routes.route("T") is None
    assert addresses(routes) == {1: "10.0.0.1:1"}


def test_a_master_that_comes_back_makes_its_queues_writable(routes):
    routes.register(registration(topics("T", "U"), broker_id=1, address="10.0.0.3:1", enable_acting_master=True))
    routes.register(registration(topics("T", "U"), enable_acting_master=True))
    assert queue_counts(routes, "T") == {"a": (4, 6)}


@pytest.mark.parametrize(("acting", "perm"), [(True, 4), (False, 6), (None, 6)])
def test_a_leaving_master_leaves_queues_that_are_readable(routes, acting, perm):
    routes.register(registration(topics("T", "U"), enable_acting_master=acting))
    routes.register(registration(topics("T", "U"), address="10.0.0.3:1", broker_id=1, enable_acting_master=acting))
    leave(routes, "10.0.0.1:1")
    assert addresses(routes) == {1: "10.0.0.3:1"}
    assert queue_counts(routes, "T") == {"a": (4, perm)}


def test_a_leaving_slave_leaves_the_queues_alone(routes):
    routes.register(registration(topics("T", "U"), enable_acting_master=True))
    routes.register(registration(topics("T", "U"), address="10.0.0.3:1", broker_id=1, enable_acting_master=True))
    assert leave(routes, "10.0.0.3:1") == []
    assert queue_counts(routes, "T") == {"a": (4, 6)}


# -- the lowest id


def test_a_new_lowest_id_is_a_change(routes):
    first = registration(topics("T", "U"), broker_id=2, address="10.0.0.3:1")
    assert routes.register(first).change is None, "there was no broker to notify"
    assert routes.register(registration(topics("T", "U"), broker_id=3, address="10.0.0.4:1")).change is None
    joined = routes.register(registration(topics("T", "U"), broker_id=1))
    members = {1: "10.0.0.1:1", 2: "10.0.0.3:1", 3: "10.0.0.4:1"}
    assert joined.change == MemberChange("a", members, None, "10.0.0.1:2")


@pytest.mark.parametrize("acting", [True, False])
def test_a_lowest_id_that_goes_away_is_a_change_with_acting_master(routes, acting):
    routes.register(registration(topics("T", "U"), enable_acting_master=acting))
    routes.register(registration(topics("T", "U"), address="10.0.0.3:1", broker_id=1, enable_acting_master=acting))
    change = MemberChange("a", {1: "10.0.0.3:1"}, "10.0.0.1:1", None)
    assert leave(routes, "10.0.0.1:1") == ([change] if acting else [])
    assert leave(routes, "10.0.0.3:1") == [], "there is no broker left to notify"


# -- leaving


def test_the_last_address_takes_queues_topics_and_cluster_along(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b"))
    leave(routes, "10.0.0.1:1")
    assert queue_counts(routes, "T") == {"b": (4, 6)}
    assert routes.route("U") is None
    leave(routes, "10.0.0.2:1", "b")
    assert routes.topics() == []
    assert routes.clusters().cluster_addr_table == {}


def test_both_of_a_group_leave_in_one_batch(routes):
    routes.register(registration(topics("T", "U"), enable_acting_master=True))
    routes.register(registration(topics("T", "U"), address="10.0.0.3:1", broker_id=1, enable_acting_master=True))
    both = [Departure("C", address, "a") for address in ("10.0.0.1:1", "10.0.0.3:1")]
    assert routes.unregister(both) == []
    assert routes.topics() == []


def test_a_good_bye_under_another_name_removes_who_said_it(routes):
    routes.register(registration(topics("T", "U")))
    leave(routes, "10.0.0.1:1", "typo")
    assert routes.topics() == []


def test_a_stranger_s_good_bye_changes_nothing(routes):
    routes.register(registration(topics("T", "U")))
    before = routes.clusters()
    assert leave(routes, "10.0.0.7:1") == leave(routes, "10.0.0.7:1", "nobody") == []
    assert routes.clusters() == before


def test_a_stranger_s_good_bye_leaves_a_masterless_group_alone(routes):
    routes.register(registration(topics("T", "U"), enable_acting_master=True))
    routes.register(registration(topics(), broker_id=1, enable_acting_master=True))
    assert leave(routes, "10.0.0.7:1") == []
    assert queue_counts(routes, "T") == {"a": (4, 6)}


def test_a_broker_that_came_back_over_another_connection_stays(routes):
    routes.register(registration(topics("T", "U"), connection="old"))
    (departure,) = routes.registered_over("old")
    routes.register(registration(topics("T", "U"), connection="new"))
    routes.unregister([departure])
    assert queue_counts(routes, "T") == {"a": (4, 6)}


def test_silence_beyond_the_time_out_is_noticed(routes, time):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b", timeout_ms=1000))
    time.ms = 1001
    assert routes.silent() == [Departure("C", "10.0.0.2:1", "b", "c1")]
    assert routes.refresh(("C", "10.0.0.2:1")) == DataVersion(counter=1)
    assert routes.silent() == []
    time.ms = 120_000
    assert [departure.broker_name for departure in routes.silent()] == ["b"]
    time.ms = 120_001
    assert len(routes.silent()) == 2
    assert routes.refresh(("C", "nobody")) is None


def test_a_closed_connection_names_its_brokers(routes):
    routes.register(registration(topics("T", "U"), connection="c1"))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b", connection="c2"))
    assert routes.registered_over("c2") == [Departure("C", "10.0.0.2:1", "b", "c2")]
    assert routes.registered_over("c3") == []


# -- topics


def test_topics_a_broker_no_longer_sends_are_forgotten_when_requested(routes):
    all_have = "SELF_TEST_TOPIC"
    routes.register(registration(topics(all_have, "T", "U")))
    routes.register(registration(topics(all_have, "U", "V"), address="10.0.0.2:1", name="b"))
    routes.register(registration(topics(all_have, "T", "X", version=2)), forget_missing=True)
    assert routes.topics() == [all_have, "T", "U", "V", "X"]
    assert queue_counts(routes, "U") == {"b": (4, 6)}
    routes.register(registration(topics("Y", version=3)), forget_missing=True)  # only what changed
    assert routes.topics() == [all_have, "T", "U", "V", "X", "Y"]
    routes.register(registration(topics(all_have, "X", "Y", version=4)), forget_missing=True)
    assert routes.topics() == [all_have, "U", "V", "X", "Y"]


def test_a_broker_with_static_topics_forgets_nothing(routes):
    routes.register(registration(topics("T", "U")))
    table = topics("SELF_TEST_TOPIC", "T", "X", version=2)
    table.topic_queue_mapping_info_map = {"T": TopicQueueMappingInfo(topic="T", bname="a")}
    routes.register(registration(table), forget_missing=True)
    assert routes.topics() == ["SELF_TEST_TOPIC", "T", "U", "X"]


def test_static_topics_are_carried_with_a_changed_version_and_go_with_the_queues(routes):
    table = topics("T", "U")
    first = TopicQueueMappingInfo(topic="T", bname="a", total_queues=2, curr_id_map={0: 0, 1: 1})
    table.topic_queue_mapping_info_map = {"T": first}
    routes.register(registration(table))
    assert routes.route("T").topic_queue_mapping_by_broker == {"a": first}
    same = topics("T", "U")
    same.topic_queue_mapping_info_map = {"T": TopicQueueMappingInfo(topic="T", bname="a", total_queues=3)}
    routes.register(registration(same))
    assert routes.route("T").topic_queue_mapping_by_broker == {"a": first}
    same.data_version = DataVersion(counter=2)
    routes.register(registration(same))
    assert routes.route("T").topic_queue_mapping_by_broker["a"].total_queues == 3
    leave(routes, "10.0.0.1:1")
    routes.register(registration(topics("T", "U")))
    assert routes.route("T").topic_queue_mapping_by_broker is msgspec.UNSET


def test_filter_servers_are_kept_replaced_and_removed(routes):
    for servers, expected in ((["10.0.0.8:1"], {"10.0.0.1:1": ["10.0.0.8:1"]}), (None, None), ([], {})):
        before = routes.route("T").filter_server_table if routes.route("T") else {}
        routes.register(registration(topics("T", "U"), filter_servers=servers))
        assert routes.route("T").filter_server_table == (before if expected is None else expected)


def test_one_topic_is_registered_by_its_queues(routes):
    routes.register(registration(topics("T", "U")))
    routes.register_topic("NEW", [QueueData("a", 2, 2, 6), QueueData("nobody", 2, 2, 6)])
    assert routes.route("NEW") is None, "a new topic needs brokers that are known"
    routes.register_topic("NEW", [QueueData("a", 2, 2, 6)])
    routes.register_topic("T", [QueueData("a", 3, 3, 6), QueueData("nobody", 2, 2, 6), QueueData("a", 5, 5, 6)])
    assert (queue_counts(routes, "NEW"), queue_counts(routes, "T")) == ({"a": (2, 6)}, {"a": (3, 6)})
    routes.register_topic("EMPTY", [])
    assert "EMPTY" not in routes.topics()


def test_write_permission_is_wiped_and_added_until_a_changed_registration(routes):
    routes.register(registration(topics("T", "U", perm=7)))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b"))
    assert routes.wipe_write_perm("a") == 2
    assert queue_counts(routes, "T") == {"a": (4, 5), "b": (4, 6)}
    routes.register(registration(topics("T", "U", perm=7)))
    assert queue_counts(routes, "U") == {"a": (4, 5)}
    assert routes.add_write_perm("a") == 2
    assert queue_counts(routes, "U") == {"a": (4, 6)}, "exactly read and write"
    routes.register(registration(topics("T", "U", perm=7, version=2)))
    assert queue_counts(routes, "U") == {"a": (4, 7)}
    assert routes.wipe_write_perm("nobody") == routes.add_write_perm("nobody") == 0


def test_a_topic_is_deleted_everywhere_or_in_a_cluster(routes):
    routes.register(registration(topics("T", "U")))
    routes.register(registration(topics("T", "X"), address="10.0.0.2:1", name="b", cluster="D"))
    routes.delete_topic("T", "nobody")
    routes.delete_topic("unknown")
    assert queue_counts(routes, "T") == {"a": (4, 6), "b": (4, 6)}
    routes.delete_topic("T", "C")
    assert queue_counts(routes, "T") == {"b": (4, 6)}
    routes.delete_topic("T", "D")
    routes.delete_topic("U")
    assert routes.topics() == ["X"]


def test_topics_are_listed_by_cluster_and_by_flags(routes):
    routes.register(registration(topics("T", "U", flags=1)))
    routes.register(registration(topics("T", "X", flags=2), address="10.0.0.2:1", name="b", cluster="D"))
    assert routes.topics_of_cluster("D") == ["T", "X"]
    assert routes.topics_of_cluster("nobody") == []
    assert routes.topics_with_flags(lambda flags: flags == 1) == ["T", "U"]
