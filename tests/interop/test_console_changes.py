"""The web console changes an Apache cluster: topics, groups, offsets, settings, users, policies; and replays dead
letters of a consumer of ours. Each change is reviewed, done once, and refused if the object has changed in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from rmqkit import Message, Producer, PushConsumer, PushConsumerSettings, ReceivedMessage, StartFrom
from rmqkit.admin import Admin
from rmqkit.admin.messages.listing import page
from rmqkit.admin.pulls import Span
from rmqkit.console import Console
from rmqkit.console.jobs import Status
from tests.admin.things import send
from tests.console.asgi import Browser
from tests.console.test_changes import token_of
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair

pytestmark = pytest.mark.real_time

TOPIC, GROUP, REPLAYED, USER = "ConsoleChanged", "console-changed", "ConsoleReplayed", "console_anna"
SECONDS = 120
DEAD = 60


async def confirm(browser: Browser, path: str, form: dict[str, str], typed: str = "") -> None:
    """Fill in a form and confirm its review twice."""
    review = await browser.post(path, form)
    assert review.status == 200, (path, review.text)
    answers = [await browser.post(path, {"review": token_of(review), "typed": typed}) for _ in range(2)]
    said = [line for line in answers[0].text.splitlines() if "trouble" in line]
    assert [one.status for one in answers] == [200, 200], (path, said)
    assert answers[0].text == answers[1].text


async def fields(browser: Browser, path: str) -> dict[str, str]:
    return {one["name"]: one["value"] for one in (await browser.json(path))["fields"]}


async def test_forms_change_an_apache_cluster(apache: ApachePair) -> None:
    async with Admin(apache.namesrv_addr) as admin, Console({"apache": apache.namesrv_addr}) as console:
        browser = Browser(console)
        await console.envs["apache"].watcher.first(SECONDS)
        at, group = f"/apache/topics/{TOPIC}", f"/apache/groups/{GROUP}"
        given = await fields(browser, "/apache/new-topic")
        await confirm(browser, "/apache/new-topic", given | {"name": TOPIC, "read": "2", "write": "2", "type": "FIFO"})
        async with asyncio.timeout(SECONDS):
            while TOPIC not in await admin.calls.topic_names():
                await asyncio.sleep(0.1)
        given = await fields(browser, f"{at}/edit")
        assert (given["read"], given["type"]) == ("2", "FIFO")
        late = token_of(await browser.post(f"{at}/edit", given | {"perm": "2"}))
        await confirm(browser, f"{at}/edit", given | {"perm": "4"})
        config = (await admin.topics.config(TOPIC))[BROKER_NAME]
        assert (config.perm, (config.attributes or {}).get("message.type")) == (4, "FIFO")
        changed = await browser.post(f"{at}/edit", {"review": late})
        assert (changed.status, "6 → 4" in changed.text) == (409, True)
        await confirm(browser, f"{at}/edit", given | {"perm": "6"})

        given = await fields(browser, "/apache/new-group")
        await confirm(browser, "/apache/new-group", given | {"name": GROUP, "retry_max_times": "3"})
        given = await fields(browser, f"{group}/edit")
        await confirm(browser, f"{group}/edit", given | {"consume_broadcast_enable": "no"})
        settings = (await admin.groups.configs(GROUP))[BROKER_NAME]
        assert (settings.retry_max_times, settings.consume_broadcast_enable) == (3, False)

        async with asyncio.timeout(SECONDS):  # the broker registers a little later
            while (await admin.calls.route(TOPIC)).queue_datas[0].perm != 6:
                admin.calls.forget()
                await asyncio.sleep(0.1)
        await send(admin, *(Message(topic=TOPIC, body=b"x") for _ in range(6)))
        place = {"topic": TOPIC, "to": "place", "queue": f"{BROKER_NAME}:1", "offset": "1"}
        await confirm(browser, f"{group}/offsets", place)
        review = await browser.post(f"{group}/offsets", place | {"to": "end"}, {"accept": "application/json"})
        moves = {one["queueId"]: (one["now"], one["then"], one["skipped"]) for one in review.json()["moves"]}
        assert moves[1] == (1, 3, 2)
        await browser.post(f"{group}/offsets", {"review": review.json()["token"], "typed": GROUP})
        assert [one.diff for one in (await admin.groups.progress(GROUP, TOPIC)).queues] == [0, 0]
        await confirm(browser, f"{group}/offsets", place | {"to": "time", "time": "2020-01-01T00:00"})
        assert [one.diff for one in (await admin.groups.progress(GROUP, TOPIC)).queues] == [3, 3]

        path = f"/apache/brokers/{BROKER_NAME}/settings/edit?key=flushIntervalCommitLog"
        before = await fields(browser, path)
        key, _, value = before["settings"].partition("=")
        await confirm(browser, path, {"settings": f"{key}={int(value) + 7}"})
        assert (await fields(browser, path))["settings"] == f"{key}={int(value) + 7}"
        await confirm(browser, path, {"settings": f"{key}={value}"})

        user = {"name": USER, "secret": "secret-of-anna", "type": "Normal"}
        await confirm(browser, "/apache/new-user", user)
        policy = {"resource": "Topic:Orders", "actions.Sub": "1", "decision": "Allow", "networks": "10.0.0.0/8"}
        await confirm(browser, f"/apache/access/{USER}/policy", policy)
        await confirm(browser, f"/apache/access/{USER}/policy", policy | {"actions.Pub": "1"})
        await confirm(browser, f"/apache/access/{USER}/edit", {"secret": "", "type": "Normal", "status": "disable"})
        shown = await browser.json("/apache/access")
        (row,) = [one for one in shown["users"] if one["username"] == USER]
        assert row["userStatus"] == "disable"
        (said,) = [one for one in shown["policies"] if one["username"] == USER]
        assert (set(said["actions"].split(", ")), said["networks"]) == ({"Pub", "Sub"}, "10.0.0.0/8")
        await confirm(browser, f"/apache/access/{USER}/policy/delete?resource=Topic%3AOrders", {}, USER)
        await confirm(browser, f"/apache/access/{USER}/delete", {}, USER)
        assert USER not in {one.username for one in await admin.access.users()}

        await confirm(browser, f"{group}/delete", {}, GROUP)
        await confirm(browser, f"{at}/delete", {}, TOPIC)
        assert GROUP not in (await admin.groups.tables())[BROKER_NAME]
        assert TOPIC not in await admin.calls.topic_names()
        done = [line.action for line in console.audit.lines() if line.outcome == "done"]
        assert len(done) == len(console.audit.lines("intent")) - 1
        assert [line.action for line in console.audit.lines() if line.outcome == "refused"] == ["edit topic"]


async def test_dead_letters_at_apache_are_replayed(apache: ApachePair, tmp_path: Path) -> None:
    group, topic = "console-dying", "ConsoleDying"
    async with Admin(apache.namesrv_addr) as admin:
        for name in (topic, REPLAYED):
            await admin.topics.create(name, cluster=CLUSTER, read_queues=2, write_queues=2)
        await admin.groups.update(group, {"retry_max_times": 0}, cluster=CLUSTER)
        async with asyncio.timeout(SECONDS):
            while REPLAYED not in await admin.calls.topic_names():
                await asyncio.sleep(0.1)
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, retries_max=0, drain_ms=0)
        consumer = PushConsumer(group, apache.namesrv_addr, settings=settings)
        failed: set[str] = set()
        everything = asyncio.Event()

        @consumer.on(topic)
        async def fail(message: ReceivedMessage) -> None:
            failed.add(message.keys[0])
            if len(failed) == DEAD:
                everything.set()
            raise ValueError("no such account")

        async with Producer("console-dying-p", apache.namesrv_addr) as producer, consumer:
            for number in range(DEAD):
                tag = ("paid", "new", "late")[number % 3]
                await producer.send(Message(topic=topic, body=b'{"n": 1}', tags=tag, keys=[f"k{number}"]))
            async with asyncio.timeout(SECONDS):
                await everything.wait()
                while sum(one.count for one in await admin.dead.groups() if one.group == group) < DEAD:
                    await asyncio.sleep(0.1)
        async with Console({"apache": apache.namesrv_addr}, jobs=tmp_path) as console:
            browser, path = Browser(console), f"/apache/groups/{group}/dead"
            kinds = {one["kind"]: one["count"] for one in (await browser.json(path))["found"]["kinds"]}
            why = "ValueError: no such account"
            assert kinds == {f"{topic} · {tag} · {why}": DEAD // 3 for tag in ("paid", "new", "late")}
            review = await browser.post(path, {"to": REPLAYED, "rate": "10000", "begin": "", "end": ""})
            await browser.post(path, {"review": token_of(review)})
            (job,) = console.jobs.all()
            async with asyncio.timeout(SECONDS):
                while console.jobs.find(job.id).status is Status.RUNNING:
                    await asyncio.sleep(0.05)
            assert console.jobs.find(job.id).status is Status.DONE, console.jobs.find(job.id).why
            async with asyncio.timeout(SECONDS):
                while (await admin.topics.status(REPLAYED)).queues and sum(
                    one.max_offset for one in (await admin.topics.status(REPLAYED)).queues
                ) < DEAD:
                    await asyncio.sleep(0.1)
            found = Counter(one.keys[0] for one in (await page(admin.calls, REPLAYED, Span(), count=1000)).messages)
            assert found == {f"k{number}": 1 for number in range(DEAD)}
            assert len((await browser.get(f"/apache/jobs/{job.id}?download=1")).text.splitlines()) == DEAD
