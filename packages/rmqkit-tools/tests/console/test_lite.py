"""The pages of lite topics: the list below a parent, one lite topic, why a group gets nothing, a deletion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rmqkit.admin import Admin
from rmqkit.console import Console
from rmqkit.console.access.logins import Role, User
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.console.asgi import Browser, served
from tests.console.test_changes import token_of
from tests.console.test_chinese import left
from tests.console.test_pages import HOSTILE, Tree
from tests.console.test_texts import ZH

CHATS = "/local/topics/Chats"


@asynccontextmanager
async def chats(store: Path, **options: Any) -> AsyncIterator[tuple[Standalone, Console, Browser, Admin]]:
    """A parent topic with three lite topics, and a group that is bound to it."""
    async with served(store, **options) as (both, console, browser), Admin(both.namesrv_address) as admin:
        broker = both.broker.context.settings.broker_name
        attributes = "+message.type=LITE,+lite.topic.expiration=20"
        await admin.topics.create("Chats", read_queues=1, write_queues=1, attributes=attributes)
        await admin.groups.update("answers", {"attributes": {"+lite.bind.topic": "Chats"}})
        for name, bodies in (("s-1", ("hello", HOSTILE, "bye")), ("s-2", ("x",)), ("t-1", ("y",))):
            for body in bodies:
                message = Message(topic="Chats", body=body.encode(), lite_topic=name)
                await admin.messages.send(message, broker=broker, queue_id=0)
        await asyncio.sleep(61)  # virtual: the watcher's next look
        yield both, console, browser, admin


async def test_the_names_below_a_parent_are_listed_by_prefix_and_page_by_page(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rmqkit.console.views.lite.ROWS", 1)
    async with chats(tmp_path) as (_, _, browser, _):
        first = await browser.json(f"{CHATS}/lite?q=s-")
        assert [(one["liteTopic"], one["maxOffset"], one["consumerOffset"]) for one in first["rows"]] == [("s-1", 3, 0)]
        assert (first["total"], first["group"], first["nextAfter"]) == (3, "answers", "s-1")
        page = (await browser.get(f"{CHATS}/lite?q=s-")).text
        assert 'rel="next" href="/local/topics/Chats/lite?q=s-&amp;group=answers&amp;after=s-1"' in page
        second = await browser.json(f"{CHATS}/lite?q=s-&after=s-1")
        assert [one["liteTopic"] for one in second["rows"]] == ["s-2"]
        assert second["nextAfter"] == ""
        assert "First page" in (await browser.get(f"{CHATS}/lite?q=s-&after=s-1")).text


async def test_the_page_of_the_parent_leads_to_its_lite_topics(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, admin):
        assert f'href="{CHATS}/lite"' in (await browser.get(CHATS)).text
        await admin.topics.create("Plain")
        await asyncio.sleep(61)
        assert "/lite" not in (await browser.get("/local/topics/Plain")).text
        refused = await browser.get("/local/topics/Plain/lite")
        assert refused.status in (400, 404, 502)
        assert "type not match" in refused.text


async def test_one_lite_topic_shows_its_bounds_its_groups_and_its_newest_messages(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, admin):
        shown = await browser.json(f"{CHATS}/lite/s-1")
        (place,) = shown["places"]
        assert (place["state"], place["at"]["maxOffset"], place["at"]["epoch"]) == ("live", 3, 1)
        assert place["at"]["expiresAt"] == place["at"]["lastUpdateTimestamp"] + 20 * 60_000
        assert [(one["group"], one["lag"]) for one in shown["groups"]] == [("answers", 3)]
        assert [(one["number"], one["row"]["body"]) for one in shown["messages"]][::2] == [(2, "bye"), (0, "hello")]
        text = (await browser.get(f"{CHATS}/lite/s-1")).text
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        await admin.messages.send(Message(topic="Chats", body=b"new", lite_topic="s-1"), queue_id=0)
        assert (await browser.json(f"{CHATS}/lite/s-1"))["messages"][0]["number"] == 3


async def _next_live(events: asyncio.Queue[str]) -> str:
    while not (event := await events.get()).startswith("event: live"):
        pass
    return event


async def test_a_lite_topic_is_followed_live(tmp_path: Path) -> None:
    stream = f"/events?path={quote(f'{CHATS}/lite/s-1', safe='')}"
    async with chats(tmp_path) as (_, _, browser, admin), browser.stream(stream) as events:
        assert "hello" in await _next_live(events)
        await admin.messages.send(Message(topic="Chats", body=b"as it comes", lite_topic="s-1"), queue_id=0)
        assert "as it comes" in await _next_live(events)


async def test_an_unknown_name_is_shown_as_empty(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, _):
        answer = await browser.get(f"{CHATS}/lite/nothing")
        assert answer.status == 200
        assert "it was never written, has expired, or was deleted" in answer.text
        assert (await browser.get(f"{CHATS}/lite/a%24b")).status >= 400


async def test_a_group_that_gets_nothing_is_explained(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, _):
        path = f"{CHATS}/lite/s-1/explain"
        assert (await browser.json(path))["explanation"] is None
        found = (await browser.json(f"{path}?group=answers"))["explanation"]
        assert found["cause"] == "no client online"
        stored = (await browser.json(f"{path}?group=answers&number=7"))["explanation"]
        assert stored["cause"] == "not stored"
        by_message = await browser.json("/local/groups/answers/explain?topic=Chats&queue=0&offset=0")
        assert by_message["explanation"]["cause"] == "no client online"


async def test_a_lite_topic_is_deleted_after_its_name_was_typed(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, admin):
        path = f"{CHATS}/lite/s-1/delete"
        review = await browser.post(path, {})
        assert "DELETE_TOPIC_IN_BROKER (215) for %LMQ%$Chats$s-1" in review.text
        wrong = await browser.post(path, {"review": token_of(review), "typed": "s-2"})
        assert wrong.status == 400
        assert (await admin.lite.show("Chats", "s-1")).places[0].is_live
        done = await browser.post(path, {"review": token_of(wrong), "typed": "s-1"})
        assert "lite topic s-1 of Chats deleted" in done.text
        shown = await browser.json(f"{CHATS}/lite/s-1")
        assert (shown["places"][0]["state"], shown["messages"]) == ("expired", [])
        assert [one["liteTopic"] for one in (await browser.json(f"{CHATS}/lite"))["rows"]] == ["s-2", "t-1"]


async def test_a_lite_topic_that_began_its_next_life_is_not_deleted(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, admin):
        path = f"{CHATS}/lite/s-2/delete"
        review = await browser.post(path, {})
        await admin.lite.delete("Chats", "s-2")
        await admin.messages.send(Message(topic="Chats", body=b"new", lite_topic="s-2"), queue_id=0)
        answer = await browser.post(path, {"review": token_of(review), "typed": "s-2"})
        assert answer.status == 409
        assert (await admin.lite.show("Chats", "s-2")).places[0].epoch == 2


async def test_a_viewer_sees_names_but_neither_bodies_nor_a_deletion(tmp_path: Path) -> None:
    viewer = {"authorize": lambda request: User("anna", Role.VIEWER), "hide_bodies": True}
    async with chats(tmp_path, **viewer) as (_, _, browser, admin):
        text = (await browser.get(f"{CHATS}/lite/s-1")).text
        assert "hello" not in text
        assert "hidden" in text
        refused = await browser.post(f"{CHATS}/lite/s-1/delete", {})
        assert refused.status == 403
        assert (await admin.lite.show("Chats", "s-1")).places[0].is_live


async def test_the_pages_are_whole_html_and_have_no_english_sentence_in_chinese(tmp_path: Path) -> None:
    async with chats(tmp_path) as (_, _, browser, admin):
        await admin.lite.delete("Chats", "t-1")
        names = ("lite", "lite?q=zz", "lite/s-1", "lite/t-1", "lite/none", "lite/s-1/explain", "lite/s-1/delete")
        for name in (*names, "lite/s-1/explain?group=answers", "lite/t-1/explain?group=answers"):
            answer = await browser.get(f"{CHATS}/{name}")
            assert answer.status == 200, (name, answer.text[-1000:])
            tree = Tree(answer.text)
            assert (tree.faults, tree.open, tree.count("h1")) == ([], [], 1), name
            chinese = await browser.get(f"{CHATS}/{name}", ZH)
            assert left(chinese.text) == [], name
