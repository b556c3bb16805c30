"""The web console in a real browser: Debian's headless Chromium, driven by Playwright; axe checks every page.

One browser and one console over the shop of `tests.console.world`, and one with users, serve all tests of this file.
Each page is loaded once: axe finds no violation of WCAG 2.2 AA, in the dark no contrast that is too low, nothing
scrolls sideways at 360 px, no other origin is requested, the content policy refuses nothing, and the browser's console
has no error. Then each form is used by keyboard alone, and its result is checked in the same way. Without a browser the
tests are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from rmqkit.console import Console
from rmqkit.console.access.logins import Role, password_line
from rmqkit.console.server.serve import serve
from tests.console.pages import fetch, known
from tests.console.provider import providing
from tests.console.screenshots import chromium, running

playwright = pytest.importorskip("playwright.sync_api")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
anyio_threads = pytest.importorskip("anyio.from_thread")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.real_time,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium() is None, reason="no browser: apt-get install chromium-headless-shell"),
]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 800}
SECONDS = 60
TABS_MAX = 150


class Shop(Struct):
    """The objects that the tests share: a browser, the addresses of a console and of one with users, and the pages."""

    browser: Any
    base: str
    paths: dict[str, str]
    with_users: str


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    users = tmp_path_factory.mktemp("console") / "users"
    users.write_text(password_line("anna", Role.VIEWER, "a long secret"))
    with (
        anyio_threads.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running()) as base,
        portal.wrap_async_context_manager(console_with_users(users)) as with_users,
        playwright.sync_playwright() as driver,
    ):
        portal.call(functools.partial(clients_are_known, base))
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=chromium(), args=arguments)
        yield Shop(browser, base.rstrip("/"), known(base), with_users.rstrip("/"))
        browser.close()


async def clients_are_known(base: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not (await asyncio.to_thread(fetch, base, "/local/clients"))["clients"]["rows"]:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def console_with_users(users: Path) -> AsyncIterator[str]:
    """Run a console without a cluster, for its logins. Its provider has another host name, so it is another site."""
    loop, until = asyncio.get_running_loop(), asyncio.Event()
    ready: asyncio.Future[str] = loop.create_future()
    async with providing("localhost") as provider:
        oidc = users.with_name("oidc.json")
        oidc.write_text(json.dumps(provider.settings))
        console = Console("127.0.0.1:1", users=users, oidc=oidc)
        task = asyncio.create_task(serve(console, "127.0.0.1", 0, ready=ready.set_result, until=until))
        try:
            yield await ready
        finally:
            until.set()
            await task


class Looker:
    """A page of the browser, and the faults found on it."""

    def __init__(self, shop: Shop, base: str) -> None:
        self.context = shop.browser.new_context(color_scheme="light", viewport=WIDE)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self._said: list[str] = []
        self.page.on("console", lambda message: self._said.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self._said.append(str(error)))
        self.page.on("request", lambda one: self._said.append(one.url) if not one.url.startswith(base) else None)

    def look(self, name: str) -> None:
        """Check the present page, in both color schemes and at both widths."""
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        self._note(name, axe_playwright.Axe().run(self.page, options=options).response)
        self.page.emulate_media(color_scheme="dark")
        dark = {"runOnly": {"type": "rule", "values": ["color-contrast"]}, "resultTypes": ["violations"]}
        self._note(f"{name}, dark", self.page.evaluate("options => axe.run(options)", dark))
        self.page.set_viewport_size(NARROW)
        wide = self.page.evaluate("document.documentElement.scrollWidth")
        if wide > NARROW["width"]:
            self.faults.append(f"{name}: {wide} px wide at 360 px")
        self.page.set_viewport_size(WIDE)
        self.page.emulate_media(color_scheme="light")
        # Browsers log a missing page, or a refused one, as an error.
        self.faults += [
            f"{name}: {text}" for text in self._said if "the server responded with a status of 4" not in text
        ]
        self._said.clear()

    def _note(self, name: str, found: dict[str, Any]) -> None:
        for one in found["violations"]:
            where = "; ".join(str(node["target"]) for node in one["nodes"][:3])
            self.faults.append(f"{name}: {one['id']}: {one['help']}: {where}")

    # -- by keyboard

    def reach(self, selector: str) -> None:
        """Press Tab until an element has the focus, and check that the focus is visible."""
        for _ in range(TABS_MAX):
            if self.page.evaluate("one => document.activeElement.matches(one)", selector):
                style = self.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none", f"the focus of {selector} cannot be seen"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not come to {selector} on {self.page.url}")

    def press(self, selector: str) -> None:
        """Move to a button and press it."""
        self.reach(selector)
        self.page.keyboard.press("Enter")

    def type(self, selector: str, text: str) -> None:
        """Move to a field and type into it."""
        self.reach(selector)
        self.page.keyboard.type(text)


@pytest.fixture
def looker(shop: Shop) -> Iterator[Looker]:
    looking = Looker(shop, shop.base)
    yield looking
    looking.context.close()


def test_every_page_in_a_browser(shop: Shop, looker: Looker) -> None:
    for name, path in shop.paths.items():
        looker.page.goto(shop.base + path, wait_until="load")
        assert looker.page.locator("h1").count() == 1, name
        looker.look(name)
    assert not looker.faults, "\n".join(looker.faults)


def test_the_language_is_switched_and_stays(shop: Shop, looker: Looker) -> None:
    page = looker.page
    page.goto(f"{shop.base}/local/groups")
    page.get_by_role("button", name="ZH").click()
    page.locator("h1", has_text="消费组").wait_for()
    page.locator("#pause").click()
    page.locator("#pause", has_text="继续").wait_for()
    looker.look("groups in Chinese")
    page.get_by_role("button", name="EN").click()
    page.locator("h1", has_text="Groups").wait_for()
    assert not looker.faults, "\n".join(looker.faults)


def filters(path: str, text: str, words: str) -> Callable[[Shop, Looker], None]:
    """Return the steps through a list's filter."""

    def way(shop: Shop, looker: Looker) -> None:
        looker.page.goto(shop.base + path.format(**shop.paths))
        looker.type("main input[type=search]", text)
        looker.page.keyboard.press("Enter")
        looker.page.locator(".found", has_text=words).wait_for()

    return way


