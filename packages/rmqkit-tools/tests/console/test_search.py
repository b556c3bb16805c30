"""The search box of every page: names from the snapshot, messages by the index of topics that the user may read."""

from __future__ import annotations

from pathlib import Path

from rmqkit.admin.diagnosis.health import TopicState
from rmqkit.admin.messages.lookup import TOPICS_MAX
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from tests.admin.things import find_when_indexed, send
from tests.console.test_logins import shared_with_anna
from tests.console.test_pages import paths, shop

_READS = {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.QUERY_CONSUME_QUEUE}


async def test_every_page_has_the_box_as_a_plain_form(tmp_path: Path) -> None:
    async with shop(tmp_path) as (both, _, browser):
        for path in (*paths(both.broker.context.settings.broker_name), "/local/topics/Ordres"):
            page = (await browser.get(path)).text
            assert page.count('action="/local/search"') == (2 if path.startswith("/local/search") else 1), path
            assert 'id="search" type="search" name="q"' in page


async def test_an_exact_match_opens_its_page(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, _, browser):
        message = (await browser.json("/local/topics/Orders/messages?key=k3"))["messages"][0]
        place = f"/local/topics/Orders/at/{message['broker']}/{message['queue']}/{message['offset']}"
        shown = await browser.json(place)
        for text, expected in (
            ("Orders", "/local/topics/Orders"),
            ("billing", "/local/groups/billing"),
            ("k3", place),
            (message["msgId"], place),
            (shown["offsetId"], place),
        ):
            answer = await browser.get(f"/local/search?q={text}")
            assert (answer.status, answer.headers.get("location")) == (303, expected), answer.text


async def test_a_part_of_a_name_lists_what_has_it_by_kind(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, _, browser):
        found = await browser.json("/local/search?q=IL")
        assert {kind: one["names"] for kind, one in found["found"].items()} == {
            "topics": [], "groups": ["billing"], "clients": [],
        }  # fmt: skip
        page = (await browser.get("/local/search?q=IL")).text
        assert '<a href="/local/groups/billing">billing</a>' in page
        nothing = (await browser.get("/local/search?q=<b>")).text
        assert "Nothing is called &lt;b&gt;" in nothing
        assert "Type the whole id" in (await browser.get("/local/search")).text


async def test_several_messages_with_a_key_are_listed(tmp_path: Path) -> None:
    async with shared_with_anna(tmp_path) as (admin, console, browser):
        sent = await send(admin, *(Message(topic="Orders", body=b"b%d" % n, keys=["twice"]) for n in range(2)))
        await find_when_indexed(admin, "Orders", sent[-1].msg_id)
        console.envs["local"].watcher.refresh()
        await console.envs["local"].watcher.round()
        found = await browser.json("/local/search?q=twice")
        assert sorted(one["row"]["body"] for one in found["messages"]) == ["b0", "b1"]
        assert all(one["topic"] == "Orders" for one in found["messages"])


async def test_brokers_decide_what_a_user_finds(tmp_path: Path) -> None:
    async with shared_with_anna(tmp_path) as (admin, console, browser):
        (secret,) = await send(admin, Message(topic="Payments", body=b"secret", keys=["payment-1"]))
        await find_when_indexed(admin, "Payments", secret.msg_id)
        console.envs["local"].watcher.refresh()
        await console.envs["local"].watcher.round()
        for text in ("payment-1", secret.msg_id, secret.offset_msg_id):
            found = await browser.json(f"/local/search?q={text}")
            assert (found["messages"], found["refused"]) == ([], 1), text
            assert "You may not read 1 topics." in (await browser.get(f"/local/search?q={text}")).text


async def test_a_search_reads_no_queue_and_asks_a_bounded_number_of_topics(tmp_path: Path) -> None:
    async with shop(tmp_path) as (_, console, browser):
        watcher = console.envs["local"].watcher
        orders = watcher.snapshot.topics["Orders"]
        more = {f"T{number:03}": TopicState(name=f"T{number:03}", end=1) for number in range(TOPICS_MAX)}
        asked: list[int] = []
        watcher.snapshot.topics = {"Orders": orders} | more
        count = console.envs["local"].count

        def noted(address: str, command) -> None:
            asked.append(command.code)
            count(address, command)

        console.envs["local"].count = noted  # type: ignore[method-assign]
        found = await browser.json("/local/search?q=no-such-key")
        assert (found["asked"], found["left"], found["messages"]) == (TOPICS_MAX, 1, [])
        assert asked.count(RequestCode.QUERY_MESSAGE) == 1, "only Orders has a route"
        assert not _READS & set(asked)
