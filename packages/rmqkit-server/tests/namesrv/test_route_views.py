"""Acting masters and zones (behaviour.md §1.6)."""

from __future__ import annotations

import copy

import msgspec
import pytest

from rmqkit.namesrv.routes import in_zone, with_acting_masters
from rmqkit.protocol.schemas.topics import BrokerData, QueueData, TopicRoute


def group(name, addresses, *, acting=True, zone=msgspec.UNSET):
    return BrokerData("C", name, addresses, zone, acting)


def route_over(*groups, perm=4, filter_servers=None):
    queues = [QueueData(broker.broker_name, 4, 4, perm) for broker in groups]
    return TopicRoute(queues, list(groups), filter_servers or {})


@pytest.mark.parametrize(
    ("broker", "perm", "shown"),
    [
        (group("a", {1: "a:1", 2: "a:2"}), 4, {0: "a:1", 2: "a:2"}),
        (group("a", {3: "a:3", 2: "a:2"}), 4, {0: "a:2", 3: "a:3"}),
        (group("a", {1: "a:1"}), 6, {1: "a:1"}),
        (group("a", {0: "a:0", 1: "a:1"}), 4, {0: "a:0", 1: "a:1"}),
        (group("a", {1: "a:1"}, acting=False), 4, {1: "a:1"}),
        (group("a", {}), 4, {}),
    ],
)
def test_the_lowest_id_of_an_unwritable_masterless_group_is_shown_as_master(broker, perm, shown):
    route = route_over(broker, perm=perm)
    before = copy.deepcopy(route)
    assert with_acting_masters("T", route).broker_datas[0].broker_addrs == shown
    assert route == before, "the table stays as it is"


def test_brokers_that_look_up_their_own_group_see_true_ids():
    route = route_over(group("a", {1: "a:1"}))
    assert with_acting_masters("rmq_sys_SYNC_BROKER_MEMBER_a", route) == route


def test_a_zone_hides_the_groups_with_a_master_elsewhere():
    east, west, nowhere = (
        group("e", {0: "e:0"}, zone="east"),
        group("w", {0: "w:0"}, zone="west"),
        group("n", {0: "n:0"}),
    )
    slaves = group("s", {1: "s:1"}, zone="west")
    route = route_over(east, west, nowhere, slaves, filter_servers={"e:0": ["f:1"], "w:0": ["f:2"]})
    before = copy.deepcopy(route)
    near = in_zone(route, "East")
    assert [broker.broker_name for broker in near.broker_datas] == ["e", "s"]
    assert [queue.broker_name for queue in near.queue_datas] == ["e", "s"]
    assert near.filter_server_table == {"e:0": ["f:1"]}
    assert route == before
