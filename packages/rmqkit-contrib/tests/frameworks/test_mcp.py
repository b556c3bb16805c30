"""MCP servers of the official SDK with our session manager: unchanged clients, kills, sessions, bad event ids."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
from mcp.client.client import Client
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp.shared.exceptions import MCPError
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCResponse

import rmqkit
from rmqkit.errors import SettingsError
from rmqkit.mcp import SessionEvents, SessionManager, streamable_http_app
from tests.frameworks.processes import Processes
from tests.streams.test_streams import opened

SECONDS_MAX = 120


class Door:
    """A load balancer: clients connect to its port, and it forwards to the port of the present server. While there is
    no server, clients wait."""

    def __init__(self) -> None:
        self.server_bytes = bytearray()
        self._target: int | None = None
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self):
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *raised):
        self._listening.close()
        self.close()

    def open(self, port: int) -> None:
        self._target = port
        self._changed.set()

    def close(self) -> None:
        """Cut all connections, and let new ones wait."""
        self._target = None
        self._changed.clear()
        for one in tuple(self._writers):
            one.transport.abort()

    async def _serve(self, reader, writer):
        await self._changed.wait()
        there, here = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, here}
        await asyncio.gather(self._pump(reader, here, None), self._pump(there, writer, self.server_bytes))

    async def _pump(self, reader, writer, copy):
        try:
            while data := await reader.read(1 << 16):
                if copy is not None:
                    copy += data
                writer.write(data)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def last_event_id(self) -> str:
        return re.findall(rb"id: (\S+)", self.server_bytes)[-1].decode()


def connected(door: Door) -> Client:
    return Client(f"http://127.0.0.1:{door.port}/mcp", mode="legacy")


async def count_to_5(client, seen, half):
    async def on_progress(progress, total, message):
        seen.append(message)
        if len(seen) == 2:
            half.set()

    return await client.call_tool("count", {"to": 5}, progress_callback=on_progress)


@pytest.mark.real_time
async def test_an_unchanged_client_resumes_a_tool_call_after_its_server_was_killed(tmp_path):
    seen, half = [], asyncio.Event()
    async with asyncio.timeout(SECONDS_MAX), Door() as door:
        with Processes("mcp_server.py", tmp_path) as processes:
            door.open(await processes.start())
            async with connected(door) as client:
                calling = asyncio.create_task(count_to_5(client, seen, half))
                await half.wait()
                door.close()
                (tmp_path / "go").touch()
                async with rmqkit.streams.embedded(tmp_path / "data", "Mcp") as streams:
                    stored = [one async for one in streams.read_after(door.last_event_id())]
                assert stored[-1].is_last, "the server stored the response while the client was away"
                processes.kill()
                door.open(await processes.start())
                result = await calling
                assert (result.content[0].text, seen) == ("counted to 5", [f"step {i}" for i in range(5)])
                added = await client.call_tool("add", {"a": 2, "b": 3})
                assert added.content[0].text == "5", "the session continues"


@pytest.mark.slow
@pytest.mark.real_time
async def test_a_tool_call_that_was_killed_ends_with_an_error(tmp_path):
    seen, half = [], asyncio.Event()
    async with asyncio.timeout(SECONDS_MAX), Door() as door:
        with Processes("mcp_server.py", tmp_path, "--single") as processes:
            door.open(await processes.start())
            async with connected(door) as client:
                calling = asyncio.create_task(count_to_5(client, seen, half))
                await half.wait()
                processes.kill()
                door.close()
                door.open(await processes.start())
                with pytest.raises(MCPError, match="the server was restarted before it answered the request"):
                    await calling
                assert seen == ["step 0", "step 1"]


# ---------------------------------------------------------------- the events of a session

SESSION, OTHER = "a" * 32, "b" * 32
RESPONSE = JSONRPCResponse(jsonrpc="2.0", id=7, result={"ok": True})


def notification(i: int) -> JSONRPCNotification:
    return JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params={"i": i})


async def replayed(events, after):
    """Return the event ids and the messages of a replay that ends."""
    sent = []

    async def send(event):
        sent.append(event)

    assert await events.replay_events_after(after, send) is None
    return [(one.event_id, one.message) for one in sent]


def failure(messages):
    ((_, message),) = messages
    assert isinstance(message, JSONRPCError)
    return message.error.code, message.error.message


async def test_a_replay_begins_after_any_event_and_ends_with_the_response(tmp_path):
    async with opened(tmp_path) as (_, streams):
        events = SessionEvents(streams, SESSION)
        messages = [None, notification(0), None, notification(1), RESPONSE]
        ids = [await events.store_event("7", message) for message in messages]
        assert ids == [f"1.{i}.{SESSION}-7" for i in range(5)]
        for i, after in enumerate(ids):
            later = zip(ids[i + 1 :], messages[i + 1 :], strict=True)
            expected = [(event_id, message) for event_id, message in later if message is not None]
            assert await replayed(SessionEvents(streams, SESSION), after) == expected


async def test_a_replay_follows_a_request_that_another_process_handles(tmp_path):
    async with opened(tmp_path) as (_, streams):
        here, there = SessionEvents(streams, SESSION), SessionEvents(streams, SESSION)
        first = await there.store_event("7", None)
        replaying = asyncio.create_task(replayed(here, first))
        for message in (notification(0), RESPONSE):
            await asyncio.sleep(20)
            await there.store_event("7", message)
        assert [message for _, message in await replaying] == [notification(0), RESPONSE]


@pytest.mark.parametrize("request_id", ["7", "a-b_C", "x" * 31, "x" * 32, "x" * 5000, "ö", "7.8", "a b", "h-1", ""])
async def test_streams_of_any_request_ids_are_apart(tmp_path, request_id):
    async with opened(tmp_path) as (_, streams):
        events = SessionEvents(streams, SESSION)
        ids = {one: await events.store_event(one, None) for one in (request_id, "other", "h-2")}
        assert len({one.rpartition(".")[2] for one in ids.values()}) == 3
        await events.store_event(request_id, RESPONSE)
        assert [message for _, message in await replayed(events, ids[request_id])] == [RESPONSE]


@pytest.mark.parametrize(
    "after",
    [
        "",
        "x",
        "1.0",
        f"1.0.{OTHER}-7",
        f"1.0.{SESSION}",
        f"1.0.{SESSION}-ö",
        "1.0.7",
    ],
)
async def test_nothing_is_replayed_after_ids_of_other_sessions_and_no_ids(tmp_path, after):
    async with opened(tmp_path) as (_, streams):
        for session in (SESSION, OTHER):
            for message in (None, notification(0), RESPONSE):
                await SessionEvents(streams, session).store_event("7", message)
        assert await replayed(SessionEvents(streams, SESSION), after) == []


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (f"1.5.{SESSION}-7", "the newest event is 0"),
        (f"x.{SESSION}-7", "this is not an event id"),
        (f"1.0.{SESSION}-", "expired"),
    ],
)
async def test_an_id_without_an_event_ends_the_request_with_an_error(tmp_path, after, why):
    async with opened(tmp_path) as (_, streams):
        events = SessionEvents(streams, SESSION)
        await events.store_event("7", None)
        code, text = failure(await replayed(events, after))
        assert code == -32000
        assert why in text


async def test_expired_events_end_a_request_and_other_messages_continue(tmp_path):
    async with opened(tmp_path, {"lite_expiry_interval_ms": 5000}, expire_after=60) as (_, streams):
        events = SessionEvents(streams, SESSION)
        request = await events.store_event("7", None)
        await events.store_event("7", notification(0))
        other = await events.store_event(GET_STREAM_KEY, notification(1))
        await events.store_event(GET_STREAM_KEY, notification(2))
        await asyncio.sleep(200)
        assert "has expired" in failure(await replayed(events, request))[1]
        sent = asyncio.Queue()
        replaying = asyncio.create_task(events.replay_events_after(other, sent.put))
        await asyncio.sleep(1)
        await events.store_event(GET_STREAM_KEY, notification(3))
        assert (await sent.get()).message == notification(3)
        events.close()
        assert await replaying is None
        assert sent.empty()


@pytest.mark.parametrize("single", [False, True])
async def test_a_request_of_a_former_process_fails_only_if_there_is_no_other_process(tmp_path, single):
    async with opened(tmp_path) as (_, streams):
        lost = await SessionEvents(streams, SESSION).store_event("7", None)
        now = SessionEvents(streams, SESSION, single_process=single)
        running = await now.store_event("8", None)
        answered = await now.store_event("9", None)
        await now.store_event("9", RESPONSE)
        unrelated = await now.store_event(GET_STREAM_KEY, notification(0))
        assert now._running == {f"{SESSION}-8"}, "only running requests need memory"
        assert [message for _, message in await replayed(now, answered)] == [RESPONSE]
        for after, is_lost in ((lost, single), (running, False), (unrelated, False)):
            replaying = asyncio.create_task(replayed(now, after))
            await asyncio.sleep(20)
            assert replaying.done() == is_lost
            if is_lost:
                assert failure(await replaying) == (-32000, "the server was restarted before it answered the request")
            else:
                now.close()
                assert await replaying == []
        if single:
            assert len(await replayed(now, lost)) == 1, "the error is stored once"


async def test_events_without_a_broker_have_no_id_and_are_reported_once(tmp_path, caplog):
    async with opened(tmp_path) as (servers, streams):
        events = SessionEvents(streams, SESSION)
        first = await events.store_event("7", None)
        await servers.stop_broker()
        assert [await events.store_event("7", notification(i)) for i in range(2)] == ["", ""]
        reports = [one for one in caplog.messages if "cannot be replayed" in one]
        assert len(reports) == 1
        await servers.start_broker()
        await events.store_event("7", RESPONSE)
        assert (await replayed(events, first))[-1][1] == RESPONSE


async def test_a_response_that_is_too_large_for_the_broker_is_replayed_as_an_error(tmp_path):
    async with opened(tmp_path) as (_, streams):
        events = SessionEvents(streams, SESSION)
        first = await events.store_event("7", None)
        large = JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": "x" * (5 << 20)})
        assert await events.store_event("7", large) == f"1.1.{SESSION}-7"
        assert "the response was not stored" in failure(await replayed(events, first))[1]


@pytest.mark.parametrize("session_id", ["", "a-b", "x" * 33, "a.b", "ö"])
def test_refused_session_ids(session_id):
    with pytest.raises(SettingsError, match="session id"):
        SessionEvents(None, session_id)


# ---------------------------------------------------------------- sessions

INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-11-25"}


class User:
    """Requests of one user to one manager."""

    def __init__(self, manager: SessionManager, name: str | None = None) -> None:
        self._manager, self._name = manager, name
        self.session_id = ""

    async def _app(self, scope, receive, send):
        if self._name is not None:
            scope["user"] = AuthenticatedUser(AccessToken(token="t", client_id=self._name, scopes=[]))
        await self._manager.handle_request(scope, receive, send)

    async def request(self, method, message=None, headers=None):
        headers = HEADERS | (headers or {}) | ({"mcp-session-id": self.session_id} if self.session_id else {})
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self._app), base_url="http://x") as client:
            return await client.request(method, "/mcp", headers=headers, json=message)

    async def call(self, name, params, request_id=1):
        return await self.request("POST", {"jsonrpc": "2.0", "id": request_id, "method": name, "params": params})

    async def initialize(self, **more):
        answer = await self.call("initialize", INITIALIZE | more)
        self.session_id = answer.headers.get("mcp-session-id", "")
        return answer

    async def add(self, request_id=1):
        """Call a tool. Return its result, or the status of the answer."""
        answer = await self.call("tools/call", {"name": "add", "arguments": {"a": 2, "b": 3}}, request_id)
        return (
            answer.json()["result"]["structuredContent"]["result"] if answer.status_code == 200 else answer.status_code
        )


@asynccontextmanager
async def running(streams, **options):
    """A session manager that answers with JSON."""
    server = MCPServer("test")

    @server.tool()
    async def add(a: int, b: int) -> int:
        return a + b

    manager = SessionManager(server._lowlevel_server, streams, json_response=True, **options)
    async with manager.run():
        yield manager


@asynccontextmanager
async def two_managers(tmp_path, **options):
    """Two managers, as in two processes."""
    async with (
        opened(tmp_path) as (servers, streams),
        running(streams, **options) as one,
        running(streams, **options) as two,
    ):
        yield servers, one, two


def moved(user: User, manager: SessionManager, name: str | None = None) -> User:
    """The same client at another manager."""
    other = User(manager, name)
    other.session_id = user.session_id
    return other


@pytest.mark.parametrize("name", [None, "ann"])
async def test_a_session_continues_at_another_process(tmp_path, name):
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one, name)
        await user.initialize()
        assert (await user.add(), await moved(user, two, name).add(), await user.add()) == (5, 5, 5)


@pytest.mark.parametrize(("owner", "other"), [("ann", "bob"), ("ann", None), (None, "bob")])
async def test_a_session_is_of_its_user_only(tmp_path, owner, other):
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one, owner)
        await user.initialize()
        assert await moved(user, two, other).add() == 404
        assert await moved(user, two, owner).add() == 5
        assert await moved(user, two, other).add() == 404


async def test_a_deleted_session_ends_everywhere(tmp_path, caplog):
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one)
        await user.initialize()
        assert (await moved(user, two).request("DELETE")).status_code == 200
        assert await moved(user, two).add() == 404
        async with running(one._streams) as three:
            assert await moved(user, three).add() == 404
        assert "no readable record" not in caplog.text


async def test_a_replay_ends_with_the_response_or_the_session(tmp_path):
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one)
        await user.initialize()
        events = one._sessions[user.session_id].events

        async def resumed(manager, request_id):
            event_id = await events.store_event(request_id, None)
            resuming = asyncio.create_task(moved(user, manager).request("GET", headers={"last-event-id": event_id}))
            await asyncio.sleep(1)
            assert not resuming.done()
            return resuming

        answered, unanswered = await resumed(two, "7"), await resumed(two, "8")
        await events.store_event("7", RESPONSE)
        assert '"ok":true' in (await answered).text
        assert not unanswered.done()
        await moved(user, two).request("DELETE")
        assert "data" not in (await unanswered).text


@pytest.mark.parametrize("session_id", [OTHER, "x", "a b", "x" * 33, "_GET_stream", f"{SESSION}-1"])
async def test_unknown_sessions_are_refused(tmp_path, session_id):
    async with two_managers(tmp_path) as (_, one, _):
        user = User(one)
        user.session_id = session_id
        assert await user.add() == 404
        assert not one._sessions
        assert not one._adopting


async def test_an_idle_session_leaves_the_memory_and_continues(tmp_path):
    async with two_managers(tmp_path, session_idle_timeout=60) as (_, one, _):
        user = User(one)
        await user.initialize()
        await asyncio.sleep(100)
        assert not one._sessions
        assert not one._server_instances
        assert await user.add() == 5


async def test_a_session_in_use_does_not_expire_and_an_unused_one_does(tmp_path):
    async with AsyncExitStack() as stack:
        settings = {"lite_expiry_interval_ms": 5000}
        _, streams = await stack.enter_async_context(opened(tmp_path, settings, expire_after=60))
        one = await stack.enter_async_context(running(streams))
        used, unused = User(one), User(one)
        await used.initialize()
        await unused.initialize()
        for _ in range(4):
            await asyncio.sleep(40)
            assert await used.add() == 5
        two = await stack.enter_async_context(running(streams))
        assert (await moved(used, two).add(), await moved(unused, two).add()) == (5, 404)


async def test_a_full_process_opens_no_stored_session(tmp_path):
    async with two_managers(tmp_path, max_sessions=1) as (_, one, two):
        user, other = User(one), User(two)
        await user.initialize()
        await other.initialize()
        assert await moved(user, two).add() == 503
        await other.request("DELETE")
        assert await moved(user, two).add() == 5


async def test_without_a_broker_known_sessions_work_and_others_wait_for_it(tmp_path):
    async with two_managers(tmp_path) as (servers, one, two):
        user = User(one)
        await user.initialize()
        await servers.stop_broker()
        assert await moved(user, two).add() == 503
        assert await user.add() == 5
        await servers.start_broker()
        assert await moved(user, two).add() == 5


async def test_a_session_with_a_large_handshake_is_of_its_process(tmp_path, caplog):
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one)
        await user.initialize(_meta={"text": "x" * 100_000})
        assert (await user.add(), await moved(user, two).add()) == (5, 404)
        assert "its session is not stored" in caplog.text


@pytest.mark.parametrize(
    "record", [b"x", b"{}", b'{"owner": null, "initialize": {}}', b'{"owner": 1, "initialize": {}}']
)
async def test_records_that_are_not_readable_are_refused(tmp_path, record):
    async with two_managers(tmp_path) as (_, one, _):
        await one._streams.append(SESSION, record)
        user = User(one)
        user.session_id = SESSION
        assert await user.add() == 404


async def test_concurrent_requests_open_a_session_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rmqkit.mcp.sessions")
    async with two_managers(tmp_path) as (_, one, two):
        user = User(one)
        await user.initialize()
        assert set(await asyncio.gather(*(moved(user, two).add(i) for i in range(10)))) == {5}
        assert len([one for one in caplog.messages if "continues in this process" in one]) == 1


async def test_two_sessions_with_the_same_request_ids_have_their_own_streams(tmp_path):
    async with opened(tmp_path) as (_, streams), running(streams) as one:
        users = User(one), User(one)
        for user in users:
            await user.initialize()
            assert await user.add() == 5
        for user in users:
            assert (await streams.last(f"{user.session_id}-1")).is_last


@pytest.mark.parametrize("option", ["event_store", "stateless_http"])
def test_options_that_streams_replace_are_refused(option):
    server = MCPServer("test")
    with pytest.raises(SettingsError, match=option):
        streamable_http_app(server, None, **{option: True})
    with pytest.raises(SettingsError, match="not possible"):
        SessionManager(server._lowlevel_server, None, **{option.removesuffix("_http"): True})
