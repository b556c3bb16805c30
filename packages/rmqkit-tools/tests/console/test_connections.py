"""Connections of the console's users: closed when too many are open, and never under a request that uses them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from rmqkit.console.access.logins import Role, User
from rmqkit.console.request import state
from rmqkit.console.request.request import Ask
from rmqkit.console.views import groups
from rmqkit.errors import RmqError
from rmqkit.remoting.authentication import Credentials
from tests.console.asgi import served


async def test_a_connection_is_not_closed_under_a_request_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ADMINS_MAX", 1)
    entered, may_continue = asyncio.Event(), asyncio.Event()
    used = []

    async def slow(ask: Ask) -> PlainTextResponse:
        admin = ask.admin
        used.append(admin)
        await admin.calls.topic_names()
        if len(used) == 1:
            entered.set()
            await may_continue.wait()
            await admin.calls.topic_names()
        return PlainTextResponse("shown")

    names = iter(["anna", "paul", "paul"])

    def next_user(_: object) -> User:
        name = next(names)
        return User(name, Role.VIEWER, Credentials(access_key=name, secret_key="secret12"))

    async with served(tmp_path, authorize=next_user) as (_, console, browser):
        console.routes = [(p, r, slow if v is groups.groups else v) for p, r, v in console.routes]
        first = asyncio.ensure_future(browser.get("/local/groups"))
        await entered.wait()
        assert (await browser.get("/local/groups")).text == "shown"
        assert not first.done()
        may_continue.set()
        assert (await first).text == "shown"
        # Nobody uses it now, and one connection is too many.
        await browser.get("/local/groups")
        with pytest.raises(RmqError):
            await used[0].calls.topic_names()
        assert await used[-1].calls.topic_names()