def searches_everything(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/local/groups")
    looker.type("#search", "order-7")
    looker.page.keyboard.press("Enter")
    looker.page.wait_for_url("**/local/topics/Orders/at/**")
    looker.page.goto(f"{shop.base}/local/topics/Emails/send")
    looker.reach("textarea[name=body]")
    looker.page.keyboard.press("Control+K")
    looker.page.keyboard.type("ing")
    looker.page.keyboard.press("Enter")
    looker.page.locator("h1", has_text="Search").wait_for()
    looker.page.locator("main li a[href$='/groups/billing']").wait_for()


def searches(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/local/topics/Orders/messages")
    looker.reach("select[name=order]")
    looker.page.keyboard.press("ArrowDown")
    looker.type("input[name=tags]", "new || changed")
    looker.type("input[name=sql]", "amount > 0")
    looker.press("form.grid button")
    looker.page.wait_for_url("**order=oldest**")
    # Tags and SQL92 exclude each other: the page shows this, and the form can be filled again.
    looker.page.goto(f"{shop.base}/local/topics/Orders/messages")
    looker.type("input[name=key]", "order-7")
    looker.page.keyboard.press("Enter")
    looker.page.locator(".found", has_text="1 message").wait_for()


def follows(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/local/topics/Orders/tail")
    looker.type("form.grid input[name=tags]", "new")
    looker.press("form.grid button")
    looker.page.wait_for_url("**/tail?tags=new")
    looker.press("#pause")
    looker.page.locator("#pause", has_text="Continue").wait_for()


def sends(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/local/topics/Emails/send")
    looker.type("textarea[name=body]", "from a keyboard")
    looker.type("input[name=tags]", "typed")
    looker.type("input[name=queue]", "1")
    looker.type("textarea[name=properties]", "country=DE")
    looker.press("form.form button.main")
    looker.page.locator("h1", has_text="Review").wait_for()
    looker.look("review of a send")
    looker.press("form.confirm button")
    looker.page.locator(".badge.good", has_text="done").wait_for()


def acts(action: str, *typed: tuple[str, str]) -> Callable[[Shop, Looker], None]:
    """Return the steps of an action on a message, with its review."""

    def way(shop: Shop, looker: Looker) -> None:
        looker.page.goto(shop.base + shop.paths["message"])
        form = f"form:has(input[value={action}])"
        for field, text in typed:
            looker.type(f"{form} {field}", text)
        looker.press(f"{form} button")
        looker.page.locator("h1", has_text="Review").wait_for()
        looker.look(f"review of {action}")
        looker.press("form.confirm button")
        looker.page.locator(".badge.good", has_text="done").wait_for()

    return way


def explains(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/local/groups/warehouse/explain")
    looker.type("input[name=topic]", "Orders")
    looker.type("input[name=key]", "order-5")
    looker.page.keyboard.press("Enter")
    looker.page.locator(".verdict").wait_for()
    looker.press("summary")
    looker.page.locator("details[open] th", has_text="told by").or_(
        looker.page.locator("details[open]")
    ).first.wait_for()


def logs_in(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.with_users}/about")
    looker.type("input[name=name]", "anna")
    looker.type("input[name=secret]", "wrong")
    looker.page.keyboard.press("Enter")
    looker.page.locator(".trouble", has_text="password is wrong").wait_for()
    looker.look("login that failed")
    looker.type("input[name=name]", "anna")
    looker.type("input[name=secret]", "a long secret")
    looker.press("form.form button.main")
    looker.page.locator(".user", has_text="anna").wait_for()
    looker.press("button[name=leave]")
    looker.page.locator("h1", has_text="Log in").wait_for()


def chooses_dark(shop: Shop, looker: Looker) -> None:
    looker.page.goto(f"{shop.base}/about")
    looker.press("form.theme button")
    looker.page.locator("html[data-theme=dark]").wait_for()


FORMS: dict[str, Callable[[Shop, Looker], None]] = {
    "search": searches_everything,
    "topics": filters("/local/topics", "Ord", "1 of"),
    "groups": filters("/local/groups", "bill", "1 of"),
    "clients": filters("/local/clients", "no such client", "0 of"),
    "settings": filters("{settings}", "no such setting", "0 of"),
    "audit": filters("/audit", "nobody at all", "0 of"),
    "messages": searches,
    "tail": follows,
    "send": sends,
    "resend": acts("resend"),
    "copy": acts("copy", ("input[name=to]", "Emails")),
    "push": acts("push"),
    "explain": explains,
    "login": logs_in,
    "theme": chooses_dark,
}
"""Each form, and its steps by keyboard alone."""


@pytest.mark.parametrize("form", FORMS)
def test_each_form_by_keyboard_alone(form: str, shop: Shop) -> None:
    looker = Looker(shop, shop.with_users if form == "login" else shop.base)
    FORMS[form](shop, looker)
    looker.look(f"after {form}")
    looker.context.close()
    assert not looker.faults, "\n".join(looker.faults)


def test_a_login_at_another_site_comes_back_with_a_session(shop: Shop) -> None:
    """The session's cookie is strict: a browser would not send it along with a redirect from the provider."""
    context = shop.browser.new_context()
    page = context.new_page()
    page.goto(f"{shop.with_users}/audit?q=x")
    page.get_by_role("link", name="Log in with Acme").click()
    page.wait_for_url(f"{shop.with_users}/audit?q=x")
    page.locator(".user", has_text="oidc:anna").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("link", name="Log out of Acme").wait_for()
    page.goto(f"{shop.with_users}/about")
    page.locator("h1", has_text="Log in").wait_for()
    context.close()


def test_keys_without_a_form(shop: Shop, looker: Looker) -> None:
    page = looker.page
    page.goto(f"{shop.base}/local/")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url("**/local/topics")
    page.keyboard.press("/")
    page.keyboard.type("Orders")
    page.locator(".found", has_text="1 of").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    page.locator("tbody a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/local/topics/Orders")
    page.keyboard.press("?")
    assert page.locator("#help").evaluate("one => one.open")
    looker.look("help")
    assert not looker.faults, "\n".join(looker.faults)


def test_forms_without_javascript(shop: Shop) -> None:
    context = shop.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{shop.base}/local/topics")
    page.get_by_label("Name").fill("Ord")
    page.get_by_role("button", name="Filter").click()
    assert "1 of" in page.locator(".found").inner_text()
    page.goto(f"{shop.base}/local/topics/Emails/send")
    page.get_by_label("Body").fill("from a browser")
    page.get_by_role("button", name="Review").click()
    page.get_by_role("button", name="Do it").click()
    assert page.locator(".badge.good").inner_text()
    context.close()
