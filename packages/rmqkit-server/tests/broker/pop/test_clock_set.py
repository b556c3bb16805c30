"""The wall clock is set while messages are in flight: they are redelivered after their invisible time, not after the
step."""

from __future__ import annotations

import asyncio

import pytest

from tests.broker.cluster import Cluster
from tests.broker.pops import ack, pop, sent
from tests.set_clock import SetClock
from tests.virtual_time import run as run_virtual

pytestmark = pytest.mark.virtual_time

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
BACK = pytest.mark.parametrize("step_ms", [-HOUR_MS, -DAY_MS])


def run(tmp_path, scenario, clock=None):
    async def running():
        cluster = Cluster(tmp_path / "store", clock=clock or SetClock())
        async with cluster.standalone:
            try:
                return await scenario(cluster, cluster.standalone.broker.context.clock)
            finally:
                for client in cluster.clients:
                    await client.close()

    return run_virtual(running())


async def seconds_until_popped(cluster, clock, **fields):
    """Pop every 0.2 s until there is a message. Return the seconds and the answer."""
    since = asyncio.get_running_loop().time()
    while True:
        popped = await pop(cluster, born_time=clock.now_ms(), **fields)
        if popped.messages:
            return asyncio.get_running_loop().time() - since, popped
        await asyncio.sleep(0.2)


@BACK
@pytest.mark.parametrize("is_ordered", [False, True], ids=["unordered", "ordered"])
def test_messages_in_flight_are_redelivered_in_time_when_the_clock_is_set_back(tmp_path, step_ms, is_ordered):
    async def scenario(cluster, clock):
        await sent(cluster, "m")
        fields = {"order": is_ordered, "invisible_time": 10_000}
        assert list(await pop(cluster, **fields)) == ["m"]
        clock.ahead_ms += step_ms
        return (await seconds_until_popped(cluster, clock, **fields))[0]

    assert 9.5 <= run(tmp_path, scenario) <= 12


@BACK
def test_pops_after_the_step_are_acknowledged_and_are_redelivered_like_others(tmp_path, step_ms):
    async def scenario(cluster, clock):
        clock.ahead_ms += step_ms
        await sent(cluster, "acknowledged", "not")
        popped = await pop(cluster, born_time=clock.now_ms(), invisible_time=10_000)
        assert sorted(popped) == ["acknowledged", "not"]
        assert (await ack(cluster, popped.handles["acknowledged"])).code == 0
        seconds, again = await seconds_until_popped(cluster, clock, invisible_time=10_000)
        assert list(again) == ["not"]
        return seconds

    assert 9.5 <= run(tmp_path, scenario) <= 12


@BACK
@pytest.mark.parametrize("is_ordered", [False, True], ids=["unordered", "ordered"])
def test_pops_of_the_future_are_redelivered_after_a_restart(tmp_path, step_ms, is_ordered):
    fields = {"order": is_ordered, "invisible_time": 10_000}

    async def before(cluster, clock):
        await sent(cluster, "m")
        assert list(await pop(cluster, **fields)) == ["m"]

    async def after(cluster, clock):
        return (await seconds_until_popped(cluster, clock, **fields))[0]

    run(tmp_path, before)
    clock = SetClock()
    clock.ahead_ms = step_ms
    assert 9.5 <= run(tmp_path, after, clock) <= 12


def test_a_clock_that_is_set_forward_makes_pops_due(tmp_path):
    async def scenario(cluster, clock):
        await sent(cluster, "m")
        assert list(await pop(cluster, invisible_time=60_000)) == ["m"]
        clock.ahead_ms += HOUR_MS
        return (await seconds_until_popped(cluster, clock))[0]

    assert run(tmp_path, scenario) <= 2
