"""The web console over Apache's broker: every page answers, and what the broker does not know is said in its place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.console import Console
from rmqkit.protocol.message import Message
from tests.admin.things import send
from tests.console.asgi import Browser
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair, open_store_with_apache
from tests.interop.conftest import kit_or_skip

pytestmark = pytest.mark.real_time

TOPIC, GROUP = "ConsoleOrders", "console-billing"
SECONDS = 60


@pytest.mark.parametrize("version", ["5.4.0", "4.9.4"])
async def test_every_page_of_an_apache_cluster(version: str, tmp_path: Path) -> None:
    with open_store_with_apache(kit_or_skip(version), tmp_path / "store", tmp_path, {}) as apache:
        await look_at_every_page(apache)


async def look_at_every_page(apache: ApachePair) -> None:
    async with Admin(apache.namesrv_addr) as admin:
        await admin.topics.create(TOPIC, cluster=CLUSTER, read_queues=2, write_queues=2)
        await admin.groups.update(GROUP, {}, cluster=CLUSTER)
        async with asyncio.timeout(SECONDS):
            while TOPIC not in await admin.calls.topic_names():
                await asyncio.sleep(0.1)
        await send(admin, *(Message(topic=TOPIC, body=b'{"n": %d}' % n, keys=[f"k{n}"]) for n in range(6)))
        async with Console({"apache": apache.namesrv_addr}) as console:
            browser = Browser(console)
            await console.envs["apache"].watcher.first(SECONDS)
            at = f"/apache/topics/{TOPIC}"
            paths = [
                "/apache/", "/apache/topics", at, f"{at}/messages", f"{at}/messages?order=oldest", f"{at}/tail",
                f"{at}/at/{BROKER_NAME}/0/0", f"{at}/messages?key=k3", f"{at}/send",
                "/apache/groups", f"/apache/groups/{GROUP}",
                f"/apache/groups/{GROUP}/explain?topic={TOPIC}&queue=0&offset=0", "/apache/brokers",
                f"/apache/brokers/{BROKER_NAME}", f"/apache/brokers/{BROKER_NAME}/settings", "/apache/name-servers",
                "/apache/ha", "/apache/clients", "/about",
            ]  # fmt: skip
            for path in paths:
                answer = await browser.get(path)
                assert answer.status == 200, (path, answer.text[-1500:])
                assert "The console failed" not in answer.text
            rows = (await browser.json("/apache/brokers"))["brokers"]
            assert [row["addr"] for row in rows] == [apache.broker_addr]
            messages = (await browser.json(f"{at}/messages"))["messages"]
            assert [one["body"] for one in messages] == [f'{{"n": {n}}}' for n in range(5, -1, -1)]
            verdict = await browser.json(f"/apache/groups/{GROUP}/explain?topic={TOPIC}&queue=0&offset=0")
            assert verdict["explanation"]["cause"] == "no consumer online"
            assert [event["what"] for event in verdict["timeline"]][:2] == [
                "sent by its producer",
                f"stored in {TOPIC}",
            ]
            settings = (await browser.json(f"/apache/brokers/{BROKER_NAME}/settings"))["settings"]
            assert sum(row["isKnown"] for row in settings) > 50
