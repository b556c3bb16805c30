"""The console in a FastAPI program: the how-to guide's example, mounted below a path, behind the program's login."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rmqkit.standalone import Standalone
from tests.console.asgi import Browser
from tests.sources import ROOT

GUIDE = ROOT / "docs" / "how-to" / "console.md"
PAGES = ("", "topics", "groups", "brokers", "ha", "clients", "name-servers")


def example(name_servers: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the guide's module ``service.py`` defines."""
    text = re.search(r'```python title="service.py"\n(.*?)```', GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    monkeypatch.setenv("NAMESRV_ADDR", name_servers)
    names: dict[str, Any] = {}
    exec(compile(text.group(1), "service.py", "exec"), names)
    return names


async def test_the_example_of_the_guide_serves_below_its_path_and_behind_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Standalone(tmp_path) as both:
        service = example(both.namesrv_address, monkeypatch)
        app = service["app"]
        async with service["lifespan"](app):
            browser, signed = Browser(app, host="shop.example"), {"authorization": "Bearer anna"}
            for page in PAGES:
                answer = await browser.get(f"/rmq/local/{page}", signed)
                assert answer.status == 200, (page, answer.text[-500:])
                links = set(re.findall(r'(?:href|src|action|data-events)="(/[^"]*)"', answer.text))
                assert links
                assert all(link.startswith("/rmq/") for link in links), sorted(links)
            stylesheet = next(link for link in links if "console.css" in link)
            assert (await browser.get(stylesheet, signed)).headers["content-type"].startswith("text/css")
            assert (await browser.get("/rmq/about?format=json", signed)).json()["user"] == "anna"
            assert (await browser.get("/rmq/", signed)).headers["location"] == "/rmq/local/"
            stranger = await browser.get("/rmq/local/topics")
            assert (stranger.status, "refuses you access" in stranger.text) == (403, True)
            changed = await browser.post("/rmq/local/topics/TBW102/send", {"body": "x"}, signed)
            assert (changed.status, "anna is a viewer" in changed.text) == (403, True)
            assert [line.outcome for line in service["console"].audit.lines()] == ["refused"]
            assert (await Browser(app, host="evil.example").get("/rmq/local/", signed)).status == 421
