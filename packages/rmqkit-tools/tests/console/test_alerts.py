"""Alerts: rules that fire and resolve, notifications, receivers that are down or hostile; pages, files."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from apprise.decorators import notify as apprise_service
from msgspec import Struct, field

from rmqkit.admin.diagnosis.health import Snapshot
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console import Console
from rmqkit.console.access.logins import Role, User
from rmqkit.console.alerts.channels import ANSWER_S, Channel, Event, deliver
from rmqkit.console.alerts.rules import Alerts, Rule
from rmqkit.errors import SettingsError
from tests.console.asgi import Answer, Browser, served
from tests.console.test_history import START, At, snapshot
from tests.ports import HOST, free_port, silent_port

SECRET = "the-secret-of-the-hook"
LAG = Rule(name="lag", figure="lag", selector="g*", value=100, samples=2, channel="hook")
DISK = Rule(name="disk", figure="disk", value=0.8, samples=2, channel="hook")
SLAVE = Rule(name="slave", figure="slave", selector="b@*", value=1 << 20, samples=2, channel="hook")


class Receiver(Struct):
    """A webhook's other side on loopback, always on the same port: what it got, and what it answers."""

    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    port: int = field(default_factory=free_port)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    server: Any = None
    hangs: bool = False

    async def open(self) -> None:
        self.server = await asyncio.start_server(self.serve, HOST, self.port)

    async def close(self) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self.got.append((first, headers, await reader.readexactly(int(headers["content-length"]))))
            if self.hangs:
                await reader.read()
            writer.write(self.answer)
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.got]

    def channel(self) -> Channel:
        return Channel(name="hook", url=f"http://127.0.0.1:{self.port}/in?key=k-e-y", secret=SECRET)

    def service(self) -> Channel:
        """A service of apprise that posts JSON to a host of one's own."""
        return Channel(name="hook", url=f"json://anna:p-a-s-s@127.0.0.1:{self.port}/k-e-y?+X-Token=t-o-k-e-n")


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    await receiver.open()
    try:
        yield receiver
    finally:
        await receiver.close()


@asynccontextmanager
async def running(path: Path | None, receiver: Receiver, *rules: Rule) -> AsyncIterator[Alerts]:
    found = Alerts("local", path, SYSTEM_CLOCK)
    found.start()
    await found.put_channel(receiver.channel())
    for rule in rules:
        await found.put_rule(rule)
    try:
        yield found
    finally:
        await found.close()


async def looks(found: Alerts, *shots: dict[str, Any]) -> None:
    """Snapshots, 10 s apart."""
    for shot in shots:
        found.look(snapshot(SYSTEM_CLOCK.now_ms(), **shot))
        await asyncio.sleep(10)


# -- rules


async def test_a_lag_a_disk_and_a_slave_rule_fire_and_resolve_once_each(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path / "alerts.json", receiver, LAG, DISK, SLAVE) as found:
        bad = {"lag": 12_345, "disk": 0.91, "diff": 5 << 20}
        await looks(found, {}, bad, {}, *[bad] * 4, *[{}] * 4)  # the first bad one alone is no alert
        assert sorted((one["state"], one["rule"]) for one in receiver.events) == [
            (state, rule) for state in ("firing", "resolved") for rule in ("disk", "lag", "slave")
        ]
        for first, headers, body in receiver.got:
            assert first == "POST /in?key=k-e-y HTTP/1.1"
            signed = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
            assert headers["x-rmq-signature"] == signed
            event = json.loads(body)
            assert headers["x-rmq-delivery"] == f"{event['id']}-{event['state']}"
        ids = {one["rule"]: one["id"] for one in receiver.events}
        assert len(set(ids.values())) == 3
        assert all(ids[one["rule"]] == one["id"] for one in receiver.events)  # firing and resolved have one id
        lag = next(one for one in receiver.events if one["rule"] == "lag")
        assert (lag["target"], lag["value"], lag["limit"], lag["operator"]) == ("g", 12_345, 100, ">")
        assert lag["text"].startswith("FIRING lag: Lag of group g is 12,345 (limit > 100) in cluster local since ")
        assert lag["page"] == "/local/groups/g"
        assert found.alerts == {}


