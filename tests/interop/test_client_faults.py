"""Our client while a real Apache broker is killed and restarted, and in a rebalance storm, with the same checks as for
our broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import chosen_seed
from tests.faults.client.outage import ride_out
from tests.faults.client.storm import CONF, Storm
from tests.faults.client.trial import Trial
from tests.interop.apache import (
    BROKER_CONF,
    BROKER_HEAP_MB,
    HOST,
    READY_SECONDS,
    register_now,
    run_apache_name_server,
    start_apache,
)
from tests.interop.kit import ApacheKit
from tests.interop.server_process import ServerProcess
from tests.ports import free_ports

STORM_SECONDS = 10.0


class Broker:
    """A separate broker of this file, always on the same ports."""

    def __init__(self, kit: ApacheKit, work_dir: Path, namesrv_addr: str) -> None:
        _, port, ha_port = free_ports()
        self.namesrv_addr = namesrv_addr
        self.address = f"{HOST}:{port}"
        self._kit = kit
        self._work_dir = work_dir
        self._conf: dict[str, object] = {
            **BROKER_CONF,
            "listenPort": port,
            "bindAddress": HOST,
            "haListenPort": ha_port,
            "brokerIP1": HOST,
            "namesrvAddr": namesrv_addr,
            "storePathRootDir": work_dir / "store",
            "storePathCommitLog": work_dir / "store" / "commitlog",
            **dict(line.split("=") for line in CONF.split()),
        }
        self._process: ServerProcess | None = None

    def start(self) -> None:
        main = "org.apache.rocketmq.broker.BrokerStartup"
        self._process = start_apache(self._kit, "broker", main, self._conf, BROKER_HEAP_MB, self._work_dir)
        self._process.wait_ready("boot success", READY_SECONDS)
        register_now(self.namesrv_addr, self.address)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


@pytest.fixture(scope="module")
def broker(apache_kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    work_dir = tmp_path_factory.mktemp("apache-killed")
    with run_apache_name_server(apache_kit, work_dir) as (_, namesrv_addr):
        running = Broker(apache_kit, work_dir, namesrv_addr)
        try:
            running.start()
            yield running
        finally:
            running.kill()


@pytest.mark.faults
def test_an_apache_broker_that_is_killed_and_comes_back_costs_no_message(broker: Broker) -> None:
    async def scenario() -> None:
        async with Trial(broker.namesrv_addr, topic="PyKilled") as trial:
            await trial.arrivals(200)
            async with trial.outage():
                broker.kill()
                await asyncio.to_thread(broker.start)
            await trial.arrivals(200)
            await trial.settle()
        trial.judge()

    asyncio.run(scenario())


@pytest.mark.faults
def test_no_send_fails_while_an_apache_broker_is_killed_and_comes_back(broker: Broker) -> None:
    async def outage() -> None:
        broker.kill()
        await asyncio.to_thread(broker.start)

    asyncio.run(ride_out(broker.namesrv_addr, "PyRiddenOut", outage))


@pytest.mark.faults
def test_a_storm_of_rebalances_at_an_apache_broker_loses_nothing_and_stops_no_queue(broker: Broker) -> None:
    seed = chosen_seed()
    storm = Storm(broker.namesrv_addr, seconds=STORM_SECONDS, seed=seed, rate=200, kills=1, is_ordered=False)
    outcome = asyncio.run(storm.run())
    print(outcome)
    assert outcome.changes > 20
    assert outcome.faults == []
