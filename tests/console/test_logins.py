"""Who logs in: users of a file, users of the cluster, sessions, tries. Source: remoting.md §9."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from rmqkit.console.logins import (
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
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials
from tests.console.asgi import Browser, served


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
        for place in ("//evil.example/", "https://evil.example/", "/\\evil.example", "javascript:alert(1)"):
            browser = Browser(console, address=f"10.0.0.{len(place)}")
            answer = await browser.post(f"/login?next={quote(place, safe='')}", {"name": "vera", "secret": "secret"})
            assert answer.headers["location"] == "/"


async def test_tries_are_limited(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with served(tmp_path / "store", users=users) as (_, _, browser):
        answers = [await browser.post("/login", {"name": "vera", "secret": "no"}) for _ in range(TRIES_A_MINUTE + 1)]
        assert [one.status for one in answers] == [401] * TRIES_A_MINUTE + [429]


async def test_a_cluster_without_users_has_nobody_to_log_in_as(tmp_path: Path) -> None:
    async with served(tmp_path, login=True) as (_, _, browser):
        answer = await browser.post("/login", {"name": "anna", "secret": "secret"})
        assert answer.status == 401
        assert "lets everybody in" in answer.text


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