async def test_unknown_figures_fire_nothing_and_resolve_nothing() -> None:
    async with receiving() as receiver, running(None, receiver, LAG, DISK) as found:
        silent = {"trouble": "no answer within 3 s", "lag": 9_999, "disk": 0.99}
        await looks(found, *[silent] * 5)
        assert receiver.got == []
        await looks(found, {"lag": 500}, {"lag": 500}, *[silent] * 5)
        assert [one["state"] for one in receiver.events] == ["firing"]
        assert [one.state for one in found.alerts.values()] == ["firing"]


async def test_a_broker_that_is_gone_fires_also_when_name_servers_forgot_it() -> None:
    gone = Rule(name="gone", figure="gone", value=35, samples=1, channel="hook")
    async with receiving() as receiver, running(None, receiver, gone) as found:
        await looks(found, {})
        for _ in range(5):
            found.look(Snapshot(at_ms=SYSTEM_CLOCK.now_ms()))
            await asyncio.sleep(10)
        ((state, target, seconds),) = [(one["state"], one["target"], one["value"]) for one in receiver.events]
        assert (state, target) == ("firing", "b")
        assert round(seconds) == 40, "turns of the loop count, too: the least part of a second"
        await looks(found, {}, {})
        assert [one["state"] for one in receiver.events] == ["firing", "resolved"]


async def test_dead_letters_of_an_hour() -> None:
    rule = Rule(name="dead", figure="growth", value=10, operator=">=", samples=1)
    found, at = Alerts("local", None, At()), START
    await found.put_rule(rule)
    for minute, grew in ((0, 0), (30, 9), (59, 10), (61, 10), (95, 10)):
        shot = snapshot(at + minute * 60_000)
        shot.groups["g"].dead_grew = grew
        found.look(shot)
        state = [one.state for one in found.alerts.values()]
        assert state == (["firing"] if minute in (59, 61) else []), minute


async def test_a_deleted_group_is_resolved_after_an_hour() -> None:
    found = Alerts("local", None, At())
    await found.put_rule(Rule(name="lag", figure="lag", value=100, samples=1))
    found.look(snapshot(START, lag=500))
    for minute in (1, 59, 61):
        shot = snapshot(START + minute * 60_000)
        shot.groups.clear()
        found.look(shot)
        assert bool(found.alerts) == (minute < 60)
    assert "no broker has reported it for an hour" in found.happened[-1].text


async def test_while_a_rule_is_silent_nothing_is_sent() -> None:
    async with receiving() as receiver, running(None, receiver, LAG) as found:
        until = SYSTEM_CLOCK.now_ms() + 65_000
        await found.put_rule(Rule(**{**{f: getattr(LAG, f) for f in LAG.__struct_fields__}, "silent_until_ms": until}))
        await looks(found, *[{"lag": 500}] * 6)
        assert receiver.got == []
        assert [one.state for one in found.alerts.values()] == ["firing"]
        await looks(found, *[{"lag": 500}] * 2)  # it is over, and it still fires
        assert [one["state"] for one in receiver.events] == ["firing"]


async def test_a_rule_that_is_changed_or_deleted_ends_what_it_has() -> None:
    async with receiving() as receiver, running(None, receiver, LAG, DISK) as found:
        await looks(found, *[{"lag": 500, "disk": 0.9}] * 3)
        await found.put_rule(Rule(name="lag", figure="lag", selector="other", value=100, channel="hook"))
        await looks(found, {"lag": 500, "disk": 0.9})
        await found.delete_rule("disk")
        await asyncio.sleep(1)
        assert [one["state"] for one in receiver.events].count("resolved") == 2
        assert {one["text"].rpartition(" (")[2] for one in receiver.events if one["state"] == "resolved"} == {
            "the rule no longer looks at it)", "the rule was deleted)",
        }  # fmt: skip


