"""Groups that read too far behind are disabled (behaviour.md §2.3)."""

from __future__ import annotations

import pytest

from rmqkit.broker.pull.handler import stop_slow_groups
from rmqkit.protocol.codes import ResponseCode
from tests.broker.cluster import Cluster


@pytest.mark.parametrize(
    ("settings", "offset", "topics", "is_stopped"),
    [
        ({"stops_slow_groups": True, "slow_group_bytes": 100_000}, 1, ["T"], True),
        ({"stops_slow_groups": True, "slow_group_bytes": 1_000_000}, 1, ["T"], False),
        ({"stops_slow_groups": True, "slow_group_bytes": 100_000}, 3, ["T"], False),  # it has everything
        ({"stops_slow_groups": True, "slow_group_bytes": 100_000}, 1, [], False),  # it is not online
        ({"stops_slow_groups": False, "slow_group_bytes": 100_000}, 1, ["T"], False),
    ],
)
async def test_a_group_far_behind_is_disabled(settings, offset, topics, is_stopped, tmp_path):
    async with Cluster(tmp_path / "store", broker=settings, store={"transfer_bytes_in_memory_max": 1 << 20}) as cluster:
        for size in (10, 200_000, 200_000):
            await cluster.send(body=bytes(size))
        for topic in topics:
            await cluster.heartbeat("c", (topic, "*"))
        assert (await cluster.pull(count=offset)).code == 0
        context = cluster.standalone.broker.context
        await stop_slow_groups(context)
        assert context.groups.get("g").consume_enable is not is_stopped
        answer = await cluster.pull(offset)
        if is_stopped:
            refused = ResponseCode.NO_PERMISSION, "subscription group no permission, g"
            assert (answer.code, answer.remark) == refused
        else:
            assert answer.code != ResponseCode.NO_PERMISSION
