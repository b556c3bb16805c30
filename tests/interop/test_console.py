"""The web console over Apache's brokers, 5.5.0 and 4.9.4 at once: every page answers, and shows which data a broker
does not provide."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rmqkit import TransactionProducer, TransactionState
from rmqkit.admin import Admin
from rmqkit.protocol.message import Message
from tests.admin.things import send
from tests.cli.test_console import ready, started
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair, open_store_with_apache
from tests.interop.conftest import kit_or_skip
from tests.waiting import until

pytestmark = pytest.mark.real_time

TOPIC, LATER, GROUP = "ConsoleOrders", "ConsoleLater", "console-billing"
SECONDS = 60
WITHOUT_HA = "brokers before 5.0 do not know the request (907)"


def test_every_page_of_two_clusters_at_once(apache: ApachePair, tmp_path: Path) -> None:
    with open_store_with_apache(kit_or_skip("4.9.4"), tmp_path / "store", tmp_path, {}) as old:
        clusters = {"new": apache, "old": old}
        for pair in clusters.values():
            asyncio.run(fill(pair.namesrv_addr))
        named = [word for name, pair in clusters.items() for word in ("--env", f"{name}={pair.namesrv_addr}")]
        with started(tmp_path, "console", *named, "--port", "0") as process:
            address = ready(process)["console"].rstrip("/")
            asyncio.run(until(lambda: is_well(address), "a first look at both clusters"))
            listed = told(address, "/")["clusters"]
            assert [one["name"] for one in listed] == ["new", "old"]
            for name, pair in clusters.items():
                look_at_every_page(address, name, pair)
            assert WITHOUT_HA in page(address, "/old/ha")
            assert WITHOUT_HA not in page(address, "/new/ha")
            versions = {name: told(address, f"/{name}/brokers")["brokers"][0]["version"] for name in clusters}
            (timed,) = told(address, f"/new/waiting/timed?topic={LATER}")["found"]["rows"]
            assert timed["keys"] == ["timed"]
            assert asyncio.run(cancel_timed(apache.namesrv_addr)) == []
            assert told(address, f"/new/waiting/timed?topic={LATER}")["found"]["rows"] == []
            assert told(address, "/old/waiting/timed")["found"]["rows"] == []  # 4.9 has no timer
            assert versions == {"new": "V5_5_0", "old": "V4_9_4"}


async def fill(name_servers: str) -> None:
    """Send six orders, and create a group without members."""
    async with Admin(name_servers) as admin:
        for topic in (TOPIC, LATER):
            await admin.topics.create(topic, cluster=CLUSTER, read_queues=2, write_queues=2)
        await admin.groups.update(GROUP, {}, cluster=CLUSTER)
        async with asyncio.timeout(SECONDS):
            while not {TOPIC, LATER} <= set(await admin.calls.topic_names()):
                await asyncio.sleep(0.1)
        await send(admin, *(Message(topic=TOPIC, body=b'{"n": %d}' % n, keys=[f"k{n}"]) for n in range(6)))
    async with TransactionProducer("console-shop", name_servers, execute=never, check=never) as producer:
        for _ in range(2):
            await producer.send(Message(topic=LATER, body=b"later", delay_level=18))
        await producer.send_half(Message(topic=LATER, body=b"half"))
        await producer.send(LATER, b"timed", delay=7_200, keys=["timed"])


async def cancel_timed(name_servers: str) -> list[str]:
    """Cancel the timed message at the broker, and return the keys of the remaining ones."""
    async with Admin(name_servers) as admin:
        await admin.brokers.update_config({"recallMessageEnable": "true"}, await admin.calls.address(BROKER_NAME))
        (one,) = (await admin.waiting.timed(topic=LATER)).rows
        timed, _ = await admin.waiting.timers.at(one.broker, one.offset)
        await admin.waiting.timers.recall(timed)
        left = ["timed"]
        async with asyncio.timeout(SECONDS):  # the broker enters the record of the recall a moment after its answer
            while left:
                left = [key for one in (await admin.waiting.timed(topic=LATER)).rows for key in one.keys]
        return left


async def never(*_: object) -> TransactionState:
    """Leave a transaction undecided."""
    return TransactionState.UNKNOWN


def look_at_every_page(address: str, env: str, apache: ApachePair) -> None:
    at = f"/{env}/topics/{TOPIC}"
    explained = f"/{env}/groups/{GROUP}/explain?topic={TOPIC}&queue=0&offset=0"
    paths = [
        f"/{env}/", f"/{env}/topics", at, f"{at}/messages", f"{at}/messages?order=oldest", f"{at}/tail",
        f"{at}/at/{BROKER_NAME}/0/0", f"{at}/messages?key=k3", f"{at}/send", f"/{env}/groups",
        f"/{env}/groups/{GROUP}", f"/{env}/groups/{GROUP}/explain", explained, f"/{env}/brokers",
        f"/{env}/brokers/{BROKER_NAME}", f"/{env}/brokers/{BROKER_NAME}/settings", f"/{env}/name-servers",
        f"/{env}/ha", f"/{env}/clients", "/about", "/audit", f"/{env}/brokers/{BROKER_NAME}/store",
        f"/{env}/search?q={TOPIC[:5]}", f"/{env}/search?q=k3&topic={TOPIC}",
        f"/{env}/waiting/delays", f"/{env}/waiting/timed", f"/{env}/waiting/transactions", f"/{env}/waiting/pop",
        f"/{env}/filter?type=TAG&expression=x&topic={TOPIC}",
    ]  # fmt: skip
    for path in paths:
        text = page(address, path)
        assert "The console failed" not in text, path
        assert told(address, path)["title"], path
    (delays,) = told(address, f"/{env}/waiting/delays")["brokers"]
    (last,) = [one for one in delays["levels"] if one["level"] == 18]
    assert last["delayMs"] == 4_000  # a delay level of the tests' settings, which other tests may have used too
    assert last["delivered"] + last["waiting"] >= 2
    assert (delays["trouble"], delays["dueWithinS"]) == ("", None)
    assert (delays["timed"] is None) is (env == "old")
    halves = told(address, f"/{env}/waiting/transactions")["found"]
    assert halves["counts"]["new"] + halves["counts"]["asked"] + halves["counts"]["given up"] >= 1
    assert halves["troubles"] == {}
    pops = told(address, f"/{env}/waiting/pop")["found"]
    assert ("brokers before 5.0 have none" in str(pops["troubles"])) is (env == "old")
    store = told(address, f"/{env}/brokers/{BROKER_NAME}/store")["store"]
    # Apache's brokers do not report the oldest message while the log has less than 8 MiB.
    assert store["segmentCount"] and store["diskBytes"] and len(store["limits"]) == 3
    filtered = told(address, f"/{env}/filter?type=TAG&expression=x&topic={TOPIC}")["found"]
    assert [(one["wanted"], one["brokerSays"]) for one in filtered["tested"]] == [(False, False)] * 6
    (row,) = told(address, f"/{env}/brokers")["brokers"]
    assert row["addr"] == apache.broker_addr
    messages = told(address, f"{at}/messages")["messages"]
    assert [one["body"] for one in messages] == [f'{{"n": {n}}}' for n in range(5, -1, -1)]
    verdict = told(address, explained)
    assert verdict["explanation"]["cause"] == "no consumer online"
    assert [event["what"] for event in verdict["timeline"]][:2] == ["sent by its producer", f"stored in {TOPIC}"]
    settings = told(address, f"/{env}/brokers/{BROKER_NAME}/settings")["settings"]
    assert sum(row["isKnown"] for row in settings) > 50


def is_well(address: str) -> bool:
    """Return True if every cluster has been queried."""
    try:
        return bool(told(address, "/about")["isWell"])
    except urllib.error.HTTPError:
        return False


def page(address: str, path: str) -> str:
    """Return a page that answers 200, as HTML."""
    with urllib.request.urlopen(address + path, timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def told(address: str, path: str) -> dict[str, object]:
    """Return the same page as JSON."""
    found: dict[str, object] = json.loads(page(address, f"{path}{'&' if '?' in path else '?'}format=json"))
    return found
