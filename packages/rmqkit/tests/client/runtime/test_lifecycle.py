"""Starting and closing at the same time. Source: behaviour.md §8.12."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.runtime.settings import PullConsumerSettings, PushConsumerSettings
from rmqkit.errors import ClientError
from rmqkit.protocol.codes import RequestCode
from tests.client.peers import Cluster
from tests.client.test_closing import Held, closing_of


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(PushConsumer, PushConsumerSettings), (PopConsumer, PushConsumerSettings), (PullConsumer, PullConsumerSettings)],
)
async def test_closing_a_client_that_starts_ends_the_start_and_leaves_nothing_running(kind, settings):
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        before = asyncio.all_tasks()
        consumer = kind("CG", cluster.namesrv, settings=settings())
        consumer.subscribe("T")
        heartbeats = Held(cluster.broker, RequestCode.HEART_BEAT)
        starting = asyncio.create_task(consumer.start())
        await heartbeats.until()
        cluster.broker.answer(RequestCode.HEART_BEAT, cluster._heartbeat)
        closing = await closing_of(consumer)
        heartbeats.answer(cluster._heartbeat)
        await closing
        with pytest.raises(ClientError, match="of group CG was closed while it started"):
            await starting
        assert [one for one in asyncio.all_tasks() - before if "CG" in one.get_name() and not one.done()] == []
