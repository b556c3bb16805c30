"""Allocation strategies. Source: behaviour.md §8.5."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.consumer.allocate import (
    averagely,
    averagely_by_circle,
    configured,
    consistent_hash,
    machine_room,
    machine_room_nearby,
)
from rmqkit.protocol.schemas.clients import MessageQueue


def shares(strategy, queues: int, clients: int) -> str:
    all_queues = [MessageQueue("T", "b", i) for i in range(queues)]
    ids = [f"C{i:03}" for i in range(clients)]
    return " / ".join(
        "".join(str(queue.queue_id) for queue in strategy(all_queues, ids, own_id)) or "–" for own_id in ids
    )


@pytest.mark.parametrize(
    ("queues", "clients", "block", "circle"),
    [
        (8, 3, "012 / 345 / 67", "036 / 147 / 25"),
        (7, 2, "0123 / 456", "0246 / 135"),
        (5, 4, "01 / 2 / 3 / 4", "04 / 1 / 2 / 3"),
        (4, 4, "0 / 1 / 2 / 3", "0 / 1 / 2 / 3"),
        (2, 3, "0 / 1 / –", "0 / 1 / –"),
    ],
)
def test_the_examples_of_the_reference(queues, clients, block, circle):
    assert shares(averagely, queues, clients) == block
    assert shares(averagely_by_circle, queues, clients) == circle


@pytest.mark.parametrize("strategy", [averagely, averagely_by_circle])
def test_a_client_that_is_not_listed_gets_nothing(strategy):
    assert strategy([MessageQueue("T", "b", 0)], ["C1"], "C2") == []


@pytest.mark.parametrize("strategy", [averagely, averagely_by_circle])
@given(queues=st.integers(0, 70), clients=st.integers(1, 40))
def test_every_queue_goes_to_one_client_and_shares_differ_by_one_at_most(strategy, queues, clients):
    all_queues = [MessageQueue("T", "b", i) for i in range(queues)]
    ids = [f"C{i}" for i in range(clients)]
    given_out = [strategy(all_queues, ids, own_id) for own_id in ids]
    assert sorted(queue for share in given_out for queue in share) == all_queues
    sizes = [len(share) for share in given_out]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def blocks(strategy, queues, ids):
    return ["".join(str(queue.queue_id) for queue in strategy(queues, ids, one)) for one in ids]


IDS = ["C1", "C2", "C3"]


def test_a_configured_client_has_its_queues_whoever_else_is_there():
    queues = [MessageQueue("T", "b", i) for i in range(4)]
    strategy = configured({queues[1], queues[3], MessageQueue("T", "gone", 0)})
    assert blocks(strategy, queues, IDS) == ["13", "13", "13"]


def test_machine_rooms_take_only_queues_of_their_brokers():
    queues = [MessageQueue("T", "east@b", i) for i in range(8)] + [MessageQueue("T", "west@b", 8)]
    assert blocks(machine_room({"east"}), queues, IDS) == ["016", "237", "45"]
    assert machine_room({"east"})(queues, IDS, "stranger") == []


def test_queues_stay_near_and_those_of_empty_rooms_are_shared_by_all():
    queues = [
        MessageQueue("T", "A", 0),
        MessageQueue("T", "A", 1),
        MessageQueue("T", "B", 2),
        MessageQueue("T", "B", 3),
    ]
    rooms = {"c1": "A", "c2": "C"}
    strategy = machine_room_nearby(averagely, room_of_broker=lambda name: name, room_of_client=rooms.__getitem__)
    assert blocks(strategy, queues, ["c1", "c2"]) == ["012", "3"]
    assert strategy(queues, ["c1", "c2"], "c9") == []


def test_the_ring_is_the_reference_one():
    queues = [MessageQueue("T", "b", i) for i in range(8)]
    assert blocks(consistent_hash(), queues, IDS) == ["02357", "4", "16"]
    assert consistent_hash()(queues, IDS, "stranger") == []


@given(st.integers(0, 30), st.integers(1, 8))
def test_every_queue_of_a_room_has_exactly_one_client(queue_count, client_count):
    queues = [MessageQueue("T", "room@b", i) for i in range(queue_count)]
    ids = [f"C{i:03}" for i in range(client_count)]
    for strategy in (machine_room({"room"}), consistent_hash(3)):
        assert sorted(queue for one in ids for queue in strategy(queues, ids, one)) == queues
