"""Topics, groups, offsets, settings: form, review, confirmation. A change is made once. An outdated one is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rmqkit import Producer
from rmqkit.admin import Admin
from rmqkit.console.access.logins import Role, User
from rmqkit.console.request.routes import ROUTES
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.admin.things import send
from tests.console.asgi import Answer, Browser, served
from tests.console.test_changes import token_of

TOPIC = {
    "write": "4",
    "read": "4",
    "perm": "6",
    "type": "FIFO",
    "order": "no",
    "attributes": "",
    "where": "all brokers",
}


async def confirm(browser: Browser, path: str, form: dict[str, str], typed: str = "") -> Answer:
    """Fill in a form, and confirm its review."""
    review = await browser.post(path, form)
    assert review.status == 200, review.text
    return await browser.post(path, {"review": token_of(review), "typed": typed})


async def test_a_topic_shows_its_size_retention_and_producers(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=2, write_queues=2)
        async with Producer("web-shop", both.namesrv_address) as producer:
            for number in range(6):
                await producer.send("Orders", b"x" * (100 * number + 1))
            console.envs["local"].watcher.refresh()
            async with asyncio.timeout(90):
                while not any("web-shop" in one.produces for one in console.envs["local"].watcher.snapshot.clients):
                    await asyncio.sleep(1)
            shown = await browser.json("/local/topics/Orders")
            page = (await browser.get("/local/topics/Orders")).text
        (sender,) = shown["senders"]
        assert (sender["host"], sender["messages"], sender["groups"]) == ("127.0.0.1", 6, ["web-shop"])
        assert len(sender["clients"]) == 1
        assert 1_500 < shown["storedBytes"] < 4_000
        assert shown["reservedMs"] == 72 * 3_600_000
        before_raw = page.partition("As on the brokers")[0]
        assert "read queue nums" in page and "read queue nums" not in before_raw
        assert (await browser.json("/local/topics/Orders"))["senders"][0]["messages"] == 6


async def test_a_topic_is_made_edited_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        made = await confirm(browser, "/local/new-topic", TOPIC | {"name": "Orders"})
        assert "4 queues to read and 4 to write" in made.text
        (config,) = (await admin.topics.config("Orders")).values()
        assert (config.write_queue_nums, config.attributes) == (4, {"message.type": "FIFO"})
        again = await browser.post("/local/new-topic", TOPIC | {"name": "Orders"})
        assert (again.status, "is there already" in again.text) == (400, True)

        path = "/local/topics/Orders/edit"
        shown = await browser.json(path)
        assert {one["name"]: one["value"] for one in shown["fields"]}["type"] == "FIFO"
        await confirm(browser, path, TOPIC | {"write": "2", "perm": "4", "type": "", "attributes": "reserve.time=1"})
        (config,) = (await admin.topics.config("Orders")).values()
        assert (config.write_queue_nums, config.read_queue_nums, config.perm) == (2, 4, 4)
        assert config.attributes == {"reserve.time": "1"}
        same = await browser.post(path, TOPIC | {"write": "2", "perm": "4", "type": "", "attributes": "reserve.time=1"})
        assert "nothing is changed" in same.text

        path = "/local/topics/Orders/delete"
        review = await browser.post(path, {})
        token = token_of(review)
        wrong = await browser.post(path, {"review": token, "typed": "Order"})
        assert (wrong.status, "type Orders to confirm" in wrong.text) == (400, True)
        assert "Orders" in await admin.calls.topic_names()
        first, second = [await browser.post(path, {"review": token, "typed": "Orders"}) for _ in range(2)]
        assert (first.status, first.text == second.text) == (200, True)  # the topic is gone, the result is not
        assert "Orders" not in await admin.calls.topic_names()
        done = [(one.action, one.outcome) for one in console.audit.lines() if one.outcome == "done"]
        assert done == [("delete topic", "done"), ("edit topic", "done"), ("create topic", "done")]


async def test_a_double_click_changes_once(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, console, browser):
        token = token_of(await browser.post("/local/new-topic", TOPIC | {"name": "Orders"}))
        clicks = (browser.post("/local/new-topic", {"review": token}) for _ in range(2))
        first, second = await asyncio.gather(*clicks)
        assert (first.status, second.status) == (200, 200)
        assert first.text == second.text
        assert [one.outcome for one in console.audit.lines("create topic")] == ["done", "intent"]


async def test_what_changed_meanwhile_is_not_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=4, write_queues=4)
        await admin.groups.update("billing", {})
        topic = token_of(await browser.post("/local/topics/Orders/edit", TOPIC | {"write": "2"}))
        group = token_of(await browser.post("/local/groups/billing/delete", {}))
        await admin.topics.create("Orders", read_queues=8, write_queues=8)
        await admin.groups.update("billing", {"retry_max_times": 3})
        refused = await browser.post("/local/topics/Orders/edit", {"review": topic})
        assert refused.status == 409
        assert re.search(r"write queue nums at \S+: 4 → 8", refused.text)
        gone = await browser.post("/local/groups/billing/delete", {"review": group, "typed": "billing"})
        assert (gone.status, "16 → 3" in gone.text) == (409, True)
        (config,) = (await admin.topics.config("Orders")).values()
        assert config.write_queue_nums == 8
        assert [one.outcome for one in console.audit.lines("4 → 8")] == ["refused"]


UNUSABLE = [
    ("/local/new-topic", TOPIC | {"name": "a b"}, "illegal characters"),
    ("/local/new-topic", TOPIC | {"name": "T", "write": "many"}, "must be a whole number"),
    ("/local/new-topic", TOPIC | {"name": "T", "perm": "9"}, "must be one of"),
    ("/local/new-topic", TOPIC | {"name": "T", "where": "broker-x"}, "must be one of"),
    ("/local/new-topic", TOPIC | {"name": "T", "attributes": "x"}, "must be name=value"),
    ("/local/new-group", {"name": ""}, "is blank"),
    ("/local/groups/billing/offsets", {"topic": "", "to": "end"}, "name a topic"),
    ("/local/groups/billing/offsets", {"topic": "Orders", "to": "time", "time": "soon"}, "must be like"),
    ("/local/groups/billing/offsets", {"topic": "Orders", "to": "place", "queue": "b"}, "must be broker:number"),
    ("/local/groups/billing/offsets", {"topic": "Orders", "to": "up"}, "must be one of"),
    ("/local/groups/billing/offsets", {"topic": "Ordres", "to": "end"}, "no topic"),
    ("/local/name-servers/edit", {"settings": "noSuchKey=1"}, "has no setting noSuchKey"),
    ("/local/name-servers/edit", {"settings": ""}, "at least one setting"),
]


async def test_what_cannot_be_used_is_said_in_the_form(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders")
        await admin.groups.update("billing", {})
        for path, form, why in UNUSABLE:
            answer = await browser.post(path, form)
            assert (answer.status, why in answer.text) == (400, True), (path, why, answer.text)
        assert console.audit.lines() == []


async def test_a_group_is_made_edited_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        fields = {one["name"]: one["value"] for one in (await browser.json("/local/new-group"))["fields"]}
        await confirm(browser, "/local/new-group", fields | {"name": "billing", "retry_max_times": "3"})
        (config,) = (await admin.groups.configs("billing")).values()
        assert (config.retry_max_times, config.consume_enable) == (3, True)
        path = "/local/groups/billing/edit"
        fields = {one["name"]: one["value"] for one in (await browser.json(path))["fields"]}
        assert fields["retry_max_times"] == "3"
        review = await browser.post(path, fields | {"consume_enable": "no"})
        assert "True → False" in review.text
        await browser.post(path, {"review": token_of(review)})
        (config,) = (await admin.groups.configs("billing")).values()
        assert (config.retry_max_times, config.consume_enable) == (3, False)
        assert "nothing is changed" in (await browser.post(path, fields | {"consume_enable": "no"})).text
        await confirm(browser, "/local/groups/billing/delete", {}, "billing")
        assert "billing" not in (await admin.groups.tables())[both.broker.context.settings.broker_name]


async def test_offsets_are_shown_before_they_are_moved(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=2, write_queues=2)
        await admin.groups.update("billing", {})
        await admin.groups.update("copy", {})
        await send(admin, *(Message(topic="Orders", body=b"x") for _ in range(6)))
        broker, path = both.broker.context.settings.broker_name, "/local/groups/billing/offsets"

        async def now() -> list[int | None]:
            queues = (MessageQueue("Orders", broker, number) for number in (0, 1))
            address = both.broker_address
            return [await admin.calls.committed_offset(address, "billing", one, is_stored=True) for one in queues]

        form = {"topic": "Orders", "to": "place", "queue": f"{broker}:1", "offset": "2"}
        await confirm(browser, path, form)
        assert await now() == [None, 2]
        review = await browser.post(path, form | {"to": "end"})
        assert "1 messages will not be consumed" in review.text
        token = token_of(review)
        assert (await browser.post(path, {"review": token})).status == 400  # its name has to be typed
        assert await now() == [None, 2]
        await browser.post(path, {"review": token, "typed": "billing"})
        assert await now() == [3, 3]
        shown = await browser.post(
            path, form | {"to": "time", "time": "2020-01-01T00:00"}, {"accept": "application/json"}
        )
        moves = shown.json()["moves"]
        assert [(one["now"], one["then"], one["skipped"], one["again"]) for one in moves] == [(3, 0, 0, 3)] * 2
        assert shown.json()["typed"] == ""
        await browser.post(path, {"review": shown.json()["token"]})
        assert await now() == [0, 0]
        assert "nothing is moved" in (await browser.post(path, form | {"to": "time", "time": "2020-01-01T00:00"})).text
        await confirm(browser, "/local/groups/copy/offsets", {"topic": "Orders", "to": "clone", "source": "billing"})
        assert {one.consumer_offset for one in (await admin.groups.progress("copy")).queues} == {0}


async def test_settings_are_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        key, path = "allowBrokerTakeover", "/local/name-servers/edit?key=allowBrokerTakeover"
        assert f"name-servers/edit?key={key}" in (await browser.get("/local/name-servers")).text
        assert (await browser.json(path))["fields"][0]["value"] == f"{key}=false"
        assert "nothing is changed" in (await browser.post(path, {"settings": f"{key}=false"})).text
        assert console.audit.lines() == []
        review = await browser.post(path, {"settings": f"{key}=true"})
        assert "false → true" in review.text
        late = token_of(await browser.post(path, {"settings": f"{key}=true\nlistenPort=1"}))
        assert (await browser.post(path, {"review": token_of(review)})).status == 200
        assert (await admin.name_servers.config())[both.namesrv_address][key] == "true"
        changed = await browser.post(path, {"review": late})
        assert (changed.status, f"{key}: false → true" in changed.text) == (409, True)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_only_admins_get_a_review(tmp_path: Path, role: Role) -> None:
    """The users here are not the cluster's. Replays are sends, which operators may do."""
    user = User("vera", role)
    async with (
        served(tmp_path, authorize=lambda _: user) as (both, console, browser),
        Admin(both.namesrv_address) as admin,
    ):
        await admin.topics.create("T")
        await admin.groups.update("G", {})
        names = {"env": "local", "t": "T", "g": "G", "b": both.broker.context.settings.broker_name, "u": "U"}
        await console.envs["local"].watcher.first(10)
        for route in ROUTES:
            if route.posts and route.view.partition(":")[0] in ("changes", "access") and "{u}" not in route.path:
                answer = await browser.post(route.path.format(**names), {"name": "X"})
                assert answer.status == 403, route.path
                assert console.audit.lines()[0].outcome == "refused"
                assert (await browser.get(route.path.format(**names))).status == 200
