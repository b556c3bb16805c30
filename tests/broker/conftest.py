"""What the broker's tests share."""

import asyncio

import pytest

from tests.broker.cluster import Cluster


@pytest.fixture
def run(tmp_path):
    def runner(scenario, **settings):
        async def main():
            async with Cluster(tmp_path / "store", **settings) as cluster:
                await scenario(cluster)

        asyncio.run(main())

    return runner
