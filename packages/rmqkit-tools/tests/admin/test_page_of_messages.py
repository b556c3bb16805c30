"""One page of a topic's messages with a budget: order, filters, where it stops, and the cursor. On virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.admin.messages.listing import Budget, Page, page
from rmqkit.admin.pulls import Span
from rmqkit.errors import ClientError, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.admin.things import send

COUNT = 100


@asynccontextmanager
async def topic(store: Path, asked: Counter[int] | None = None, count: int = COUNT) -> AsyncIterator[Admin]:
    """A topic of three queues with so many messages, numbered as they were stored; each tenth has the tag ten."""

    def guard(_: str, command: Command) -> None:
        if asked is not None:
            asked[command.code] += 1

    async with Standalone(store) as both, Admin(both.namesrv_address, guard=guard) as admin:
        await admin.topics.create("T", read_queues=3, write_queues=3)
        messages = [
            Message(topic="T", body=b"%d" % n, tags="ten" if n % 10 == 0 else "other", properties={"n": str(n)})
            for n in range(count)
        ]
        await send(admin, *messages)
        if asked is not None:
            asked.clear()
        yield admin


def numbers(found: Page) -> list[int]:
    return [int(one.body) for one in found.messages]


@pytest.mark.parametrize("newest_first", [True, False])
async def test_pages_follow_each_other_without_a_gap(tmp_path: Path, newest_first: bool) -> None:
    async with topic(tmp_path) as admin:
        seen, cursor = [], ""
        while True:
            found = await page(admin.calls, "T", Span(), newest_first=newest_first, count=17, cursor=cursor)
            seen += numbers(found)
            cursor = found.cursor
            if not cursor:
                break
        assert seen == (list(range(COUNT))[::-1] if newest_first else list(range(COUNT)))
        assert (found.stopped, found.examined) == ("end", COUNT % 17)


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize(
    "span", [Span(tags="ten"), Span(sql="n in ('0','10','20','30','40','50','60','70','80','90')")]
)
async def test_filters_are_applied_to_what_was_read(tmp_path: Path, newest_first: bool, span: Span) -> None:
    async with topic(tmp_path) as admin:
        found = await page(admin.calls, "T", span, newest_first=newest_first)
        assert numbers(found) == sorted(range(0, COUNT, 10), reverse=newest_first)
        assert (found.examined, found.total) == (COUNT, COUNT)


async def test_a_search_without_a_match_stops_at_its_budget_and_continues(tmp_path: Path) -> None:
    asked: Counter[int] = Counter()
    async with topic(tmp_path, asked) as admin:
        budget, cursor, rounds = Budget(messages=30), "", 0
        while True:
            found = await page(admin.calls, "T", Span(tags="none"), cursor=cursor, budget=budget)
            rounds += 1
            assert found.examined <= 30
            assert found.messages == []
            cursor = found.cursor
            if not cursor:
                break
            assert found.stopped == "messages"
            assert found.reached_ms
        assert rounds == 4
        assert asked[RequestCode.GET_TOPIC_STATS_INFO] == rounds
        assert asked[RequestCode.SEARCH_OFFSET_BY_TIMESTAMP] == 0


async def test_bytes_and_time_are_budgets_too(tmp_path: Path) -> None:
    async with topic(tmp_path) as admin:
        found = await page(admin.calls, "T", Span(), budget=Budget(body_bytes=20))
        assert (found.stopped, found.examined) == ("bytes", 10)
        late = await page(admin.calls, "T", Span(), budget=Budget(ms=0))
        assert (late.stopped, late.messages) == ("time", [])
        again = await page(admin.calls, "T", Span(), cursor=late.cursor)
        assert len(again.messages) == 50


async def test_a_queue_an_offset_and_a_time(tmp_path: Path) -> None:
    async with topic(tmp_path) as admin:
        found = await page(admin.calls, "T", Span(queue_id=1, begin_offset=30), newest_first=False)
        assert numbers(found) == [91, 94, 97]
        (first, *_, last) = (await page(admin.calls, "T", Span(), newest_first=False, count=COUNT)).messages
        within = await page(admin.calls, "T", Span(begin_ms=last.store_timestamp, end_ms=last.store_timestamp))
        assert last.msg_id in [one.msg_id for one in within.messages]
        before = await page(admin.calls, "T", Span(end_ms=first.store_timestamp - 1))
        assert before.messages == []


async def test_an_empty_topic_and_what_is_not_there(tmp_path: Path) -> None:
    async with topic(tmp_path, count=1) as admin:
        await admin.topics.create("Empty", read_queues=1, write_queues=1)
        empty = await page(admin.calls, "Empty", Span())
        assert (empty, list(empty.ends.values())) == (Page(messages=[], ends=empty.ends), [0])
        with pytest.raises(UnknownName):
            await page(admin.calls, "Nowhere", Span())
        with pytest.raises(ClientError):
            await page(admin.calls, "T", Span(queue_id=9))
        for cursor in ("x", "AAAA", "eJwDAAAAAAE"):
            with pytest.raises(SettingsError, match="is not one of this list"):
                await page(admin.calls, "T", Span(), cursor=cursor)
        with pytest.raises(SettingsError):
            await page(admin.calls, "T", Span(sql="this is no SQL"))
