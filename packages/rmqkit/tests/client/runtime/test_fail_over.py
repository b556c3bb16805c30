"""A consumer whose master is gone reads from the slave; one that is far behind is sent there and back. Scripted peers.

With real brokers: `tests.broker.replication.test_fail_over`. Source: behaviour.md §4.2, §8.6, §10.2, §10.4.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.runtime.settings import Pulling, PushConsumerSettings, StartFrom
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.protocol.schemas.topics import BrokerData, QueueData, TopicRoute
from tests.client.messages import record
from tests.client.peers import Cluster, pulled, until

PULL, ROUTE = RequestCode.PULL_MESSAGE, RequestCode.GET_ROUTEINFO_BY_TOPIC
QUICK = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0, pull=Pulling(error_pause_ms=20))


class Pair(Cluster):
    """A name server, a master and a slave of one name, and one queue of T."""

    def __init__(self):
        super().__init__(2)
        self.master, self.slave = self.brokers
        self.seen: list[int] = []

    def route(self, **addresses):
        brokers = {int(name.removeprefix("id")): peer.address for name, peer in addresses.items()}
        for topic in ("T", "%RETRY%G"):  # a topic that is missing would be looked for anyway
            self.routes[topic] = TopicRoute([QueueData("broker-0", 1, 1, 6)], [BrokerData("C", "broker-0", brokers)])

    @asynccontextmanager
    async def consumer(self):
        async def handler(message):
            self.seen.append(message.queue_offset)

        consumer = PushConsumer("G", self.namesrv, settings=QUICK)
        consumer.subscribe("T", "*", handler)
        async with consumer:
            yield consumer

    async def until_seen(self, count):
        await until(lambda: self.seen == list(range(count)), f"{count} messages, each once; there are {self.seen}")


def holds(peer, count, suggests=lambda offset: 0):
    """Have a broker hand out a log of so many messages one by one, and hold pulls at its end."""

    def answer(command):
        fields = decode_fields(command)
        at = int(fields["queueOffset"])
        if fields["topic"] != "T" or at >= count:
            return None
        return pulled(command, ResponseCode.SUCCESS, at + 1, record(at), broker_id=suggests(at))

    peer.answer(PULL, answer)


def pulls(peer):
    return [fields for fields in peer.asked(PULL) if fields["topic"] == "T"]


async def test_while_pulls_fail_the_routes_are_looked_at_until_somebody_else_is_there():
    async with Pair() as pair:
        pair.route(id0=pair.master, id1=pair.slave)
        holds(pair.master, 3)
        holds(pair.slave, 6)
        async with pair.consumer():
            await pair.until_seen(3)
            await pair.master.stop()
            asked = len(pair.name_server.asked(ROUTE))
            await until(lambda: len(pair.name_server.asked(ROUTE)) > asked + 6, "several looks at the old route")
            pair.route(id1=pair.slave)
            await pair.until_seen(6)
        assert not any(int(fields["sysFlag"]) & PullFlag.COMMIT_OFFSET for fields in pulls(pair.slave))


async def test_a_consumer_far_behind_reads_from_the_slave_until_that_sends_it_back():
    async with Pair() as pair:
        pair.route(id0=pair.master, id1=pair.slave)
        holds(pair.master, 6, suggests=lambda offset: int(offset == 0))
        holds(pair.slave, 6, suggests=lambda offset: int(offset < 3))
        async with pair.consumer():
            await pair.until_seen(6)
        assert [fields["queueOffset"] for fields in pulls(pair.slave)] == ["1", "2", "3"]
        assert [fields["queueOffset"] for fields in pulls(pair.master)] == ["0", "4", "5", "6"]