# -- delivering


async def test_a_receiver_that_is_down_for_five_minutes_gets_it_after(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path / "alerts.json", receiver, LAG) as found:
        await receiver.close()
        await looks(found, *[{"lag": 500}] * 3)
        await asyncio.sleep(150)
        await looks(found, *[{}] * 3)  # the alert resolves while the receiver is down
        await asyncio.sleep(300 - 210)
        assert len(found.waiting) == 2
        assert found.waiting[0].trouble.startswith("cannot be reached")
        await receiver.open()
        await asyncio.sleep(900)
        assert [(one["rule"], one["state"]) for one in receiver.events] == [("lag", "firing"), ("lag", "resolved")]
        assert [one.what for one in found.happened] == ["firing", "resolved", "delivered", "delivered"]
        assert not found.waiting


async def test_a_notice_is_given_up_after_five_tries() -> None:
    async with receiving() as receiver, running(None, receiver, LAG) as found:
        receiver.answer = b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"
        await looks(found, *[{"lag": 500}] * 2)
        await asyncio.sleep(1_000)
        assert len(receiver.got) == 5
        assert len({body for _, _, body in receiver.got}) == 1
        assert found.happened[-1].what == "given up"
        assert "it answers 500" in found.happened[-1].text


async def test_what_waits_goes_out_after_a_restart_and_nothing_fires_twice(tmp_path: Path) -> None:
    path = tmp_path / "alerts.json"
    async with receiving() as receiver:
        await receiver.close()
        async with running(path, receiver, LAG) as found:
            await looks(found, *[{"lag": 500}] * 3)
            before = found.waiting[0].event.id
        assert path.stat().st_mode & 0o077 == 0  # addresses and secrets are its owner's alone
        await receiver.open()
        again = Alerts("local", path, SYSTEM_CLOCK)
        assert again.rules == {"lag": LAG}
        again.start()
        await asyncio.sleep(1)
        await looks(again, *[{"lag": 500}] * 3)
        assert [(one["id"], one["state"]) for one in receiver.events] == [(before, "firing")]
        await again.close()


async def test_a_file_of_rules_that_cannot_be_read_is_set_aside_and_said(tmp_path: Path) -> None:
    (tmp_path / "alerts.json").write_text("{nonsense")
    found = Alerts("local", tmp_path / "alerts.json", SYSTEM_CLOCK)
    assert "damaged" in found.lost
    assert (tmp_path / "alerts.json.damaged").read_text() == "{nonsense"


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (b"HTTP/1.1 204 No\r\n\r\n", ""),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "it answers 302"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1_000_000, ""),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)  # fmt: skip
async def test_answers_of_receivers(answer: bytes, trouble: str) -> None:
    async with receiving() as receiver:
        receiver.answer = answer
        found = await deliver(receiver.channel(), event())
        assert found.startswith(trouble)
        assert bool(found) == bool(trouble)
        assert len(receiver.got) == 1  # no redirect was followed
        assert "k-e-y" not in found


async def test_a_receiver_that_hangs_is_left_and_gets_nothing_until_it_lets_go() -> None:
    async with receiving() as receiver:
        receiver.hangs = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await deliver(receiver.channel(), event()) == "no answer within 10 s"
        assert loop.time() - began < ANSWER_S + 1
        assert "has not ended" in await deliver(receiver.channel(), event())
        assert len(receiver.got) == 1, "no second thread waits for the same receiver"


# -- services of apprise


@pytest.mark.real_time  # Apprise has sockets of its own
async def test_a_service_of_apprise_gets_the_text_of_an_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with receiving() as receiver:
        assert await deliver(receiver.service(), event()) == ""
        ((_, headers, body),) = receiver.got
        sent = json.loads(body)
        assert (sent["title"], sent["message"], sent["type"]) == ("FIRING r: g", "FIRING <lag> & more", "failure")
        assert headers["x-token"] == "t-o-k-e-n"
    assert not [word for word in ("k-e-y", "p-a-s-s", "t-o-k-e-n") if word in caplog.text]


