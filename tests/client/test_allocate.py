"""Allocation strategies. Source: behaviour.md §8.5."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.allocate import averagely, averagely_by_circle
from rmqkit.protocol.bodies.clients import MessageQueue


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
