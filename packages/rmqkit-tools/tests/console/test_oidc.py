"""Login by OpenID Connect: what is refused, then what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import pytest

from rmqkit.console import Console
from rmqkit.console.access.logins import TRIES_A_MINUTE, Role, password_line
from rmqkit.console.access.oidc import LOGIN_MS, OidcSettings
from rmqkit.errors import SettingsError
from tests.console.asgi import Answer, Browser
from tests.console.provider import CLIENT, SECRET, Provider, providing


@asynccontextmanager
async def beside_provider(folder: Path, **options: Any) -> AsyncIterator[tuple[Provider, Console, Browser]]:
    """A provider, and a console whose users it knows."""
    async with providing() as provider:
        (folder / "oidc.json").write_text(json.dumps(provider.settings))
        async with Console("127.0.0.1:1", oidc=folder / "oidc.json", **options) as console:
            yield provider, console, Browser(console)


async def begin(browser: Browser, back: str = "") -> str:
    """Press the button; return where it leads."""
    answer = await browser.get("/login/oidc" + (f"?next={quote(back, safe='')}" if back else ""))
    assert answer.status == 303, answer.text
    return answer.headers["location"]


async def finish(browser: Browser, brought: dict[str, str]) -> Answer:
    return await browser.get("/login/oidc?" + urlencode(brought), {"sec-fetch-site": "cross-site"})


async def log_in(provider: Provider, browser: Browser, back: str = "") -> Answer:
    return await finish(browser, provider.log_in(await begin(browser, back)))


# -- what is refused


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"nonce": "of another login"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"iss": "http://127.0.0.1:1"}, "iss"),
        ({"aud": "another-client"}, "aud"),
        ({"aud": [CLIENT, "another-client"]}, "azp"),
        ({"aud": [CLIENT, "another-client"], "azp": "another-client"}, "azp"),
        ({"exp": 1_700_000_000}, "expired"),
        ({"exp": None}, "exp"),
        ({"iat": 4_000_000_000}, "issued in the future"),
        ({"at_hash": "of another token"}, "at_hash"),
        ({"groups": ["others"]}, "has no role here: claim groups is others"),
        ({"groups": None}, "has no role here: claim groups is missing"),
    ],
)
async def test_claims_that_are_refused(tmp_path: Path, claims: dict[str, Any], why: str) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        provider.claims |= claims
        answer = await log_in(provider, browser)
        await is_refused(answer, why, console, browser)
        assert "Log out of Acme" in answer.text, "to log in with another account"


@pytest.mark.parametrize("sign", ["none", "secret", "other key"])
async def test_id_tokens_that_nobody_signed_are_refused(tmp_path: Path, sign: str) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        provider.sign = sign
        answer = await log_in(provider, browser)
        await is_refused(answer, "the ID token of Acme is refused", console, browser)


async def test_an_answer_without_an_id_token_is_refused(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        provider.has_id_token = False
        await is_refused(await log_in(provider, browser), "has no ID token", console, browser)


async def is_refused(answer: Answer, why: str, console: Console, browser: Browser) -> None:
    """The page says why, nobody is logged in, and the audit has it."""
    await is_not_begun(answer, why, browser)
    line = console.audit.lines("login")[0]
    assert (line.outcome, why in line.detail) == ("refused", True)


async def is_not_begun(answer: Answer, why: str, browser: Browser) -> None:
    assert (answer.status, why in answer.text) == (401, True), answer.text
    assert (await browser.get("/local/topics")).status == 303


async def test_only_the_browser_that_began_can_come_back(tmp_path: Path) -> None:
    """An attacker who sends others his own code would log them in as himself, and see what they type."""
    async with beside_provider(tmp_path) as (provider, console, browser):
        brought = provider.log_in(await begin(browser))
        victim = Browser(console, address="10.0.0.1")
        await is_refused(await finish(victim, brought), "not begun in this browser", console, victim)
        await begin(victim)  # a login of its own has another state
        await is_refused(await finish(victim, brought), "not begun in this browser", console, victim)
        changed = brought | {"state": brought["state"][:-1] + "ö"}
        await is_refused(await finish(browser, changed), "not begun in this browser", console, browser)
        assert "/token" not in provider.asked, "no code was handed to the provider"
        assert (await finish(browser, brought)).status == 200, "the right browser still can"


async def test_a_login_can_be_finished_once_and_in_time(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        brought, cookies = provider.log_in(await begin(browser)), dict(browser.cookies)
        assert (await finish(browser, brought)).status == 200
        thief = Browser(console, address="10.0.0.1")
        thief.cookies = {name: text for name, text in cookies.items() if name.endswith("_oidc")}
        await is_refused(await finish(thief, brought), "invalid_grant", console, thief)
        late = Browser(console, address="10.0.0.2")
        brought = provider.log_in(await begin(late))
        await asyncio.sleep(LOGIN_MS / 1000 + 1)
        await is_refused(await finish(late, brought), "more than 10 minutes", console, late)


async def test_an_answer_of_another_provider_is_refused(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        brought = provider.log_in(await begin(browser)) | {"iss": "https://evil.example"}
        await is_refused(await finish(browser, brought), "of another provider", console, browser)


async def test_the_reason_of_a_provider_is_shown_and_no_markup(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        state = provider.log_in(await begin(browser))["state"]
        refused = {"state": state, "error": "access_denied", "error_description": "<b>no\u202e</b>"}
        answer = await finish(browser, refused)
        await is_refused(answer, "access_denied", console, browser)
        assert "<b>no" not in answer.text
        assert "\u202e" not in answer.text


@pytest.mark.parametrize("place", ["//evil.example/", "https://evil.example", "/\\evil.example", "/\t/evil.example"])
async def test_a_login_leads_to_no_other_site(tmp_path: Path, place: str) -> None:
    async with beside_provider(tmp_path) as (provider, _, browser):
        answer = await log_in(provider, browser, place)
        assert (answer.status, "evil" in answer.text, 'content="0; url=/"' in answer.text) == (200, False, True)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"issuer": "http://127.0.0.1:1"}, "it calls itself"),
        ({"token_endpoint": "http://evil.example/token"}, "is not https"),
        ({"jwks_uri": 7}, "jwks_uri"),
    ],
)
async def test_discovery_documents_that_are_refused(
    tmp_path: Path, document: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        provider.document = document
        await is_not_begun(await browser.get("/login/oidc"), why, browser)
        await browser.get("/login/oidc")
        assert len(provider.asked) == 1, "a failure counts for some seconds: everybody can press the button"
        assert sum(why in message for message in caplog.messages) == 1
        assert console.audit.lines("login") == [], "everybody could fill it"
        provider.document = {}
        await asyncio.sleep(6)
        assert (await log_in(provider, browser)).status == 200


async def test_a_provider_that_is_down_is_named_and_not_its_address(tmp_path: Path) -> None:
    (tmp_path / "oidc.json").write_text(json.dumps(Provider(port=1).settings))
    async with Console("127.0.0.1:1", oidc=tmp_path / "oidc.json") as console:
        browser = Browser(console)
        await is_not_begun(await browser.get("/login/oidc"), "Acme cannot be asked: ConnectionError", browser)


async def test_tries_are_limited(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (_, _, browser):
        made_up = {"code": "x", "state": "x"}
        answers = [await finish(browser, made_up) for _ in range(TRIES_A_MINUTE + 1)]
        assert [one.status for one in answers] == [401] * TRIES_A_MINUTE + [429]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"issuer": "http://id.example"}, "must be https"),
        ({"roles": {}}, "roles at least one value"),
        ({"roles": {"king": ["x"]}}, "king"),
        ({"scope": "email"}, "must have openid"),
        ({"clientid": "x"}, "clientid"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / "oidc.json"
    path.write_text(json.dumps(Provider(port=1).settings | change))
    with pytest.raises(SettingsError, match=why) as refused:
        OidcSettings.load(path)
    assert SECRET not in str(refused.value)


# -- what is not


async def test_a_user_of_the_provider_logs_in_and_out(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, console, browser):
        page = await browser.get("/login?next=%2Flocal%2Ftopics")
        assert 'href="/login/oidc?next=%2Flocal%2Ftopics"' in page.text
        assert "Log in with Acme" in page.text
        assert "Password" not in page.text, "there is nobody who has one"
        answer = await log_in(provider, browser, "/local/topics?q=x")
        assert (answer.status, 'content="0; url=/local/topics?q=x"' in answer.text) == (200, True)
        assert "samesite=strict" in answer.headers["set-cookie"].lower()
        assert (await browser.get("/local/topics")).status == 200
        about = await browser.json("/about")
        assert (about["user"], about["role"]) == ("oidc:anna", "admin")
        assert (await browser.post("/local/new-topic", {"name": "Orders"})).status != 403
        left = await browser.post("/login", {"leave": "1"})
        page = await browser.get(left.headers["location"])
        leave = f"{provider.issuer}/leave?" + urlencode(
            {"client_id": CLIENT, "post_logout_redirect_uri": "http://127.0.0.1:9875/login"}
        )
        assert leave.replace("&", "&amp;") in page.text
        assert (await browser.get("/local/topics")).status == 303
        assert [(one.user, one.outcome) for one in console.audit.lines("login")] == [("oidc:anna", "done")]
        assert SECRET not in "".join(one.detail for one in console.audit.lines())


async def test_a_role_is_the_highest_one_that_a_claim_grants(tmp_path: Path) -> None:
    async with beside_provider(tmp_path) as (provider, _, browser):
        for claims, role in (
            ({"groups": ["staff", "rmq-admins"]}, "admin"),
            ({"groups": "staff"}, "viewer"),
            ({"groups": ["staff"], "preferred_username": None}, "viewer"),
            ({"groups": ["staff"], "preferred_username": "\u202e7\n"}, "viewer"),
        ):
            provider.claims |= claims
            assert (await log_in(provider, browser)).status == 200
            assert (await browser.json("/about"))["role"] == role
        assert (await browser.json("/about"))["user"] == "oidc:7"
        assert (await browser.post("/local/new-topic", {"name": "Orders"})).status == 403


async def test_claims_within_objects_and_everybody(tmp_path: Path) -> None:
    async with providing() as provider:
        settings = provider.settings | {
            "roleClaim": "realm_access.roles",
            "roles": {"operator": ["ops"], "viewer": ["*"]},
        }
        (tmp_path / "oidc.json").write_text(json.dumps(settings))
        async with Console("127.0.0.1:1", oidc=tmp_path / "oidc.json") as console:
            browser = Browser(console)
            for claims, role in (({"realm_access": {"roles": ["ops"]}}, "operator"), ({"realm_access": 7}, "viewer")):
                provider.claims |= claims
                assert (await log_in(provider, browser)).status == 200
                assert (await browser.json("/about"))["role"] == role


async def test_users_with_a_password_stay(tmp_path: Path) -> None:
    (tmp_path / "users").write_text(password_line("vera", Role.VIEWER, "secret") + "\n")
    async with beside_provider(tmp_path, users=tmp_path / "users") as (_, _, browser):
        page = await browser.get("/login")
        assert ("Log in with Acme" in page.text, "Password" in page.text) == (True, True)
        assert (await browser.post("/login", {"name": "vera", "secret": "secret"})).status == 303
        assert (await browser.json("/about"))["user"] == "vera"


async def test_without_a_provider_there_is_no_such_page(tmp_path: Path) -> None:
    async with Console("127.0.0.1:1") as console:
        assert (await Browser(console).get("/login/oidc")).status == 404


async def test_the_cookie_of_a_login_is_the_hosts_alone_and_secure_under_tls(tmp_path: Path) -> None:
    async with beside_provider(tmp_path, is_secure=True) as (_, _, browser):
        answer = await browser.get("/login/oidc")
        assert answer.headers["set-cookie"].startswith("__Host-")
        assert {"HttpOnly", "Secure", "SameSite=lax", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
        asked = dict(parse_qsl(urlsplit(answer.headers["location"]).query))
        assert asked["redirect_uri"] == "https://127.0.0.1:9875/login/oidc"