@pytest.mark.real_time  # Apprise has sockets of its own
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"HTTP/1.1 403 No\r\ncontent-length: 5\r\n\r\nk-e-y", "error=403"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "error=302"),
        (b"", "Connection error"),
    ],
)
async def test_the_cause_of_a_failed_delivery_is_shown_without_keys(
    answer: bytes, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with receiving() as receiver:
        receiver.answer = answer
        found = await deliver(receiver.service(), event())
        assert cause in found
        assert len(receiver.got) == 1, "no redirect is followed"
        assert not [word for word in ("k-e-y", "p-a-s-s", "t-o-k-e-n", "anna") if word in found + caplog.text]


async def test_an_apprise_service_that_nobody_serves_names_the_fault_of_the_network() -> None:
    with silent_port() as port:
        assert "(Connection refused)" in await deliver(Channel(name="c", url=f"json://{HOST}:{port}/k-e-y"), event())


@apprise_service(on="pager")
def pager(body: str, title: str, notify_type: str, *_: object, meta: dict[str, Any], **__: object) -> bool:
    """A service of a hook's module, which logs more than it should."""
    if "good" in meta["url"]:
        return True
    logging.getLogger("apprise").warning("no answer of %s for T-O-K-E-N", meta["url"])
    return False


async def test_a_service_of_a_hook_delivers_and_its_words_show_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert await deliver(Channel(name="c", url="pager://good.example/k-e-y"), event()) == ""
    found = await deliver(Channel(name="c", url="pager://pager.example/k-e-y/t-o-k-e-n?to=anna%40x.example"), event())
    assert found.startswith("no answer of pager://…")
    assert not re.search("k-e-y|t-o-k-e-n|pager.example|anna", found + caplog.text, re.IGNORECASE)


async def test_others_still_log_what_apprise_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Channel(name="c", url="json://127.0.0.1:1").check()
    logging.getLogger("apprise").info("sent by another part of this program")
    logging.getLogger("apprise").debug("https://host/key")
    assert caplog.messages == ["sent by another part of this program"]


@pytest.mark.real_time  # Apprise has sockets of its own
async def test_an_alert_goes_out_through_apprise() -> None:
    async with receiving() as receiver, running(None, receiver, LAG) as found:
        await found.put_channel(receiver.service())
        now_ms = SYSTEM_CLOCK.now_ms()
        for seconds in (0, 10, 20):
            found.look(snapshot(now_ms + seconds * 1000, lag=500))
        while not found.happened or found.happened[-1].what != "delivered":
            await asyncio.sleep(0.01)
        assert [one["type"] for one in receiver.events] == ["failure"]
        assert found.happened[-1].what == "delivered"


def event(text: str = "FIRING <lag> & more") -> Event:
    return Event(
        id="i", state="firing", cluster="c", rule="r", figure="lag", target="g", value=1.0, operator=">", limit=0.0,
        fired_ms=1, at_ms=2, text=text, page="/c/groups/g",
    )  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["nothing://h/", "http://", "http://u:p@h/", "http://h/ x", "http://h/\r\nx: y", "http://h:99999/", "http://h/#f",
     "x", "slack://k-e-y", "mailto://"],
)  # fmt: skip
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address") as refused:
        Channel(name="c", url=url).check()
    assert "k-e-y" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://hooks.example:8443/k-e-y", "https://hooks.example:8443/…"),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#general", "slack://…"),
        ("mailto://anna:secret@example.org?to=ops@example.org", "mailto://…"),
        ("dingtalk://abcdefghijklmnopqrst/15551234567", "dingtalk://…"),
        ("feishu://abcdefghijklmnopqrst", "feishu://…"),
        ("wecombot://abcdefghijklmnopqrst", "wecombot://…"),
    ],
)
def test_addresses_that_are_known_and_what_is_shown_of_them(url: str, place: str) -> None:
    channel = Channel(name="c", url=url)
    channel.check()
    assert channel.place == place


