"""Logins: users of a file, users of the cluster, sessions, failed tries. Source: remoting.md §9."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from rmqkit.admin import Admin
from rmqkit.console import Console
from rmqkit.console.access.logins import (
    IDLE_MS,
    TRIES_A_MINUTE,
    WHOLE_MS,
    FileUsers,
    Role,
    Sessions,
    Tries,
    User,
    password_line,
)
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import Message
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials
from tests.admin.things import send
from tests.console.asgi import Browser, served
from tests.console.test_changes import token_of


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_ms(self) -> float:
        return self.now

    def now_ms(self) -> int:
        return int(self.now)


def test_a_password_is_kept_as_its_hash(tmp_path: Path) -> None:
    line = password_line("anna", Role.OPERATOR, "long secret")
    assert "long secret" not in line
    assert line != password_line("anna", Role.OPERATOR, "long secret")  # a salt of its own
    path = tmp_path / "users"
    path.write_text(f"# people\n\n{line}\n")
    users = FileUsers(path)
    assert users.check("anna", "long secret") == User("anna", Role.OPERATOR)
    assert users.check("anna", "wrong") is None
    assert users.check("bert", "long secret") is None
    assert users.check("", "") is None


@pytest.mark.parametrize("line", ["anna", "anna:king:scrypt$1", "anna:admin:plain", ":admin:scrypt$1"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "users").write_text(line)
    with pytest.raises(SettingsError, match="users:1"):
        FileUsers(tmp_path / "users")


def test_a_session_ends_when_idle_and_after_a_day() -> None:
    clock = Clock()
    sessions = Sessions(clock)  # type: ignore[arg-type]
    user = User("anna", Role.ADMIN)
    idle, used = sessions.begin(user), sessions.begin(user)
    assert len(idle) >= 43
    for _ in range(0, WHOLE_MS, IDLE_MS):
        assert sessions.user(used) is user
        clock.now += IDLE_MS
    assert sessions.user(idle) is None
    clock.now += 1
    assert sessions.user(used) is None
    assert sessions.user("made up") is None


def test_five_tries_a_minute() -> None:
    clock = Clock()
    tries = Tries(clock)  # type: ignore[arg-type]
    assert [tries.may_try("10.0.0.1") for _ in range(TRIES_A_MINUTE + 1)] == [True] * TRIES_A_MINUTE + [False]
    assert tries.may_try("10.0.0.2")
    clock.now = 60_001
    assert tries.may_try("10.0.0.1")


async def test_a_users_file_asks_everybody_to_log_in(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with served(tmp_path / "store", users=users) as (_, console, browser):
        turned_away = await browser.get("/local/topics?q=x")
        assert (turned_away.status, turned_away.headers["location"]) == (303, "/login?next=%2Flocal%2Ftopics%3Fq%3Dx")
        assert (await browser.get("/local/topics", {"accept": "application/json"})).status == 401
        wrong = await browser.post("/login", {"name": "vera", "secret": "wrong"})
        assert wrong.status == 401
        right = await browser.post("/login?next=%2Flocal%2Ftopics", {"name": "vera", "secret": "secret"})
        assert (right.status, right.headers["location"]) == (303, "/local/topics")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert "secret" not in cookie
        assert (await browser.get("/local/topics")).status == 200
        assert (await browser.post("/local/topics/Orders/send", {"body": "x"})).status in (403, 404)
        no_origin = await browser.post("/login", {"leave": "1"}, {"sec-fetch-site": ""})
        assert no_origin.status == 403
        await browser.post("/login", {"leave": "1"})
        assert (await browser.get("/local/topics")).status == 303
        outcomes = [line.outcome for line in console.audit.lines("login")]
        assert outcomes[-2:] == ["done", "refused"]


async def test_a_login_leads_to_no_other_site(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with served(tmp_path / "store", users=users) as (_, console, _):
        for place in (
            "//evil.example/",
            "https://evil.example/",
            "/\\evil.example",
            "/\t/evil.example/",
            "javascript:alert(1)",
        ):
            browser = Browser(console, address=f"10.0.0.{len(place)}")
            answer = await browser.post(f"/login?next={quote(place, safe='')}", {"name": "vera", "secret": "secret"})
            assert answer.headers["location"] == "/"


async def test_tries_are_limited(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with served(tmp_path / "store", users=users) as (_, _, browser):
        answers = [await browser.post("/login", {"name": "vera", "secret": "no"}) for _ in range(TRIES_A_MINUTE + 1)]
        assert [one.status for one in answers] == [401] * TRIES_A_MINUTE + [429]


async def test_right_logins_do_not_count_as_failed_tries(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with served(tmp_path / "store", users=users) as (_, _, browser):
        for _ in range(TRIES_A_MINUTE + 3):
            assert (await browser.post("/login", {"name": "vera", "secret": "secret"})).status == 303
        wrong = [await browser.post("/login", {"name": "vera", "secret": "no"}) for _ in range(TRIES_A_MINUTE)]
        assert {one.status for one in wrong} == {401}
        assert (await browser.post("/login", {"name": "vera", "secret": "secret"})).status == 429, "who guessed waits"


def test_a_right_try_is_taken_out_for_its_address_alone() -> None:
    tries = Tries(Clock())  # type: ignore[arg-type]
    assert [tries.may_try("10.0.0.1") for _ in range(TRIES_A_MINUTE)] == [True] * TRIES_A_MINUTE
    tries.succeeded("10.0.0.2")
    assert not tries.may_try("10.0.0.1")
    tries.succeeded("10.0.0.1")
    assert tries.may_try("10.0.0.1") and not tries.may_try("10.0.0.1")


async def test_a_cluster_without_users_has_nobody_to_log_in_as(tmp_path: Path) -> None:
    async with served(tmp_path, login=True) as (_, _, browser):
        answer = await browser.post("/login", {"name": "anna", "secret": "secret"})
        assert answer.status == 401
        assert "accepts everyone" in answer.text


async def test_a_user_of_the_cluster_logs_in_and_signs(tmp_path: Path) -> None:
    """The broker knows ``root`` alone; the console's own user is the same here."""
    users = AuthenticationSettings(enabled=True, initial_user='{"username":"root","password":"secret-of-root"}')
    own = Credentials(access_key="root", secret_key="secret-of-root")
    async with served(tmp_path, authentication=users, login=True, credentials=own) as (_, console, browser):
        wrong = await browser.post("/login", {"name": "root", "secret": "guess"})
        assert (wrong.status, "is wrong" in wrong.text) == (401, True)
        right = await browser.post("/login", {"name": "root", "secret": "secret-of-root"})
        assert right.status == 303, right.text
        assert console.audit.lines("login")[0].detail == "admin"
        assert "secret-of-root" not in "".join(line.detail for line in console.audit.lines())
        assert (await browser.json("/local/brokers"))["brokers"][0]["version"]


