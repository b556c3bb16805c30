"""Which queues are popped, as brokers share them out. Source: behaviour.md §4.15, §8.4; remoting.md §4.6.1."""

from __future__ import annotations

import msgspec

from rmqkit.client.consumer.allocate import averagely, averagely_by_circle, configured
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.pop.service import BrokerRebalance
from rmqkit.client.pop.session import PopSession
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.schemas.clients import ConsumerData, MessageQueue
from tests.client.peers import Cluster, refused
from tests.client.pops import UNSUPPORTED

ASSIGN = RequestCode.QUERY_ASSIGNMENT
EVERYWHERE = MessageQueue("T", "broker-0", -1)
QUEUES = {MessageQueue("T", "broker-0", i) for i in range(4)}
FIRST, SECOND = sorted(QUEUES)[:2]
FIRST_TWO = {FIRST, SECOND}


def assigned(*queues: MessageQueue, mode: str = "POP"):
    body = {"messageQueueAssignments": [{"messageQueue": queue, "mode": mode} for queue in queues]}
    return lambda command: reply(command, body=msgspec.json.encode(body))


def unknown(command):
    """A broker that has not seen the client."""
    return reply(command, body=b"{}")


class Sharing:
    """Shares out topic T of group G against a scripted broker."""

    def __init__(self, *, allocate=averagely, only_pops: bool = False, is_ordered: bool = False) -> None:
        self.cluster = Cluster()
        self.only_pops = only_pops
        self.allocate = allocate
        self.is_ordered = is_ordered
        self.held: set[MessageQueue] = set()
        self.subscribed: set[str] = set()

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T")
        self.runtime = ClientRuntime(self.cluster.namesrv)
        self.runtime.register_consumer("G", self)
        await self.runtime.routes.refresh("T")
        settings = PushConsumerSettings()
        self.pops = PopSession(self.runtime, "G", settings, is_ordered=self.is_ordered)
        context = ConsumerContext(self.runtime, "G", settings, None, None, self.allocate, "CONSUME_POP")
        self.shares = BrokerRebalance(context, self, self.pops, only_pops=self.only_pops)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    async def share(self, answer=None, topic: str = "T") -> bool:
        if answer is not None:
            self.cluster.broker.answer(ASSIGN, answer)
        return await self.shares.share_out([topic])

    def listed(self, command):
        return reply(command, body=msgspec.json.encode({"consumerIdList": [self.runtime.client_id]}))

    @property
    def popped(self) -> set[MessageQueue]:
        return self.held & self.pops.queues

    # what the rebalance and the runtime call

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(group_name="G")

    def rebalance_soon(self) -> None: ...

    def held_queues(self) -> set[MessageQueue]:
        return set(self.held)

    def subscribe(self, topic: str, expression: str, expression_type: str) -> None:
        assert (expression, expression_type) == ("*", "TAG")
        self.subscribed.add(topic)

    def unsubscribe(self, topic: str) -> None:
        self.subscribed.discard(topic)

    async def change_queues(self, taken, given_up, *, is_shared: bool) -> None:
        self.held = self.held.difference(given_up).union(taken)
        self.is_shared = is_shared


async def test_the_broker_is_requested_our_share_by_the_name_of_the_strategy():
    async with Sharing(allocate=averagely_by_circle) as it:
        assert await it.share(assigned(EVERYWHERE))
        (request,) = [one for one in it.cluster.broker.requests if one.code == ASSIGN]
        assert msgspec.json.decode(request.body) == {
            "topic": "T",
            "consumerGroup": "G",
            "clientId": it.runtime.client_id,
            "strategyName": "AVG_BY_CIRCLE",
            "messageModel": "CLUSTERING",
        }
        assert (it.held, it.popped) == ({EVERYWHERE}, {EVERYWHERE})


async def test_queues_to_pull_are_pulled_and_what_was_popped_comes_through_the_retry_topic_of_pops():
    async with Sharing() as it:
        await it.share(assigned(*FIRST_TWO, mode="PULL"))
        assert (it.held, it.popped, it.subscribed) == (FIRST_TWO, set(), {"%RETRY%G_T"})
        assert it.is_shared, "their former owner may still save its offset"
        assert not await it.share(assigned(EVERYWHERE)), "pops read the retry topic: it is given up before"
        assert (it.held, it.popped, it.subscribed) == (FIRST_TWO, set(), set())
        assert await it.share()
        assert (it.held, it.popped, it.subscribed) == ({EVERYWHERE}, {EVERYWHERE}, set())


async def test_a_queue_whose_mode_changes_is_given_up_and_taken_again():
    async with Sharing() as it:
        await it.share(assigned(*FIRST_TWO, mode="PULL"))
        assert not await it.share(assigned(*FIRST_TWO)), "the retry topic is given up first"
        assert not await it.share(), "there is more to do"
        assert it.held == set()
        assert await it.share()
        assert it.popped == FIRST_TWO
        assert not await it.share(assigned(FIRST, mode="PULL"))
        assert it.held == set()
        assert await it.share()
        assert (it.held, it.popped) == ({FIRST}, set())


async def test_a_retry_topic_has_none_of_its_own():
    async with Sharing() as it:
        it.cluster.topic("%RETRY%G", queues=1)
        await it.runtime.routes.refresh("%RETRY%G")
        queue = MessageQueue("%RETRY%G", "broker-0", 0)
        await it.share(assigned(queue, mode="PULL"), topic="%RETRY%G")
        assert (it.held, it.subscribed) == ({queue}, set())


async def test_a_broker_that_has_not_seen_us_is_notified_and_asked_again():
    async with Sharing() as it:
        answers = [unknown, assigned(EVERYWHERE)]
        assert await it.share(lambda command: answers.pop(0)(command))
        assert it.held == {EVERYWHERE}


async def test_what_cannot_be_found_out_leaves_everything_as_it_is():
    async with Sharing() as it:
        await it.share(assigned(EVERYWHERE))
        assert not await it.share(refused(ResponseCode.SYSTEM_ERROR, "busy"))
        assert it.popped == {EVERYWHERE}


async def test_members_share_out_themselves_where_brokers_do_not():
    async with Sharing() as it:
        it.cluster.broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, it.listed)
        assert await it.share(UNSUPPORTED)
        assert (it.held, it.popped) == (QUEUES, set())
    async with Sharing(allocate=configured(FIRST_TWO)) as it:
        it.cluster.broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, it.listed)
        assert await it.share()
        assert it.held == FIRST_TWO
        assert not [one for one in it.cluster.broker.requests if one.code == ASSIGN], "brokers do not know that one"


async def test_a_pop_consumer_pops_every_broker_unless_it_was_given_its_share():
    async with Sharing(only_pops=True) as it:
        for answer in (UNSUPPORTED, unknown, assigned(*FIRST_TWO, mode="PULL")):
            await it.share(answer)
            assert (it.held, it.popped, it.subscribed) == ({EVERYWHERE}, {EVERYWHERE}, set())
        await it.share(assigned(*FIRST_TWO))
        assert it.popped == it.held == FIRST_TWO


async def test_in_order_every_queue_is_popped_by_itself():
    async with Sharing(only_pops=True, is_ordered=True) as it:
        assert await it.share(assigned(EVERYWHERE))
        assert it.popped == QUEUES
        assert not [one for one in it.cluster.broker.requests if one.code == ASSIGN]


async def test_a_topic_that_does_not_exist_has_no_queues():
    async with Sharing(only_pops=True) as it:
        assert await it.share(assigned(EVERYWHERE), topic="U")
        assert it.held == set()
