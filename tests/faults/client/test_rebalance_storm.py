"""Ten members of a group join and leave: the short form, see `storm`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.examples import chosen_seed
from tests.faults.client.servers import Servers
from tests.faults.client.storm import CHANGES_MIN, CONF, Storm

SECONDS, PROCESSES = 4.0, 2


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kills", "is_ordered"), [(1, False), (0, True)], ids=["concurrent", "ordered"])
def test_a_storm_of_rebalances_loses_nothing_and_stops_no_queue(tmp_path: Path, kills: int, is_ordered: bool) -> None:
    seed = chosen_seed()

    async def rage() -> None:
        async with Servers(tmp_path, conf=CONF) as servers:
            storm = Storm(
                servers.namesrv_addr,
                seconds=SECONDS,
                seed=seed,
                rate=200,
                kills=kills,
                is_ordered=is_ordered,
                processes=PROCESSES,
            )
            outcome = await storm.run()
        print(outcome)
        assert outcome.changes > CHANGES_MIN
        assert outcome.faults == []

    asyncio.run(rage())
