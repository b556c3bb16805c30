"""Pages over a real broker on virtual time: each as HTML and as JSON, empty and full, with hostile content."""

from __future__ import annotations

import asyncio
import html.parser
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.console import Console
from rmqkit.console.html import render
from rmqkit.console.request.routes import ROUTES
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from tests.admin.things import send
from tests.console.asgi import Browser, served

HOSTILE = "<script>alert(1)</script>\u202e"
VOID = {"meta", "link", "input", "br", "img", "line", "circle", "polyline", "hr", "wbr"}


class Tree(html.parser.HTMLParser):
    """Checks that a page's elements are closed in order, and notes what is in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in ("p", "li", "option", "dt", "dd"):
            self.open.pop()
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing at {self.getpos()}")

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.seen)


@asynccontextmanager
async def shop(store: Path) -> AsyncIterator[tuple[Standalone, Console, Browser]]:
    """Orders with 12 messages, hostile ones among them, a group that is behind, and one that is not online."""
    async with served(store) as (both, console, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=2, write_queues=2)
        await admin.groups.update("billing", {})
        messages = [Message(topic="Orders", body=b'{"order": %d}' % n, tags="new", keys=[f"k{n}"]) for n in range(10)]
        messages.append(Message(topic="Orders", body=HOSTILE.encode(), tags=HOSTILE, properties={"x": HOSTILE}))
        messages.append(Message(topic="Orders", body=bytes(range(256))))
        await send(admin, *messages)
        address = await admin.calls.address(both.broker.context.settings.broker_name)
        queue = MessageQueue("Orders", both.broker.context.settings.broker_name, 0)
        await admin.calls.commit_offset(address, "billing", queue, 2)
        await asyncio.sleep(61)  # virtual: the watcher's next round, while nobody looks
        yield both, console, browser


def paths(broker: str) -> list[str]:
    """Every page of the shop."""
    at = "/local"
    return [
        f"{at}/", f"{at}/topics", f"{at}/topics?kind=system&sort=queues", f"{at}/topics/Orders",
        f"{at}/topics/Orders/messages", f"{at}/topics/Orders/messages?order=oldest&tags=new",
        f"{at}/topics/Orders/messages?key=k3", f"{at}/topics/Orders/tail", f"{at}/topics/Orders/send",
        f"{at}/topics/Orders/at/{broker}/0/0", f"{at}/topics/Orders/at/{broker}/0/5",
        f"{at}/topics/Orders/at/{broker}/1/5",
        f"{at}/groups", f"{at}/groups/billing", f"{at}/groups/billing/explain",
        f"{at}/groups/billing/explain?topic=Orders&key=k3", f"{at}/brokers", f"{at}/brokers/{broker}",
        f"{at}/brokers/{broker}/settings", f"{at}/brokers/{broker}/store",
        f"{at}/brokers/{broker}/settings?only=changed", f"{at}/name-servers",
        f"{at}/ha", f"{at}/clients", f"{at}/waiting/delays",
        f"{at}/filter", f"{at}/filter?expression=a+%3E+5&properties=a%3D7", f"{at}/filter?expression=%28&properties=a",
        f"{at}/filter?expression=new&type=TAG&topic=Orders",
        f"{at}/waiting/transactions", f"{at}/waiting/pop", "/audit", "/about", "/login",
    ]  # fmt: skip


async def test_every_page_is_whole_html_and_has_the_same_as_json(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser):
        broker = both.broker.context.settings.broker_name
        for path in paths(broker):
            answer = await browser.get(path)
            assert answer.status == 200, (path, answer.text[-2000:])
            tree = Tree(answer.text)
            assert (tree.faults, tree.open) == ([], []), path
            assert tree.count("h1") == 1, path
            assert tree.count("main") == 1, path
            assert not [attrs for _, attrs in tree.seen if "style" in attrs or any(a.startswith("on") for a in attrs)]
            assert not re.search(r"<script(?! type=\"module\" src=)", answer.text), path
            values = await browser.json(path)
            assert values["title"], path


async def test_hostile_texts_are_shown_and_not_run(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser):
        broker = both.broker.context.settings.broker_name
        at = "/local/topics/Orders"
        for path in (f"{at}/at/{broker}/0/5", f"{at}/messages", f"{at}/tail"):
            text = (await browser.get(path)).text
            assert "<script>alert" not in text, path
            assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text, path
            assert "\u202e" not in text, path
            assert "\\u202e" in text, path
        binary = await browser.json(f"/local/topics/Orders/at/{broker}/1/5")
        assert binary["body"]["form"] == "hex"
        assert binary["body"]["text"].startswith("000000  00 01 02")


def test_long_names_break_between_their_words() -> None:
    for text, shown in [
        ("diskSpaceCleanForciblyRatio", "disk<wbr>Space<wbr>Clean<wbr>Forcibly<wbr>Ratio"),
        ("10.0.0.1@7#179", "10.<wbr>0.<wbr>0.<wbr>1@<wbr>7#<wbr>179"),
        ("PROP_CONSUME_TYPE", "PROP_<wbr>CONSUME_<wbr>TYPE"),
        ("<b>\u202e", "&lt;b&gt;\\u202e"),
        ("", ""),
    ]:
        assert render.breakable(text) == shown


async def test_a_filter_of_a_name_is_only_text(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, browser):
        text = (await browser.get("/local/topics?q=%22%3E%3Cscript%3E")).text
        assert "<script>" not in text.replace("<script type", "")
        assert "0 of" in text


async def test_lists_ask_no_broker(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, console, browser):
        env = console.envs["local"]
        await env.watcher.close()  # what it asks in its rounds is not a page's
        lists = ("", "topics", "groups", "brokers", "ha", "clients", "topics?q=O&sort=lag", "groups?page=2")
        before = {address: cost.requests for address, cost in env.costs.items()}
        for path in lists:
            assert (await browser.get(f"/local/{path}")).status == 200
        assert {address: cost.requests for address, cost in env.costs.items()} == before


async def test_a_topic_costs_few_requests(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, console, browser):
        env = console.envs["local"]
        await env.watcher.close()
        cost = env.costs[both.broker_address]
        before = cost.requests
        await browser.get("/local/topics/Orders")
        # Status, groups, settings, retention; for the producers: where queues end, and a pull of each of two queues.
        assert cost.requests - before <= 7
        before = cost.requests
        await browser.get(f"/local/topics/Orders/at/{both.broker.context.settings.broker_name}/0/0")
        assert cost.requests - before <= 36


async def test_the_overview_reports_a_lag_and_a_group_without_members(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, _, browser):
        values = await browser.json("/local/")
        assert values["totals"]["lag"] == 10
        assert [(one["name"], one["lag"], one["members"]) for one in values["worst"]] == [("billing", 10, 0)]
        groups = (await browser.json("/local/groups"))["groups"]
        assert groups["rows"][0]["topics"] == ["Orders"]


async def test_the_same_figures_as_the_command_line(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        progress = await admin.groups.progress("billing")
        values = await browser.json("/local/groups/billing")
        assert values["lag"] == progress.diff_total
        assert [one["diff"] for one in values["queues"]] == [one.diff for one in progress.queues]
        status = await admin.topics.status("Orders")
        page = await browser.json("/local/topics/Orders")
        assert [one["maxOffset"] for one in page["queues"]] == [one.max_offset for one in status.queues]


async def test_messages_continue_where_the_page_stopped(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Many", read_queues=2, write_queues=2)
        await send(admin, *(Message(topic="Many", body=b"%d" % n) for n in range(70)))
        first = await browser.json("/local/topics/Many/messages")
        assert [one["body"] for one in first["messages"]] == [str(n) for n in range(69, 19, -1)]
        assert first["stopped"] == "count"
        more = await browser.json(f"/local/topics/Many/messages?cursor={first['cursor']}")
        assert [one["body"] for one in more["messages"]] == [str(n) for n in range(19, -1, -1)]
        assert (more["stopped"], more["cursor"]) == ("end", "")
        assert "Continue" in (await browser.get("/local/topics/Many/messages?order=oldest")).text
        assert (await browser.get("/local/topics/Many/messages?cursor=nonsense")).status == 400


async def test_messages_are_saved_as_files(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, _, browser):
        lines = await browser.get("/local/topics/Orders/messages?format=jsonl")
        assert lines.headers["content-disposition"] == 'attachment; filename="Orders.jsonl"'
        assert len(lines.body.splitlines()) == 12
        table = await browser.get("/local/topics/Orders/messages?format=csv&key=k3")
        assert table.text.splitlines()[0] == "store time,broker,queue,offset,id,tags,keys,body"
        assert "k3" in table.text.splitlines()[1]


async def test_a_body_can_be_downloaded_whole(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser):
        answer = await browser.get(f"/local/topics/Orders/at/{both.broker.context.settings.broker_name}/1/5?download=1")
        assert answer.body == bytes(range(256))
        assert answer.headers["content-type"] == "application/octet-stream"


async def test_hidden_bodies_are_nowhere(tmp_path: Path) -> None:
    async with served(tmp_path, hide_all_bodies=True) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Secret", read_queues=1, write_queues=1)
        await send(admin, Message(topic="Secret", body=b"the password"))
        at = f"/local/topics/Secret/at/{both.broker.context.settings.broker_name}/0/0"
        lists = [
            f"/local/topics/Secret/{page}"
            for page in ("messages", "tail", "messages?format=jsonl", "messages?format=csv")
        ]
        for path in (at, f"{at}?format=json", *lists):
            assert "the password" not in (await browser.get(path)).text, path
        assert (await browser.get(f"{at}?download=1")).status == 403


@pytest.mark.parametrize("hides", [False, True])
async def test_a_dead_letter_says_why_unless_bodies_are_hidden(hides: bool, tmp_path: Path) -> None:
    reason = {"rmqkit_reason": "ValueError: no card 4711", "rmqkit_handler": "shop.bill", "rmqkit_tries": "17"}
    trace = {"rmqkit_traceback": "Traceback (most recent call last):\n  <in bill>\nValueError: no card 4711"}
    async with served(tmp_path, hide_all_bodies=hides) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("%DLQ%billing", read_queues=1, write_queues=1)
        await send(admin, Message(topic="%DLQ%billing", body=b"dead", properties=reason | trace))
        at = f"/local/topics/%25DLQ%25billing/at/{both.broker.context.settings.broker_name}/0/0"
        shown = (await browser.get(at)).text
        found = await browser.json(at)
    assert "Why it is a dead letter" in shown
    assert "shop.bill" in shown
    assert ("4711" not in shown) is hides
    assert ("&lt;in bill&gt;\nValueError: no card 4711</pre>" in shown) is not hides
    assert found["why"]["tries"] == "17"
    assert (found["why"]["traceback"] == trace["rmqkit_traceback"]) is not hides


async def test_a_name_that_is_not_there_is_404_with_the_nearest(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, _, browser):
        answer = await browser.get("/local/topics/Ordres")
        assert answer.status == 404
        assert 'href="/local/topics/Orders"' in answer.text
        assert (await browser.get("/local/groups/biling")).status == 404
        assert (await browser.get("/local/brokers/nobody")).status == 404
        assert (await browser.get("/elsewhere/topics")).status == 404
        assert (await browser.get("/local/nothing")).status == 404
        assert (await browser.get("/local/topics/Orders/messages?from=yesterday")).status == 400


async def test_retry_and_dead_letter_topics_have_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("%DLQ%billing", read_queues=1, write_queues=1)
        await send(admin, Message(topic="%DLQ%billing", body=b"dead"))
        page = await browser.get("/local/topics/%25DLQ%25billing/messages")
        assert page.status == 200
        assert f'href="/local/topics/%25DLQ%25billing/at/{both.broker.context.settings.broker_name}/0/0"' in page.text


async def test_settings_are_explained(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, browser):
        values = await browser.json("/local/name-servers")
        rows = {row["key"]: row for row in values["settings"]}
        assert rows["listenPort"]["isKnown"]
        assert rows["listenPort"]["help"]


async def test_without_a_name_server_pages_say_so() -> None:
    console = Console("127.0.0.1:1")
    async with console:
        browser = Browser(console)
        overview = await browser.get("/local/")
        assert overview.status == 200
        assert "not fresh" in overview.text
        assert (await browser.get("/local/topics/Orders")).status == 502
        about = await browser.get("/about?format=json")
        assert (about.status, about.json()["isWell"]) == (503, False)


async def test_several_clusters_have_addresses_of_their_own(tmp_path: Path) -> None:
    async with (
        Standalone(tmp_path / "a") as one,
        Standalone(tmp_path / "b") as other,
        Console({"shop": one.namesrv_address, "bank": other.namesrv_address}) as console,
    ):
        browser = Browser(console)
        assert 'href="/shop/"' in (await browser.get("/")).text
        for name, both in (("shop", one), ("bank", other)):
            brokers = (await browser.json(f"/{name}/brokers"))["brokers"]
            assert [row["addr"] for row in brokers] == [both.broker_address]


async def test_mounted_below_a_path_every_link_has_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, console, _):
        browser = Browser(console, root="/rmq")
        text = (await browser.get("/rmq/local/topics")).text
        links = set(re.findall(r'(?:href|src|action|data-events)="(/[^"]*)"', text))
        assert links
        assert all(link.startswith("/rmq/") for link in links), sorted(links)


def test_no_route_is_reported_twice_and_each_has_a_line() -> None:
    assert len({route.path for route in ROUTES}) == len(ROUTES)
    assert all(route.about.endswith((".", "…")) for route in ROUTES)