@asynccontextmanager
async def shared_with_anna(store: Path) -> AsyncIterator[tuple[Admin, Console, Browser]]:
    """A broker that asks policies, ``anna``'s login, and an operator's connection."""
    authentication = AuthenticationSettings(
        enabled=True,
        authorization_enabled=True,
        initial_user='{"username":"root","password":"secret-of-root"}',
        inner_credentials='{"accessKey":"inner","secretKey":"inner-secret"}',
    )
    own = Credentials(access_key="root", secret_key="secret-of-root")
    async with (
        served(store, authentication=authentication, login=True, credentials=own) as (both, console, browser),
        Admin(both.namesrv_address, credentials=own) as admin,
    ):
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await admin.topics.create("Payments", read_queues=1, write_queues=1)
        await send(admin, Message(topic="Orders", body=b"one"))
        await send(admin, Message(topic="Payments", body=b"two"))
        await admin.access.create_user("anna", "secret-of-anna")
        actions = ["Pub", "Sub", "Get", "Create", "Update"]
        await admin.access.put_policy("anna", "Topic:Orders", actions)
        await admin.access.put_policy("anna", "Cluster:*", ["Get", "List"])
        await admin.access.put_policy("anna", "Group:TOOLS_CONSUMER", ["Sub"])  # reads messages for no group of its own
        await console.envs["local"].watcher.first(10)
        answer = await browser.post("/login", {"name": "anna", "secret": "secret-of-anna"})
        assert answer.status == 303, answer.text
        yield admin, console, browser


