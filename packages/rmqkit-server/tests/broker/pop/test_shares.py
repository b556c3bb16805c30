"""The queues that the broker assigns to the clients of a group (behaviour.md §4.15)."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from rmqkit.broker.pop.assignment import PopAssignmentHandlers
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.pop import Assignments, MessageRequestMode, QueryAssignmentBody
from rmqkit.protocol.schemas.topics import QueueData, TopicConfig, TopicRoute
from tests.broker.pop.parts import PopBroker


class Shares:
    """The assignments of topic T, which has four queues here, to the clients c0, c1, … of group g."""

    def __init__(self, broker, clients=3):
        self.routes = []
        self.broker = broker
        members = {number: SimpleNamespace(client_id=f"c{number}") for number in reversed(range(clients))}
        self.group = SimpleNamespace(members=members, is_broadcasting=False)
        broker.context.clients.consumers = lambda group: self.group if group == "g" else None
        broker.topics.put(TopicConfig("T", 4, 8))
        self.handlers = PopAssignmentHandlers(broker.context, self.routes_of)

    async def routes_of(self, topic):
        return self.routes

    async def answer(self, client="c0", *, strategy="AVG", topic="T", group="g"):
        body = QueryAssignmentBody(topic=topic, consumer_group=group, client_id=client, strategy_name=strategy)
        return await self.handlers.assignments(
            None, request(RequestCode.QUERY_ASSIGNMENT, None, msgspec.json.encode(body))
        )

    async def of(self, client="c0", **fields):
        """Return mode, broker and queue of each queue of a client."""
        answer = await self.answer(client, **fields)
        found = msgspec.json.decode(answer.body, type=Assignments).message_queue_assignments
        return [(one.mode, one.message_queue.broker_name, one.message_queue.queue_id) for one in found]

    async def queues(self, client="c0", **fields):
        return [queue_id for _, _, queue_id in await self.of(client, **fields)]

    def set_mode(self, share, mode="POP", topic="T", group="g"):
        body = MessageRequestMode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)
        return self.handlers.set_mode(
            None, request(RequestCode.SET_MESSAGE_REQUEST_MODE, None, msgspec.json.encode(body))
        )


@pytest.fixture
async def shares(tmp_path):
    broker = PopBroker(tmp_path)
    yield Shares(broker)
    broker.close()


async def test_a_group_that_pulls_shares_the_readable_queues(shares):
    assert [await shares.of(f"c{number}") for number in range(3)] == [
        [("PULL", "broker-a", 0), ("PULL", "broker-a", 1)],
        [("PULL", "broker-a", 2)],
        [("PULL", "broker-a", 3)],
    ]
    assert [await shares.queues(f"c{number}", strategy="AVG_BY_CIRCLE") for number in range(3)] == [[0, 3], [1], [2]]


async def test_a_client_that_the_broker_does_not_know_gets_no_list(shares):
    answer = await shares.answer("c3")
    assert (answer.code, answer.body) == (ResponseCode.SUCCESS, b"{}")
    answer = await shares.answer("c0", group="h")
    assert answer.body == b"{}"


async def test_an_unknown_strategy_is_refused(shares):
    answer = await shares.answer(strategy="NEAREST")
    assert (answer.code, answer.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "strategy NEAREST is not supported: use AVG or AVG_BY_CIRCLE",
    )


async def test_a_group_that_broadcasts_pulls_every_queue(shares):
    assert shares.set_mode(0).code == ResponseCode.SUCCESS
    shares.group.is_broadcasting = True
    assert await shares.of("c1") == [("PULL", "broker-a", queue) for queue in range(4)]


@pytest.mark.parametrize(
    ("clients", "share", "expected"),
    [
        (3, -1, [[-1]] * 3),
        (3, 0, [[-1]] * 3),
        (3, 1, [[0, 1, 2], [2, 3], [0, 1, 3]]),
        (3, 2, [[-1]] * 3),
        (4, 2, [[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3]]),
        (4, 3, [[-1]] * 4),
        (4, 1, [[0, 1], [1, 2], [2, 3], [0, 3]]),
        (5, 1, [[0], [1], [2], [3], [0]]),
        (1, 1, [[-1]]),
    ],
)
async def test_clients_that_pop_share_their_queues_with_the_next_ones(clients, share, expected, tmp_path):
    broker = PopBroker(tmp_path)
    shares = Shares(broker, clients)
    shares.set_mode(share)
    assert [await shares.queues(f"c{number}") for number in range(clients)] == expected
    assert {mode for mode, _, _ in await shares.of()} == {"POP"}
    broker.close()


async def test_clients_that_pop_a_topic_without_queues_get_none(shares):
    shares.broker.topics.put(TopicConfig("T", 4, 4, 2))
    for share in (0, 1):
        shares.set_mode(share)
        assert await shares.of() == []
    shares.group.members = {number: SimpleNamespace(client_id=f"c{number}") for number in range(5)}
    assert await shares.of() == []


async def test_the_queues_of_all_brokers_are_shared_and_the_own_table_counts_for_this_one(shares):
    shares.routes = [
        TopicRoute(
            queue_datas=[
                QueueData("broker-a", 9, 9, 6, 0),
                QueueData("broker-b", 2, 9, 6, 0),
                QueueData("broker-c", 2, 2, 2, 0),
                QueueData("broker-d", 1, 1, 4, 0),
            ]
        )
    ]
    shares.group.members = {0: SimpleNamespace(client_id="c0")}
    own, other = (
        [("PULL", "broker-a", queue) for queue in range(4)],
        [("PULL", "broker-b", queue) for queue in range(2)],
    )
    assert await shares.of() == [*own, *other, ("PULL", "broker-d", 0)]
    shares.set_mode(0)
    assert await shares.of() == [("POP", name, -1) for name in ("broker-a", "broker-b", "broker-d")]
    shares.broker.topics.remove("T")
    assert len(await shares.of()) == 3, "the route's entry for this broker counts without an own one"


async def test_the_mode_is_that_of_the_settings_until_an_operator_sets_one(shares):
    shares.broker.settings.pop_share_queue_count = 1
    assert {mode for mode, _, _ in await shares.of()} == {"PULL"}
    assert shares.set_mode(0, group="other").code == ResponseCode.SUCCESS
    assert {mode for mode, _, _ in await shares.of()} == {"PULL"}, "the mode of another group"
    assert shares.set_mode(0).code == ResponseCode.SUCCESS
    assert {mode for mode, _, _ in await shares.of()} == {"POP"}
    assert shares.set_mode(0, mode="PULL").code == ResponseCode.SUCCESS
    assert {mode for mode, _, _ in await shares.of()} == {"PULL"}


@pytest.mark.parametrize(
    ("topic", "group", "code"),
    [
        ("%RETRY%g", "g", ResponseCode.NO_PERMISSION),
        ("U", "g", ResponseCode.TOPIC_NOT_EXIST),
        ("T", "bad name!", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
    ],
)
async def test_a_mode_for_a_retry_topic_or_an_unknown_place_is_refused(topic, group, code, shares):
    assert shares.set_mode(0, topic=topic, group=group).code == code
    assert {mode for mode, _, _ in await shares.of()} == {"PULL"}


async def test_a_retry_topic_is_always_pulled(shares):
    shares.broker.topics.put(TopicConfig("%RETRY%g", 1, 1))
    shares.set_mode(0)
    assert await shares.of(topic="%RETRY%g") == [("PULL", "broker-a", 0)]
