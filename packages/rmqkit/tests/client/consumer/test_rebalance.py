"""The allocation of queues to clients. Source: behaviour.md §8.4."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.client.consumer.allocate import averagely, averagely_by_circle
from rmqkit.client.consumer.assignment import Rebalance
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ConsumerSettings
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.schemas.clients import ConsumerData, ConsumerIds, MessageQueue
from tests.client.peers import Cluster, refused

MEMBERS = RequestCode.GET_CONSUMER_LIST_BY_GROUP


class Owner:
    """Holds queues and writes down what changes."""

    def __init__(self, *held: MessageQueue) -> None:
        self.held = set(held)
        self.changes: list[tuple[list[int], list[int], bool]] = []

    def held_queues(self):
        return set(self.held)

    async def change_queues(self, taken, given_up, *, is_shared):
        self.held = (self.held | set(taken)) - set(given_up)
        self.changes.append(([queue.queue_id for queue in taken], [queue.queue_id for queue in given_up], is_shared))

    def consumer_data(self):
        return ConsumerData(group_name="G")

    def rebalance_soon(self):
        pass


class Group:
    """A client of group G besides others."""

    def __init__(self, *held: int, allocate=averagely) -> None:
        self.cluster = Cluster()
        self.owner = Owner(*[MessageQueue("T", "broker-0", i) for i in held])
        self.allocate = allocate

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T", queues=8)
        self.runtime = ClientRuntime(self.cluster.namesrv)
        self.runtime.register_consumer("G", self.owner)
        await self.runtime.routes.refresh("T")
        self.rebalance = Rebalance(
            ConsumerContext(self.runtime, "G", ConsumerSettings(), None, None, self.allocate, "CONSUME_PASSIVELY"),
            self.owner,
        )
        return self

    async def __aexit__(self, *exc_info):
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def members(self, *others: str, own: bool = True) -> None:
        ids = [*others, *([self.runtime.client_id] if own else [])]
        self.cluster.broker.answer(
            MEMBERS, lambda command: reply(command, body=msgspec.json.encode(ConsumerIds(list(reversed(ids)))))
        )


async def test_a_lone_client_gets_everything():
    async with Group() as it:
        it.members()
        assert await it.rebalance.share_out(["T"])
        assert it.owner.changes == [([0, 1, 2, 3, 4, 5, 6, 7], [], False)]


async def test_members_are_sorted_by_text():
    async with Group() as it:
        it.members("!first", "~last")
        assert await it.rebalance.share_out(["T"])
        assert it.owner.changes == [([3, 4, 5], [], True)]


async def test_the_strategy_is_a_parameter():
    async with Group(allocate=averagely_by_circle) as it:
        it.members("!first", "~last")
        await it.rebalance.share_out(["T"])
        assert it.owner.changes == [([1, 4, 7], [], True)]


async def test_what_another_client_gets_is_given_up():
    async with Group(0, 1, 2, 3, 4, 5, 6, 7) as it:
        it.members("~last")
        await it.rebalance.share_out(["T"])
        assert it.owner.changes == [([], [4, 5, 6, 7], True)]


async def test_an_unchanged_share_changes_nothing():
    async with Group(0, 1, 2, 3) as it:
        it.members("~last")
        assert await it.rebalance.share_out(["T"])
        assert it.owner.changes == []


async def test_queues_of_a_topic_that_is_not_subscribed_any_more_are_given_up():
    async with Group(0, 1) as it:
        it.members()
        assert await it.rebalance.share_out([])
        assert it.owner.changes == [([], [0, 1], False)]


async def test_a_topic_that_does_not_exist_is_no_failure():
    async with Group() as it:
        it.members()
        assert await it.rebalance.share_out(["Missing"])
        assert it.owner.changes == []


@pytest.mark.parametrize("code", [2, 26])
async def test_what_cannot_be_found_out_leaves_everything_as_it_is(code):
    async with Group(0, 1) as it:
        it.cluster.broker.answer(MEMBERS, refused(code))
        assert not await it.rebalance.share_out(["T"])
        assert it.owner.changes == []


@pytest.mark.parametrize("is_refused", [True, False])
async def test_an_empty_list_of_members_takes_no_queue_away(is_refused):
    async with Group(0, 1) as it:
        it.members(own=False)
        if is_refused:  # a broker that does not know the group
            it.cluster.broker.answer(MEMBERS, refused(1))
        assert not await it.rebalance.share_out(["T"]), "there is more to do"
        assert it.owner.changes == []


@pytest.mark.parametrize("allocate", [averagely, None])
async def test_an_empty_list_of_queues_takes_no_queue_away(allocate):
    async with Group(0, 1, allocate=allocate) as it:
        it.members()
        it.cluster.topic("T", queues=0)
        await it.runtime.routes.refresh("T")
        assert it.runtime.routes.subscribe_queues("T") == []
        assert await it.rebalance.share_out(["T"])
        assert it.owner.changes == []
        it.cluster.topic("T", queues=1)
        await it.runtime.routes.refresh("T")
        assert await it.rebalance.share_out(["T"])
        assert it.owner.changes == [([], [1], False)]


async def test_a_client_the_broker_does_not_know_says_hello_and_asks_again():
    async with Group() as it:
        assert not it.cluster.heartbeats
        assert await it.rebalance.share_out(["T"])
        assert len(it.cluster.heartbeats) == 1
        assert len(it.owner.held) == 8


async def test_a_client_the_broker_does_not_list_owns_nothing():
    async with Group(0, 1) as it:
        it.members("other", own=False)
        assert not await it.rebalance.share_out(["T"]), "there is more to do"
        assert it.owner.changes == [([], [0, 1], False)]
