"""The soak of the gRPC endpoint in virtual time: after minutes of clients that connect and leave, the tables are as
before.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.examples import chosen_seed
from tests.faults.grpc_clients import Straight
from tests.faults.grpc_soak import GROUPS, IN_ORDER, SILENT_SECONDS, TOPICS, Visits, grown
from tests.faults.grpc_tables import sizes
from tests.proxy.calling import served

SETTINGS = {"transaction_timeout_ms": 2000, "transaction_check_interval_ms": 2000, "transaction_checks_max": 1000}


async def _nothing() -> None:
    pass


@pytest.mark.faults
@pytest.mark.parametrize("by_proxy", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_clients_that_come_and_go_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by_proxy: bool
) -> None:
    async with served(tmp_path, by_proxy=by_proxy, **SETTINGS) as caller:
        straight = Straight(caller)
        visits = Visits(
            lambda name, _: (straight.member(name), _nothing), random.Random(chosen_seed()), pause_seconds=1
        )
        for topic, kind in TOPICS.items():
            caller.topic(topic, 4, kind)
        for group in GROUPS:
            caller.context.groups.get(group).consume_message_orderly = group == IN_ORDER
        await caller.published()
        await visits.prepare()
        found = []
        for seconds in (30, 60):
            visiting = asyncio.create_task(visits.run(seconds))
            at_work: Counter[str] = Counter()
            while not visiting.done():
                await asyncio.sleep(1)
                at_work |= Counter(sizes(caller.endpoint, caller.context))
            await visiting
            await visits.drain()
            await asyncio.sleep(SILENT_SECONDS)
            found.append(sizes(caller.endpoint, caller.context))
        print(visits.counts, visits.errors, json.dumps(at_work))
        assert not visits.errors
        assert not visits.lost()
        assert visits.counts["acknowledged"] >= visits.counts["sent"] > 200
        for name in ("Clients._clients", "Renewals._held", "PopLongPolling._waiting", "Sending._halves"):
            assert at_work[name], f"{name} is looked at"
        more = grown(*found)
        assert not more, more
    gc.collect()
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]
