"""Pictures of every page, light and dark, wide and narrow.

``python -m tests.console.screenshots FOLDER [ADDRESS] [PAGE…]``

Without the address of a console it starts a broker with a console of its own and opens the shop of
`tests.console.world`. A person looks at them before a release; nothing compares them. Those that the documents show are
in ``FOLDER/docs`` as well, cut and with few colours: copy them to ``docs/images``.

A font with Chinese (Debian's ``fonts-wqy-microhei``) has to be there: else the switch of languages shows two boxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from playwright.async_api import Browser, async_playwright

from rmqkit import Producer
from tests.console import world
from tests.console.pages import known, make_rules

WIDTHS = {"1280": 1280, "390": 390}
SCHEMES = ("light", "dark")
FULL_MAX = 2400
SHOWN = {
    "overview": "overview-light-1280",
    "messages": "messages-light-1280",
    "message": "message-light-1280",
    "group": "group-behind-light-1280",
    "explain": "explain-answer-dark-1280",
    "phone": "overview-dark-390",
    "lite": "lite-topic-light-1280",
    "alerts": "alerts-light-1280",
    "dead": "dead-kinds-light-1280",
}
"""Pictures of the documents, ``console-NAME.png``, and what they are made of."""
SHOWN_HEIGHT, COLOURS = 800, 96
RUSH_SECONDS, RUSH = 75, 14_000
"""Orders that come meanwhile, so that charts have points and a group falls back."""


def chromium() -> str | None:
    """Debian's headless Chromium, if it is installed."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


async def shoot(base: str, folder: Path, only: list[str]) -> int:
    """Write the pictures; how many."""
    shot = 0
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=chromium(), args=arguments)
        paths = await asyncio.to_thread(known, base)
        for scheme in SCHEMES:
            for width_name, width in WIDTHS.items():
                shot += await _round(
                    browser,
                    base,
                    {k: v for k, v in paths.items() if not only or k in only},
                    folder,
                    scheme,
                    width_name,
                    width,
                )
        await browser.close()
    return shot


async def _round(
    browser: Browser, base: str, paths: dict[str, str], folder: Path, scheme: str, name: str, width: int
) -> int:
    context = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = await context.new_page()
    for title, path in paths.items():
        await page.set_viewport_size({"width": width, "height": 800})
        await page.goto(base.rstrip("/") + path, wait_until="load")
        await page.wait_for_timeout(150)
        height = await page.evaluate("document.documentElement.scrollHeight")
        await page.set_viewport_size({"width": width, "height": max(600, min(height, FULL_MAX))})
        await page.screenshot(path=folder / f"{title}-{scheme}-{name}.png")
    await context.close()
    return len(paths)


def for_documents(folder: Path) -> None:
    """Write the pictures of the documents, of those that were taken."""
    from PIL import Image

    (folder / "docs").mkdir(exist_ok=True)
    for name, taken in SHOWN.items():
        if (path := folder / f"{taken}.png").exists():
            with Image.open(path) as picture:
                cut = picture.convert("RGB").crop((0, 0, picture.width, min(SHOWN_HEIGHT, picture.height)))
            few = cut.quantize(COLOURS, dither=Image.Dither.NONE)
            few.save(folder / "docs" / f"console-{name}.png", optimize=True)


@contextlib.asynccontextmanager
async def running(rush: int = 0) -> AsyncIterator[str]:
    """A broker with a console, and the open shop, which gets so many orders in a while; the console's address."""
    with tempfile.TemporaryDirectory() as store:
        environment = {**os.environ, "RMQCONF_grpcServerPort": "-1", "XDG_STATE_HOME": store}
        ports = ("--namesrv-port", "0", "--port", "0", "--store", f"{store}/store")
        async with (
            _serving(environment, "standalone", *ports) as broker,
            world.shop(broker["namesrv"]) as producer,
            # After the shop is open: the console's first look finds everybody.
            _serving(environment, "console", "-n", broker["namesrv"], "--port", "0") as console,
        ):
            await asyncio.to_thread(make_rules, console["console"])
            rushing = asyncio.create_task(_rush(producer, rush))
            yield console["console"]
            rushing.cancel()
            await asyncio.gather(rushing, return_exceptions=True)


async def _rush(producer: Producer, orders: int) -> None:
    pause_s = 0.25
    at_once = -(-orders * pause_s // RUSH_SECONDS) or 1
    for first in range(world.ORDERS, world.ORDERS + orders, int(at_once)):
        await asyncio.gather(*(producer.send(world.order(first + number)) for number in range(int(at_once))))
        await asyncio.sleep(pause_s)


@contextlib.asynccontextmanager
async def _serving(environment: dict[str, str], *words: str) -> AsyncIterator[dict[str, str]]:
    """A server as a process; what its ready line says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rmqkit", *words, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        yield dict(word.split("=", 1) for word in line.split() if "=" in word)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def main(folder: Path, base: str | None, only: list[str]) -> None:
    if base is not None:
        print(f"{await shoot(base, folder, only)} pictures in {folder}")
    else:
        async with running(RUSH) as address:
            await asyncio.sleep(RUSH_SECONDS + 5)
            print(f"{await shoot(address, folder, only)} pictures in {folder}")
    for_documents(folder)


if __name__ == "__main__":
    chosen = Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/screenshots")
    chosen.mkdir(parents=True, exist_ok=True)
    address = sys.argv[2] if len(sys.argv) > 2 and ":" in sys.argv[2] else None
    asyncio.run(main(chosen, address, sys.argv[3 if address else 2 :]))