async def test_anna_sees_and_does_what_her_policies_say(tmp_path: Path) -> None:
    async with shared_with_anna(tmp_path) as (admin, console, browser):
        assert (await browser.get("/local/topics")).status == 200
        assert (await browser.json("/local/topics/Orders/messages"))["messages"][0]["body"] == "one"
        refused = await browser.get("/local/topics/Payments/messages")
        assert "User:anna has no permission to access Topic:Payments" in refused.text
        assert "two" not in refused.text
        # She may change Orders but not Payments. The page shows the broker's refusal.
        fields = {one["name"]: one["value"] for one in (await browser.json("/local/topics/Orders/edit"))["fields"]}
        review = await browser.post("/local/topics/Orders/edit", fields | {"perm": "4"})
        done = await browser.post("/local/topics/Orders/edit", {"review": token_of(review)})
        assert done.status == 200, done.text
        assert next(iter((await admin.topics.config("Orders")).values())).perm == 4
        for path, form in (("/local/topics/Payments/edit", fields), ("/local/topics/Payments/send", {"body": "x"})):
            answer = await browser.post(path, form)
            if answer.status == 200:
                answer = await browser.post(path, {"review": token_of(answer)})
            assert (answer.status, "User:anna has no permission" in answer.text) == (403, True), answer.text
        made = {"name": "bert", "secret": "secret-of-bert", "type": "Normal", "where": "all brokers"}
        token = token_of(await browser.post("/local/new-user", made))
        answer = await browser.post("/local/new-user", {"review": token})
        assert (answer.status, "User:anna has no permission to access Cluster" in answer.text) == (403, True)
        users = [(one.user, one.outcome) for one in console.audit.lines("edit topic")]
        assert users[:2] == [("anna", "done"), ("anna", "intent")]


async def test_a_user_that_was_removed_is_refused_at_the_next_request(tmp_path: Path) -> None:
    async with shared_with_anna(tmp_path) as (admin, console, browser):
        assert (await browser.get("/local/topics")).status == 200
        await admin.access.delete_user("anna")
        refused = await browser.get("/local/topics")  # a page that asks no broker
        assert (refused.status, "User:anna is not found" in refused.text) == (403, True), refused.text
        assert (await browser.get("/local/topics")).status == 303  # to the login
        assert console.audit.lines()[0].outcome == "refused"


async def test_users_and_policies_are_changed(tmp_path: Path) -> None:
    async with shared_with_anna(tmp_path) as (admin, console, _):
        console.needs_login = False
        browser = Browser(console)
        form = {"name": "bert", "secret": "secret-of-bert", "type": "Normal", "where": "all brokers"}
        assert "at least 8" in (await browser.post("/local/new-user", form | {"secret": "x"})).text
        for path, given, typed in (
            ("/local/new-user", form, ""),
            ("/local/access/bert/edit", {"secret": "", "type": "Normal", "status": "disable"}, ""),
            ("/local/access/bert/policy", {"resource": "Topic:Orders", "actions.Sub": "1", "decision": "Allow"}, ""),
            ("/local/access/anna/policy/delete?resource=Topic%3AOrders", {}, "anna"),
        ):
            review = await browser.post(path, given)
            assert (await browser.post(path, {"review": token_of(review), "typed": typed})).status == 200, review.text
            assert "secret-of-" not in review.text
        shown = await browser.json("/local/access?user=anna&action=Sub&resource=Topic:Orders&ip=127.0.0.1")
        assert [(one["username"], one["userStatus"]) for one in shown["users"]] == [
            ("anna", "enable"), ("bert", "disable"), ("root", "enable"),
        ]  # fmt: skip
        assert [(one["username"], one["resource"]) for one in shown["policies"]] == [
            ("anna", "Cluster:*"), ("anna", "Group:TOOLS_CONSUMER"), ("bert", "Topic:Orders"),
        ]  # fmt: skip
        assert list(shown["verdicts"].values()) == [
            "User:anna has no permission to access Topic:Orders from 127.0.0.1, no matched policies."
        ]
        page = await browser.get("/local/access")
        assert "secret-of" not in page.text
        token = token_of(await browser.post("/local/access/bert/delete", {}))
        await admin.access.update_user("bert", status="enable")
        changed = await browser.post("/local/access/bert/delete", {"review": token, "typed": "bert"})
        assert (changed.status, "Normal, disable → Normal, enable" in changed.text) == (409, True)
        assert "secret-of" not in "".join(line.detail for line in console.audit.lines())
        assert (await browser.get("/local/access/nobody/edit")).status == 404
