"""What the broker's tests share."""

import msgspec
import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.settings import load
from rmqkit.standalone import Standalone
from tests.broker.cluster import Cluster
from tests.virtual_time import run as run_virtual

USERS = AuthenticationSettings(
    enabled=True, initial_user='{"username":"root","password":"secret12"}', authorization_enabled=True
)


@pytest.fixture
def run(tmp_path):
    def runner(scenario, **settings):
        async def main():
            async with Cluster(tmp_path / "store", **settings) as cluster:
                await scenario(cluster)

        run_virtual(main())

    return runner


@pytest.fixture
def serve(tmp_path):
    """Runs a scenario beside a name server and a broker.
    ``users``: whether they know users; ``full``: whether these have to sign fully.
    ``broker``, ``namesrv``: lines of their files."""

    def settings(settings_type, lines):
        return load([settings_type], {"listenPort": "0", "bindAddress": "127.0.0.1", **(lines or {})}).values[0]

    def runner(scenario, *, users=False, full=False, broker=None, namesrv=None):
        async def main():
            async with Standalone(
                tmp_path / "store",
                authentication=msgspec.structs.replace(USERS, full_signatures_only=full) if users else None,
                broker=settings(BrokerSettings, broker),
                namesrv=settings(NamesrvSettings, namesrv),
            ) as servers:
                await scenario(servers)

        run_virtual(main())

    return runner
