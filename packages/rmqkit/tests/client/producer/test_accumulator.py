"""`Producer.send` with ``batch.auto``. Source: behaviour.md §7.8, §7.12."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_sharding_key
from rmqkit.client.runtime.settings import Batching, ProducerSettings, SendLimits
from rmqkit.errors import ClientError, MessageIllegal, PeerRefused
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.record import decode_batch
from tests.client.peers import Cluster, refused, until

BATCH, SINGLE = RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2
FOREVER_MS = 30_000  # only size, or the end, closes a batch


def settings(**batch):
    return ProducerSettings(batch=Batching(auto=True, **batch))


def bodies(command):
    return [entry.body for entry in decode_batch(bytes(command.body))]


def batches(cluster):
    return [bodies(command) for command in cluster.broker.requests if command.code == BATCH]


async def test_sends_of_one_topic_queue_tag_and_wait_store_share_a_request():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings()) as producer:
        cluster.topic("T", queues=1)
        (queue,) = await producer.queues("T")
        same = [producer.send(Message(topic="T", body=b"%d" % i)) for i in range(3)]
        others = [
            producer.send(Message(topic="T", body=b"tagged", tags="A")),
            producer.send(Message(topic="T", body=b"no wait", wait_store=False)),
            producer.send(Message(topic="T", body=b"there"), queue=queue),
            producer.send(Message(topic="T", body=b"there, too", sharding_key="k"), selector=by_sharding_key),
        ]
        results = await asyncio.gather(*same, *others)
        assert sorted(batches(cluster)) == [[b"0", b"1", b"2"], [b"no wait"], [b"tagged"], [b"there", b"there, too"]]
        assert len({result.msg_id for result in results}) == 7
        assert [result.queue_offset - results[0].queue_offset for result in results[:3]] == [0, 1, 2]


async def test_what_cannot_or_need_not_wait_goes_alone_and_at_once():
    never = settings(delay_ms=FOREVER_MS, total_bytes=1)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=never) as producer:
        cluster.topic("T")
        await producer.send(Message(topic="T", body=b"delayed", delay_level=1))
        await producer.send(Message(topic="T", body=bytes(5000)))
        await producer.send(Message(topic="T", body=b"in a hurry"), timeout=3)
        waiting = asyncio.create_task(producer.send(Message(topic="T", body=b"fills it")))
        await asyncio.sleep(0)
        await producer.send(Message(topic="T", body=b"beyond the total"))
        assert (len(cluster.broker.asked(SINGLE)), batches(cluster)) == (4, [])
        with pytest.raises(MessageIllegal, match="is empty"):
            await producer.send(Message(topic="T", body=b""), timeout=None)
        await producer.close()
        await waiting
        assert batches(cluster) == [[b"fills it"]]


async def test_a_batch_is_never_larger_than_a_message_may_be():
    small = ProducerSettings(batch=Batching(auto=True), limits=SendLimits(message_bytes_max=200))
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=small) as producer:
        cluster.topic("T", queues=1)
        sent = await asyncio.gather(*(producer.send(Message(topic="T", body=b"%d" % i)) for i in range(20)))
        assert len(sent) == 20
        many = await producer.send_many([Message(topic="T", body=b"%d" % i) for i in range(20)])
        assert len(many) == 20
        assert {len(command.body) > 100 for command in cluster.broker.requests if command.code == BATCH} == {True}


async def test_a_full_batch_does_not_wait():
    never = settings(delay_ms=FOREVER_MS, bytes=300)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=never) as producer:
        cluster.topic("T")
        sends = [asyncio.create_task(producer.send(Message(topic="T", body=b"%d" % i))) for i in range(20)]
        await until(lambda: batches(cluster), "the first full batch")
        await producer.close()
        assert len(await asyncio.gather(*sends)) == 20
        assert [body for batch in batches(cluster) for body in batch] == [b"%d" % i for i in range(20)]
        with pytest.raises(ClientError, match="closed"):
            await producer.send(Message(topic="T", body=b"late"))


async def test_everybody_in_a_batch_that_fails_is_reported_and_a_cancelled_caller_disturbs_nobody():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings(bytes=300)) as producer:
        cluster.topic("T")
        cluster.broker.answer(BATCH, refused(ResponseCode.MESSAGE_ILLEGAL, "no"))
        sends = [asyncio.create_task(producer.send(Message(topic="T", body=b"%d" % i))) for i in range(3)]
        await asyncio.sleep(0)
        sends[1].cancel()
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [PeerRefused, asyncio.CancelledError, PeerRefused]
        assert batches(cluster) == [[b"0", b"1", b"2"]]
        assert producer._accumulator._bytes == 0