def test_only_a_webhook_has_a_secret() -> None:
    with pytest.raises(ValueError, match="only webhooks"):
        Channel(name="c", url="json://127.0.0.1", secret="s").check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"figure": "lags"}, "must be one of"),
        ({"operator": "="}, "operator"),
        ({"value": float("nan")}, "must be a number"),
        ({"samples": 0}, "samples"),
        ({"channel": "none"}, "channel"),
        ({"name": "a b"}, "name"),
        ({"selector": ""}, "selector"),
    ],
)
def test_rules_that_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Rule(**({"name": "lag", "figure": "lag", "value": 1.0} | change)).check({})


# -- pages


def token(answer: Answer) -> str:
    found = re.search(r'name="review" value="([^"]+)"', answer.text)
    assert found, answer.text
    return found[1]


async def change(browser: Browser, path: str, form: dict[str, str]) -> Answer:
    """Fill in a form, and confirm its review."""
    return await browser.post(path, {"review": token(await browser.post(path, form))})


async def test_rules_and_channels_are_made_by_forms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with receiving() as receiver, served(tmp_path / "store", state=tmp_path / "state") as (_, console, browser):
        alerts, shown = console.envs["local"].alerts, []
        url = f"http://127.0.0.1:{receiver.port}/in?key=k-e-y"
        review = await browser.post("/local/new-channel", {"name": "hook", "url": url, "secret": SECRET})
        assert alerts.channels == {}  # it was only looked at
        shown += [review, await browser.post("/local/new-channel", {"review": token(review)})]
        assert alerts.channels == {"hook": receiver.channel()}
        rule = {"name": "late", "figure": "lag", "selector": "*", "operator": ">", "value": "10", "samples": "1"}
        done = await change(browser, "/local/new-rule", rule | {"channel": "hook"})
        assert (done.status, alerts.rules["late"].value) == (200, 10)
        shown.append(await change(browser, "/local/channels/hook", {"do": "test"}))
        assert [one["state"] for one in receiver.events] == ["test"]

        alerts.look(snapshot(SYSTEM_CLOCK.now_ms(), lag=500))
        values = await browser.json("/local/alerts")
        assert [(one["state"], one["target"]) for one in values["alerts"]] == [("firing", "g")]
        assert "Alerts that fire" in (await browser.get("/local/")).text
        await change(browser, "/local/alerts/late", {"do": "silence", "hours": "8"})
        assert alerts.rules["late"].silent_until_ms > SYSTEM_CLOCK.now_ms()
        await change(browser, "/local/channels/hook", {"no_secret": "yes"})
        assert alerts.channels["hook"].secret == ""
        await change(browser, "/local/channels/hook", {"secret": SECRET})
        assert alerts.channels["hook"].url == url  # what is empty stays
        wrong = await browser.post("/local/channels/hook", {"url": "slack://k-e-y"})
        assert (wrong.status, "one of apprise" in wrong.text, "k-e-y" in wrong.text) == (400, True, False)
        elsewhere = {"url": "http://127.0.0.1:1/"}
        assert alerts.channels["hook"].secret == SECRET
        await change(browser, "/local/channels/hook", elsewhere)
        assert alerts.channels["hook"].secret == ""  # a secret does not go to another host
        assert "409" in str((await change(browser, "/local/channels/hook", {"do": "delete"})).status)  # a rule uses it
        await change(browser, "/local/alerts/late", {"do": "delete"})
        await change(browser, "/local/channels/hook", {"do": "delete"})
        assert (alerts.rules, alerts.channels) == ({}, {})

        for path in ("/local/alerts", "/local/alerts?format=json", "/audit", "/audit?format=json"):
            shown.append(await browser.get(path))
        everything = "".join(one.text for one in shown) + caplog.text
        assert "k-e-y" not in everything
        assert SECRET not in everything
        actions = {(one.action, one.outcome) for one in console.audit.lines()}
        assert actions >= {
            ("save alert rule", "done"),
            ("silence alert rule", "done"),
            ("delete alert channel", "done"),
        }


