"""A browser for tests: it calls the console like an ASGI server, on the loop of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from rmqkit.console import Console
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.standalone import Standalone

HOST = "127.0.0.1:9875"


class Answer(Struct):
    """The console's answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """Asks a console; keeps cookies, and says where its requests come from as browsers do."""

    def __init__(self, app: Any, *, host: str = HOST, root: str = "", address: str = "127.0.0.1") -> None:
        self._app = app
        self._host = host
        self._root = root
        self._address = address
        self.cookies: dict[str, str] = {}

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.ask("GET", path, headers or {}, b"")

    async def json(self, path: str) -> Any:
        answer = await self.get(path, {"accept": "application/json"})
        assert answer.status == 200, answer.text
        return answer.json()

    async def post(self, path: str, form: dict[str, str], headers: dict[str, str] | None = None) -> Answer:
        sent = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"} | (headers or {})
        return await self.ask("POST", path, {k: v for k, v in sent.items() if v}, urlencode(form).encode())

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        scope, chunks, started = self.scope(method, path, headers), [], {}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            else:
                chunks.append(message.get("body", b""))

        await self._app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in started["headers"]}
        for name, value in started["headers"]:
            if name == b"set-cookie":
                cookie, _, kept = value.decode().partition(";")[0].partition("=")
                self.cookies[cookie] = kept.strip('"')
        return Answer(started["status"], found, b"".join(chunks))

    @asynccontextmanager
    async def stream(self, path: str, headers: dict[str, str] | None = None) -> AsyncIterator[asyncio.Queue[str]]:
        """The events of a stream, as they come; leaving closes the browser's side."""
        events: asyncio.Queue[str] = asyncio.Queue()
        gone = asyncio.Event()
        left = ""

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal left
            if message["type"] == "http.response.start" and message["status"] != 200:
                events.put_nowait(f"status {message['status']}")
            left += message.get("body", b"").decode()
            *whole, left = left.split("\n\n")
            for event in whole:
                if event.startswith("event:"):
                    events.put_nowait(event)

        task = asyncio.create_task(self._app(self.scope("GET", path, headers or {}), receive, send))
        try:
            yield events
        finally:
            gone.set()
            await asyncio.gather(task, return_exceptions=True)

    def scope(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        from urllib.parse import unquote

        parts = urlsplit(path)
        sent = {"host": self._host} | headers
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "root_path": self._root,
            "query_string": parts.query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value],
            "client": (self._address, 50_000),
            "server": ("127.0.0.1", 9875),
        }


@asynccontextmanager
async def served(
    store: Path, *, authentication: AuthenticationSettings | None = None, **options: Any
) -> AsyncIterator[tuple[Standalone, Console, Browser]]:
    """A broker, a console for it, and a browser."""
    async with (
        Standalone(store, authentication=authentication) as both,
        Console(both.namesrv_address, **options) as console,
    ):
        yield both, console, Browser(console)
