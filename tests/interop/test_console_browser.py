"""The web console in a real browser: Debian's headless Chromium, driven by Playwright; axe looks at every page.

Each page: axe finds no violation of WCAG 2.2 AA, nor one of its colours in the dark, nothing scrolls sideways at
360 px, no other origin is asked, the content policy refuses nothing, no error is on the browser's console. Then the
pages without JavaScript, and a way through them by keyboard alone. Skipped, with the reason, where there is no browser.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.console.pages import fetch, known
from tests.console.screenshots import chromium, running

playwright = pytest.importorskip("playwright.async_api")
axe_playwright = pytest.importorskip("axe_playwright_python.async_playwright")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.real_time,
    pytest.mark.skipif(chromium() is None, reason="no browser: apt-get install chromium-headless-shell"),
]

RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}
COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
"""What may be another in the dark: console.css changes colours alone there."""
WIDE = {"width": 1280, "height": 900}
SECONDS = 60


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[object, str, dict[str, str]]]:
    """A browser, the address of a console over the shop, and its pages."""
    async with running() as base, playwright.async_playwright() as driver:
        async with asyncio.timeout(SECONDS):
            while not (await asyncio.to_thread(fetch, base, "/local/clients"))["clients"]["rows"]:
                await asyncio.sleep(0.2)
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser, base.rstrip("/"), await asyncio.to_thread(known, base)
        finally:
            await browser.close()


@pytest.mark.timeout(600)
async def test_every_page_in_a_browser() -> None:
    faults: list[str] = []
    async with opened() as (browser, base, paths):
        context = await browser.new_context(viewport=WIDE)
        page = await context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda one: said.append(one.url) if not one.url.startswith(base) else None)
        for name, path in paths.items():
            said.clear()
            await page.emulate_media(color_scheme="light")
            await page.set_viewport_size(WIDE)
            await page.goto(base + path, wait_until="load")
            for scheme, rules in (("light", RULES), ("dark", COLOURS)):
                await page.emulate_media(color_scheme=scheme)
                found = await axe_playwright.Axe().run(page, options=rules)
                for one in found.response["violations"]:
                    where = "; ".join(str(node["target"]) for node in one["nodes"][:3])
                    faults.append(f"{name} {scheme}: {one['id']}: {one['help']}: {where}")
            await page.set_viewport_size({"width": 360, "height": 800})
            wide = await page.evaluate("document.documentElement.scrollWidth")
            if wide > 360:
                faults.append(f"{name}: {wide} px wide at 360 px")
            # A page that is not there is an error that browsers note.
            faults += [f"{name}: {text}" for text in said if not (name == "not-found" and "404" in text)]
        await context.close()
    assert not faults, "\n".join(faults)


@pytest.mark.timeout(300)
async def test_without_javascript_and_by_keyboard() -> None:
    async with opened() as (browser, base, paths):
        context = await browser.new_context(java_script_enabled=False)
        page = await context.new_page()
        for path in paths.values():
            await page.goto(base + path)
            assert await page.locator("h1").count() == 1
        await page.goto(base + "/local/topics")
        await page.get_by_label("Name").fill("Ord")
        await page.get_by_role("button", name="Filter").click()
        assert "1 of" in await page.locator(".found").inner_text()
        await page.goto(base + "/local/topics/Emails/send")
        await page.get_by_label("Body").fill("from a browser")
        await page.get_by_role("button", name="Review").click()
        await page.get_by_role("button", name="Do it").click()
        assert await page.locator(".badge.good").inner_text()
        await context.close()

        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(base + "/local/")
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        await page.wait_for_url("**/local/topics")
        await page.keyboard.press("/")
        await page.keyboard.type("Orders")
        await page.locator(".found", has_text="1 of").wait_for()
        await page.keyboard.press("Tab")
        await page.keyboard.press("Escape")
        await page.locator("tbody a").first.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/local/topics/Orders")
        await page.keyboard.press("?")
        assert await page.locator("#help").evaluate("one => one.open")
        await context.close()