async def test_who_may_change_what(tmp_path: Path) -> None:
    user = User("anna", Role.VIEWER)
    async with served(tmp_path, authorize=lambda _: user) as (_, console, browser):
        channel = {"name": "hook", "url": "http://127.0.0.1:1/"}
        rule = {"name": "late", "figure": "lag", "selector": "*", "operator": ">", "value": "10", "samples": "1"}
        assert (await browser.post("/local/new-rule", rule)).status == 403
        user = User("otto", Role.OPERATOR)
        assert (await browser.post("/local/new-channel", channel)).status == 403  # it makes the console send somewhere
        user = User("root", Role.ADMIN)
        first, second = await browser.post("/local/new-rule", rule), await browser.post("/local/new-rule", rule)
        assert (await browser.post("/local/new-rule", {"review": token(first)})).status == 200
        meanwhile = await browser.post("/local/new-rule", {"review": token(second)})
        assert (meanwhile.status, "Changed since" in meanwhile.text) == (409, True)
        third = token(await browser.post("/local/new-rule", rule | {"name": "later"}))
        user = User("root", Role.OPERATOR)  # who reviewed it is no admin any more
        assert (await browser.post("/local/new-rule", {"review": third})).status == 403
        user = User("root", Role.ADMIN)
        assert list(console.envs["local"].alerts.rules) == ["late"]
        refused = {(one.user, one.action) for one in console.audit.lines() if one.outcome == "refused"}
        assert refused >= {("otto", "save alert channel"), ("anna", "save alert rule")}
        wrong = await browser.post("/local/new-rule", rule | {"value": "many"})
        assert (wrong.status, "must be a number" in wrong.text) == (400, True)
        assert (await browser.get("/local/alerts/nothing")).status == 404


async def test_rules_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(
        '{"channels": [{"name": "hook", "url": "https://hooks.example/x"}],'
        ' "rules": [{"name": "late", "figure": "age", "value": 300, "channel": "hook"}]}'
    )
    console = Console("127.0.0.1:1", rules=path)
    assert list(console.envs["local"].alerts.rules) == ["late"]
    for text, why in (
        ('{"rule": []}', "rule"),
        ('{"rules": [{"name": "x", "figure": "y", "value": 1}]}', "figure 'y'"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=why):
            Console("127.0.0.1:1", rules=path)


async def test_history_and_alert_pages_are_whole(tmp_path: Path) -> None:
    async with served(tmp_path) as (both, _, browser):
        await asyncio.sleep(40)
        broker = both.broker.context.settings.broker_name
        pages = ["alerts", "new-rule?figure=disk", "new-channel", "history", "history?figure=disk&q=x"]
        pages += [
            f"history/disk/{broker}?range=24h",
            f"brokers/{broker}?range=7d",
            "?range=6h&until=2026-01-01",
            "?until=999999999999999",
            "?until=1",
        ]
        for path in pages:
            answer = await browser.get(f"/local/{path}")
            assert answer.status == 200, (path, answer.text[-2000:])
            assert (await browser.json(f"/local/{path}"))["title"], path
        series = await browser.json(f"/local/history/disk/{broker}")
        assert (series["unit"], series["stepMs"]) == ("share of the log's disk", 10_000)
        assert all(0 <= value <= 1 for _, value in series["points"] if value is not None)
        for path, status in (("history/lag/nobody", 404), ("history/lags/x", 404), (f"brokers/{broker}?range=1y", 400)):
            assert (await browser.get(f"/local/{path}")).status == status
