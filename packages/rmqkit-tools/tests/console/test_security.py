"""The table of who may ask what: Host, origin, role, read-only, listening. Nothing here needs a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmqkit.console.access.logins import Role, User
from rmqkit.console.access.security import HEADERS, host_fault, is_loopback, listen_fault, origin_fault
from rmqkit.console.request.routes import ROUTES
from rmqkit.console.server.app import Console
from rmqkit.errors import SettingsError
from tests.console.asgi import Browser, served

OWN = "http://127.0.0.1:9875"


@pytest.mark.parametrize("host", ["localhost:9875", "127.0.0.1:9875", "[::1]:9875", "127.0.0.1", "console.example:1"])
def test_own_names_are_let_in(host: str) -> None:
    assert host_fault(host, {"console.example"}) == ""


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:9875", "[::1"])
def test_another_name_in_the_host_header_is_refused(host: str) -> None:
    assert "is not a name of this console" in host_fault(host, {"console.example"})


@pytest.mark.parametrize(
    ("headers", "has_cookie", "is_refused"),
    [
        ({"sec-fetch-site": "same-origin"}, True, False),
        ({"sec-fetch-site": "cross-site"}, True, True),
        ({"sec-fetch-site": "cross-site", "origin": OWN}, False, True),
        ({"sec-fetch-site": "same-site"}, False, True),
        ({"sec-fetch-site": "none"}, False, True),
        ({"origin": OWN}, True, False),
        ({"origin": "http://evil.example"}, False, True),
        ({"origin": "null"}, False, True),
        ({}, True, True),
        ({}, False, False),
    ],
)
def test_a_change_comes_from_a_page_of_ours(headers: dict[str, str], has_cookie: bool, is_refused: bool) -> None:
    assert bool(origin_fault("POST", headers, OWN, has_cookie=has_cookie)) is is_refused
    assert origin_fault("GET", headers, OWN, has_cookie=has_cookie) == ""


@pytest.mark.parametrize(
    ("host", "has_users", "has_tls", "behind", "insecure", "may_listen"),
    [
        ("127.0.0.1", False, False, False, False, True),
        ("::1", False, False, False, False, True),
        ("localhost", False, False, False, False, True),
        ("0.0.0.0", False, False, False, False, False),
        ("10.1.2.3", True, False, False, False, False),
        ("10.1.2.3", False, True, False, False, False),
        ("10.1.2.3", True, True, False, False, True),
        ("10.1.2.3", True, False, True, False, True),
        ("0.0.0.0", False, False, False, True, True),
    ],
)
def test_other_addresses_need_users_and_tls(
    host: str, has_users: bool, has_tls: bool, behind: bool, insecure: bool, may_listen: bool
) -> None:
    fault = listen_fault(host, has_users=has_users, has_tls=has_tls, is_behind_proxy=behind, is_insecure=insecure)
    assert (fault == "") is may_listen


def test_which_addresses_are_loopback() -> None:
    assert is_loopback("127.9.9.9")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("broker.example")


async def test_every_route_refuses_a_foreign_host_and_a_post_of_another_site(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, console, browser):
        stranger = Browser(console, host="evil.example")
        for route in ROUTES:
            path = _path(route.path)
            assert (await stranger.get(path)).status == 421, path
            crossed = await browser.post(path, {"x": "1"}, {"sec-fetch-site": "cross-site"})
            assert crossed.status == 403, path
        assert [line.outcome for line in console.audit.lines("another site")][:1] == ["refused"]


async def test_every_answer_has_the_policy(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, browser):
        for path in ("/local/", "/local/topics?format=json", "/static/live.js", "/nowhere", "/static/../app.py"):
            answer = await browser.get(path)
            for name in ("content-security-policy", "x-content-type-options", "referrer-policy"):
                assert answer.headers[name] == HEADERS[name], path
            assert "unsafe" not in answer.headers["content-security-policy"]
        assert (await browser.get("/static/../app.py")).status == 404
        assert (await browser.get("/local/topics")).headers["cache-control"] == "no-store"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("read_only", [False, True])
async def test_only_who_may_change_gets_a_review(tmp_path: Path, role: Role, read_only: bool) -> None:
    user = User("anna", role)
    async with served(tmp_path, read_only=read_only, authorize=lambda _: user) as (_, console, browser):
        await _topic(console, "Orders")
        answer = await browser.post("/local/topics/Orders/send", {"body": "hello"})
        may = role.may_change and not read_only
        assert answer.status == (200 if may else 403), answer.text
        outcomes = [(line.user, line.action, line.outcome) for line in console.audit.lines()]
        assert outcomes == ([] if may else [("anna", "send", "refused")])


async def test_a_view_that_would_change_something_is_stopped_where_requests_leave(tmp_path: Path) -> None:
    """The guard does not rest on views: an operation of a viewer's connection is refused and audited."""
    from rmqkit.admin import Admin
    from rmqkit.console.request.request import Ask, Page
    from rmqkit.console.views import groups

    async def careless(ask: Ask) -> Page:
        admin: Admin = ask.admin
        await admin.topics.create("Made-by-a-view", cluster="DefaultCluster")
        raise AssertionError("it was let through")

    viewer = User("paul", Role.VIEWER)
    async with served(tmp_path, authorize=lambda _: viewer) as (_, console, browser):
        console.routes = [(p, r, careless if v is groups.groups else v) for p, r, v in console.routes]
        answer = await browser.get("/local/groups")
        assert answer.status == 403
        assert "UPDATE_AND_CREATE_TOPIC" in answer.text
        assert [line.action for line in console.audit.lines()] == ["UPDATE_AND_CREATE_TOPIC"]


async def test_nobody_is_let_in_by_a_program_that_knows_nobody(tmp_path: Path) -> None:
    async with served(tmp_path, authorize=lambda _: None) as (_, _, browser):
        assert (await browser.get("/local/")).status == 403


@pytest.mark.parametrize("name", ["login", "static", "a/b", "", "ä"])
def test_names_of_clusters_can_stand_in_an_address(name: str) -> None:
    with pytest.raises(SettingsError):
        Console({name: "127.0.0.1:9876"})


def _path(pattern: str) -> str:
    for name, value in {
        "env": "local",
        "t": "T",
        "id": "I",
        "u": "U",
        "broker": "b",
        "queue": "0",
        "offset": "0",
    }.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern.replace("{g}", "G").replace("{c}", "C").replace("{b}", "B").replace("{file}", "live.js")


async def _topic(console: Console, name: str) -> None:
    from rmqkit.admin import Admin

    env = console.envs["local"]
    async with Admin(env.name_servers) as admin:
        await admin.topics.create(name)
