"""Refreshes and tails as server-sent events. On virtual time."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.console.request.live import TAILS_A_USER, _event, offsets_of, offsets_text
from rmqkit.protocol.message import Message
from tests.admin.things import send
from tests.client.peers import SECONDS
from tests.console.asgi import served


async def after(events: asyncio.Queue[str], name: str) -> str:
    """The next event of a name."""
    async with asyncio.timeout(SECONDS):
        while True:
            event = await events.get()
            if event.startswith(f"event: {name}\n"):
                return event


async def test_a_region_is_sent_when_it_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        async with browser.stream("/events?path=%2Flocal%2Ftopics") as events:
            first = await after(events, "live")
            assert "New-Topic" not in first
            await admin.topics.create("New-Topic")
            assert "New-Topic" in await after(events, "live")
            assert console.streams["page"] == 1
        assert console.streams["page"] == 0  # the browser went away


async def test_a_console_that_ends_ends_streams(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders")
        tail = browser.stream("/local/topics/Orders/tail/events")
        async with browser.stream("/events?path=%2Flocal%2Ftopics") as events, tail as rows:
            await after(events, "live")
            await after(rows, "status")
            assert (console.streams["page"], console.streams["tail"]) == (1, 1)
            began = asyncio.get_running_loop().time()
            console.ending.set()
            while console.streams["page"] or console.streams["tail"]:
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - began < 0.5


async def test_a_page_that_does_not_refresh_has_no_stream(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, browser):
        for path in ("%2Flocal%2Ftopics%2FOrders%2Fsend", "%2Fnowhere", "%2Fevents", ""):
            assert (await browser.get(f"/events?path={path}")).status == 404


async def test_pages_refresh_as_the_table_of_addresses_says_and_answers_of_forms_do_not(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await send(admin, Message(topic="Orders", body=b"x"))
        await admin.topics.status("Orders")
        place = f"/local/topics/Orders/at/{both.broker.context.settings.broker_name}/0/0"
        for path, refreshes in (("/local/groups", True), ("/about", True), ("/local/access", False)):
            page = await browser.get(path)
            assert ('id="pause"' in page.text, "data-events" in page.text) == (refreshes, refreshes), path
        review = await browser.post(place, {"action": "resend"})
        assert (review.status, "data-events" in review.text, 'id="pause"' in review.text) == (200, False, False)


async def test_rows_come_as_messages_are_stored(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        async with browser.stream("/local/topics/Orders/tail/events?tags=new") as events:
            await after(events, "status")
            await asyncio.sleep(5)
            await send(admin, Message(topic="Orders", body=b"<b>one", tags="new"), Message(topic="Orders", body=b"two"))
            rows = await after(events, "rows")
            assert "&lt;b&gt;one" in rows
            assert "two" not in rows
            assert console.streams["tail local"] == 1
        assert console.streams["tail local"] == 0


async def test_what_is_more_than_fifty_a_second_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        async with browser.stream("/local/topics/Orders/tail/events") as events:
            await after(events, "status")
            await asyncio.sleep(5)
            await asyncio.gather(*(admin.messages.send(Message(topic="Orders", body=b"x")) for _ in range(80)))
            shown = 0
            while True:
                event = await events.get()
                shown += event.count("<tr>")
                if event.startswith("event: dropped"):
                    break
            assert shown <= 79
            assert int(event.split("data: ")[1]) >= 1


async def test_the_stream_of_a_tail_starts_after_the_rows_of_its_page(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=2, write_queues=2)  # of one queue nothing is stored yet

        async def store(*numbers: int) -> None:
            for number in numbers:
                await send(admin, Message(topic="Orders", body=b"body-%d-" % number))

        await store(1, 2)
        page = (await browser.get("/local/topics/Orders/tail")).text
        stream = html.unescape(page.split('data-stream="')[1].split('"')[0])
        await store(3, 4)  # between the page and the stream
        async with browser.stream(stream) as events:
            rows = await after(events, "rows")
            await store(5)
            event = await after(events, "rows")
            last_id = event.split("id: ")[1].split("\n")[0]
        seen = [int(number) for number in re.findall(r"body-(\d)-", page + rows + event)]
        assert sorted(seen) == [1, 2, 3, 4, 5], "each of them once"
        await store(6)
        async with browser.stream(stream, {"last-event-id": last_id}) as events:  # as after a lost connection
            assert re.findall(r"body-(\d)-", await after(events, "rows")) == ["6"]


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("broker-a:0=5,b=c:1=7", {"broker-a:0": 5, "b=c:1": 7}),
        ("", {}),
        ("=5,a:0=,a:0=-1,a:0=x,a:0=1234567890123456789", {}),
    ],
)
def test_offsets_in_addresses(text: str, offsets: dict[str, int]) -> None:
    assert offsets_of(text) == offsets
    assert offsets_of(offsets_text(offsets)) == offsets


def test_more_queues_than_an_address_has_room_for() -> None:
    assert offsets_text({f"b:{number}": 1 for number in range(64)})
    assert offsets_text({f"b:{number}": 1 for number in range(65)}) == ""


async def test_one_user_has_five_tails(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        path = "/local/topics/Orders/tail/events"
        streams = [browser.stream(path) for _ in range(TAILS_A_USER)]
        for one in streams:
            await after(await one.__aenter__(), "status")
        async with browser.stream(path) as events:
            assert await events.get() == "status 429"
        for one in streams:
            await one.__aexit__(None, None, None)
        assert (await browser.get("/local/topics/Nowhere/tail/events")).status == 404


def test_no_text_begins_a_field_of_its_own() -> None:
    assert _event("rows", "key\rid: 9\r\nb\nc") == b"event: rows\ndata: key\ndata: id: 9\ndata: b\ndata: c\n\n"
