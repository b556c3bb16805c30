"""What the broker's tests share."""

import asyncio

import pytest

from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.standalone import Standalone
from tests.broker.cluster import Cluster

USERS = AuthenticationSettings(
    enabled=True, initial_user='{"username":"root","password":"secret12"}', authorization_enabled=True
)


@pytest.fixture
def run(tmp_path):
    def runner(scenario, **settings):
        async def main():
            async with Cluster(tmp_path / "store", **settings) as cluster:
                await scenario(cluster)

        asyncio.run(main())

    return runner


@pytest.fixture
def serve(tmp_path):
    """Runs a scenario beside a name server and a broker, which know users if asked for."""

    def runner(scenario, *, users=False, **options):
        async def main():
            async with Standalone(tmp_path / "store", authentication=USERS if users else None, **options) as servers:
                await scenario(servers)

        asyncio.run(main())

    return runner
