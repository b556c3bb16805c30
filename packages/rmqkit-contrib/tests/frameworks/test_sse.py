"""Server-sent events: the format, the status of each request, browsers that are slow, stall or leave."""

from __future__ import annotations

import asyncio
import importlib
import re
import signal
import sys
from datetime import timedelta

import pytest
from fastapi import BackgroundTasks, FastAPI
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import rmqkit
from rmqkit.errors import ClientError, SettingsError, TimeIllegal
from rmqkit.sse import EventStreamResponse, end_responses, ends_with_server
from rmqkit.sse.frames import content_frame, frame
from tests.streams.test_streams import PARENT, Servers, opened

# -- the format


def parse(text: str) -> list[dict[str, str]]:
    """Return the events that a browser would dispatch, by the rules of the standard."""
    events, last_id, lines = [], "", re.split(r"\r\n|\r|\n", text)
    data, kind = [], ""
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append({"id": last_id, "type": kind or "message", "data": "\n".join(data)})
            data, kind = [], ""
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id":
            last_id = value
    return events


@pytest.mark.parametrize(
    ("data", "read"),
    [
        ("", ""),
        ("word", "word"),
        (" leading blank", " leading blank"),
        ("  two", "  two"),
        ("\n", "\n"),
        ("a\n\nb\n", "a\n\nb\n"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\u2028b\x0bc\x85", "a\u2028b\x0bc\x85"),
        ("data: x\nid: 7\n: no", "data: x\nid: 7\n: no"),
        ("漢字 🚀", "漢字 🚀"),
    ],
)
def test_a_browser_reads_the_content_that_was_written(data, read):
    text = content_frame(data.encode(), event_id="1.0.s", event_type="").decode()
    assert parse(text + text) == [{"id": "1.0.s", "type": "message", "data": read}] * 2


def test_content_that_is_not_text_is_sent_as_base64():
    text = content_frame(b"\xff\n\x00", event_id="1.0.s", event_type="image").decode()
    assert parse(text) == [{"id": "1.0.s", "type": "base64", "data": "/woA"}]


@pytest.mark.parametrize("kind", ["a\ndata: x", "a\r\n\r\nid: 9", "a\rb"])
def test_a_type_cannot_add_lines_to_a_frame(kind):
    (event,) = parse(frame(b"x", event_id="1.0.s", event_type=kind).decode())
    assert (event["id"], event["data"]) == ("1.0.s", "x")


# -- requests


class Browser:
    """One request of an ASGI application, and what its server sends.

    Args:
        app: the application.
        last_id: the header ``Last-Event-ID``.
    """

    def __init__(self, app, path="/", *, last_id=None, query="", method="GET"):
        headers = [] if last_id is None else [(b"last-event-id", last_id.encode("latin-1"))]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._requests = [{"type": "http.request", "body": b"", "more_body": False}]
        self._left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status, self.headers, self.body, self.is_complete = 0, {}, b"", False
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self):
        if self._requests:
            return self._requests.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        await self.reads.wait()
        assert not self.is_complete, "nothing is sent after the end"
        self.body += message.get("body", b"")
        self.is_complete = not message.get("more_body", False)

    def leave(self):
        self._left.set()

    @property
    def events(self):
        return parse(self.body.decode())

    @property
    def words(self):
        return [one["data"] for one in self.events]

    async def has(self, count):
        while len(self.events) < count:
            await asyncio.sleep(0.05)

    async def end(self):
        await self.task
        assert self.is_complete
        return self


async def answered(streams, name="s", **given):
    options = {key: given.pop(key) for key in ("after", "new", "data", "ping") if key in given}
    return await Browser(EventStreamResponse(streams, name, **options), **given).end()


async def test_a_finished_stream_is_sent_from_its_start_with_ids_types_and_an_end(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "Hello")
        await streams.append("s", " world\n", headers={"event": "token"})
        await streams.finish("s")
        browser = await answered(streams)
        assert (browser.status, browser.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (browser.headers["cache-control"], browser.headers["x-accel-buffering"]) == ("no-store", "no")
        assert browser.body.startswith(b"retry: 2000\n\n")
        assert browser.events == [
            {"id": "1.0.s", "type": "message", "data": "Hello"},
            {"id": "1.1.s", "type": "token", "data": " world\n"},
            {"id": "1.2.s", "type": "end", "data": ""},
        ]


async def test_a_last_event_with_content_keeps_its_type_and_the_end_its_id(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "done", headers={"event": "result"}, last=True)
        assert [(one["id"], one["type"], one["data"]) for one in (await answered(streams)).events] == [
            ("1.0.s", "result", "done"),
            ("1.0.s", "end", ""),
        ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["0", "1", "2", "3", ""]),
        ({"last_id": "1.1.s"}, ["2", "3", ""]),
        ({"last_id": "1.1"}, ["2", "3", ""]),
        ({"query": "last_event_id=1.2.s"}, ["3", ""]),
        ({"after": "1.0.s"}, ["1", "2", "3", ""]),
        ({"after": "1.0.s", "query": "last_event_id=1.2.s"}, ["3", ""]),
        ({"after": "1.0.s", "query": "last_event_id=1.1.s", "last_id": "1.2.s"}, ["3", ""]),
        ({"last_id": ""}, ["0", "1", "2", "3", ""]),
        ({"query": "last_event_id=&other=1.2.s"}, ["0", "1", "2", "3", ""]),
    ],
)
async def test_the_header_goes_before_the_query_and_the_query_before_the_argument(tmp_path, given, words):
    async with opened(tmp_path) as (_, streams):
        for i in range(4):
            await streams.append("s", str(i))
        await streams.finish("s")
        assert (await answered(streams, **given)).words == words


async def test_a_browser_that_has_the_end_is_asked_to_stop(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        last = await streams.finish("s")
        browser = await answered(streams, last_id=last)
        assert (browser.status, browser.body) == (204, b"")


BAD_IDS = {
    "x": "this is not an event id",
    "1.0.other": "it belongs to stream other",
    "1.7.s": "the newest event is 0",
    "1.0.s, 1.1.s": "this is not an event id",
    "\xff\xfe": "this is not an event id",
    "9" * 5000: "this is not an event id",
    "1.99999999999999999999.s": "this is not an event id",
}


@pytest.mark.parametrize("given", BAD_IDS, ids=range(len(BAD_IDS)))
async def test_a_bad_id_is_refused_with_its_reason(tmp_path, given):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        browser = await answered(streams, last_id=given)
        assert (browser.status, browser.headers["content-type"]) == (400, "text/plain; charset=utf-8")
        assert BAD_IDS[given] in browser.body.decode()
        assert browser.body.endswith(b"read it from its start\n") and len(browser.body) < 1000
        assert browser.headers["content-length"] == str(len(browser.body))


@pytest.mark.parametrize("name", ["", " ", "a b", "a$b", "a.b", "x" * 65, "x" * 300, "ä", "a\nb"])
async def test_a_name_that_is_not_allowed_is_refused(tmp_path, name):
    async with opened(tmp_path) as (_, streams):
        browser = await answered(streams, name)
        assert browser.status == 400
        assert browser.body.startswith(f"stream {name!r}: ".encode()) and browser.body.count(b"\n") == 1


async def test_an_expired_stream_is_gone_and_its_next_life_can_be_read(tmp_path):
    async with opened(tmp_path, {"lite_expiry_interval_ms": 5000}, expire_after=60) as (_, streams):
        for i in range(5):
            await streams.append("s", str(i))
        await asyncio.sleep(200)
        browser = await answered(streams, last_id="1.3.s")
        assert browser.status == 410
        assert browser.body.startswith(b"stream s has expired after event '1.3.s'")
        await streams.append("s", "again", last=True)
        assert (await answered(streams, last_id="1.3.s")).status == 410
        assert (await answered(streams)).words == ["again", ""]


async def test_a_stream_that_expires_under_a_browser_ends_with_the_reason(tmp_path):
    async with opened(tmp_path, {"lite_expiry_interval_ms": 5000}, expire_after=60) as (_, streams):
        await streams.append("s", "a")
        browser = await answered(streams, last_id=None)
        assert [(one["type"], one["id"]) for one in browser.events] == [("message", "1.0.s"), ("expired", "1.0.s")]
        assert browser.words[1].startswith("stream s has expired after event '1.0.s'")
        assert (await answered(streams, last_id="1.0.s")).status == 410


async def test_new_events_are_sent_as_they_arrive_and_silence_is_filled_with_pings(tmp_path):
    async with opened(tmp_path) as (_, streams):
        browser = Browser(EventStreamResponse(streams, "s", ping=timedelta(seconds=10)))
        await asyncio.sleep(35)
        assert browser.body == b"retry: 2000\n\n" + b": ping\n\n" * 3
        await streams.append("s", "a")
        await browser.has(1)
        await streams.finish("s")
        assert (await browser.end()).words == ["a", ""]


async def test_a_response_can_begin_with_new_events(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "old")
        browser = Browser(EventStreamResponse(streams, "s", new=True))
        while not browser.body:
            await asyncio.sleep(0.05)
        await streams.append("s", "new", last=True)
        assert (await browser.end()).words == ["new", ""]
        assert (await answered(streams, new=True, last_id="1.0.s")).words == ["new", ""], "an id goes before new"


async def test_a_function_makes_the_content(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", b"\x01", headers={"role": "user"})
        await streams.finish("s")
        browser = await answered(streams, data=lambda event: f"{event.headers['role']} {event.data.hex()}")
        assert browser.words == ["user 01", ""]


async def test_head_gets_the_headers_without_the_events(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")
        browser = await answered(streams, method="HEAD")
        assert (browser.status, browser.body) == (200, b"")
        assert browser.headers["content-type"].startswith("text/event-stream")


# -- brokers that are away


async def test_a_response_begins_while_the_broker_restarts_and_misses_nothing(tmp_path):
    async with opened(tmp_path) as (servers, streams):
        await streams.append("s", "a")
        await servers.stop_broker()
        browser = Browser(EventStreamResponse(streams, "s", ping=2), last_id="1.0.s")
        await asyncio.sleep(4)
        assert browser.status == 0
        await asyncio.sleep(20)
        assert browser.status == 200 and browser.body.count(b": ping") >= 5
        await servers.start_broker()
        await streams.append("s", "b", last=True)
        assert (await browser.end()).words == ["b", ""]


async def test_an_error_that_is_found_late_is_the_last_event(tmp_path):
    async with opened(tmp_path) as (servers, streams):
        await streams.append("s", "a")
        await streams.finish("s")
        await servers.stop_broker()
        late = [Browser(EventStreamResponse(streams, "s"), last_id=one) for one in ("1.7.s", "1.1.s")]
        await asyncio.sleep(10)
        await servers.start_broker()
        refused, ended = [await one.end() for one in late]
        assert [(one["type"], one["id"]) for one in refused.events] == [("refused", "")]
        assert "the newest event is 1" in refused.words[0]
        assert [one["type"] for one in ended.events] == ["end"]


# -- browsers that are slow, stall or leave


def noted_pulls(streams):
    """Return a list that grows by the offset of each pull from now on."""
    pulls, pull = [], streams._runtime.calls.pull

    async def noted(address, header, timeout_ms):
        pulls.append(header.queue_offset)
        return await pull(address, header, timeout_ms)

    streams._runtime.calls.pull = noted
    return pulls


def tasks_of_responses():
    return [task for task in asyncio.all_tasks() if task.get_name().endswith("of an event stream")]


async def test_a_slow_browser_delays_the_next_request_for_events(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await asyncio.gather(*(streams.append("s", str(i)) for i in range(1000)))
        await streams.finish("s")
        pulls = noted_pulls(streams)
        browser = Browser(EventStreamResponse(streams, "s"))
        while not browser.events:
            await asyncio.sleep(0.01)
        browser.reads.clear()
        await asyncio.sleep(1)
        held, read = len(pulls), len(browser.events)
        await asyncio.sleep(30)
        assert len(pulls) == held and pulls[-1] <= read + 64, "one batch waits, no more are fetched"
        browser.reads.set()
        assert (await browser.end()).words == [*map(str, range(1000)), ""]


async def test_a_browser_that_never_reads_is_given_up(tmp_path):
    async with opened(tmp_path) as (_, streams):
        pulls = noted_pulls(streams)
        browser = Browser(EventStreamResponse(streams, "s", stalled_after=20))
        browser.reads.clear()
        await asyncio.sleep(19)
        assert not browser.task.done()
        await asyncio.sleep(2)
        assert browser.task.done() and not browser.is_complete
        browser.task.result()
        held = len(pulls)
        await streams.append("s", "a")
        await asyncio.sleep(60)
        assert len(pulls) == held


async def test_a_browser_that_leaves_drops_its_request(tmp_path):
    async with opened(tmp_path) as (_, streams):
        pulls = noted_pulls(streams)
        await streams.append("s", "a")
        browser = Browser(EventStreamResponse(streams, "s"))
        await browser.has(1)
        assert len(tasks_of_responses()) == 2
        browser.leave()
        await browser.task
        assert tasks_of_responses() == []
        held = len(pulls)
        await streams.append("s", "b")
        await asyncio.sleep(60)
        assert len(pulls) == held and browser.words == ["a"]


async def test_a_browser_that_leaves_before_the_status_drops_its_request(tmp_path):
    async with opened(tmp_path) as (servers, streams):
        await streams.append("s", "a")
        await servers.stop_broker()
        browser = Browser(EventStreamResponse(streams, "s"))
        await asyncio.sleep(1)
        browser.leave()
        await browser.task
        assert browser.status == 0


async def test_a_server_that_reports_a_lost_connection_stops_the_response(tmp_path):
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a")

        async def app(scope, receive, send):
            async def broken(message):
                if message["type"] == "http.response.body":
                    raise BrokenPipeError
                await send(message)

            await EventStreamResponse(streams, "s")(scope, receive, broken)

        await Browser(app).task


async def test_a_server_that_cancels_a_response_leaves_no_task(tmp_path):
    async with opened(tmp_path) as (_, streams):
        browser = Browser(EventStreamResponse(streams, "s"))
        await asyncio.sleep(1)
        browser.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await browser.task
        assert tasks_of_responses() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_completes_the_open_responses_and_reaches_the_handler_of_the_server(tmp_path, number):
    got = []
    before = signal.signal(number, lambda *given: got.append(given[0]))
    try:
        async with opened(tmp_path) as (_, streams):
            await streams.append("s", "a")
            async with ends_with_server():
                browsers = [Browser(EventStreamResponse(streams, "s")) for _ in range(3)]
                for browser in browsers:
                    await browser.has(1)
                signal.raise_signal(number)
                for browser in browsers:
                    assert (await browser.end()).words == ["a"], "without the type `end`: a browser connects again"
                assert (got, tasks_of_responses()) == ([number], [])
                assert (await answered(streams, last_id="1.7")).status == 400, "later requests are answered"
            signal.raise_signal(number)
            assert got == [number] * 2
    finally:
        assert signal.signal(number, before) is not None


async def test_a_response_that_waits_for_the_broker_begins_and_ends_when_the_server_stops(tmp_path):
    async with opened(tmp_path) as (servers, streams):
        await streams.append("s", "a")
        await servers.stop_broker()
        browser = Browser(EventStreamResponse(streams, "s"))
        await asyncio.sleep(1)
        end_responses()
        assert (await browser.end()).status == 200, "a browser does not connect again after a 503"


async def test_without_a_handler_of_a_server_signals_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        async with ends_with_server():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        asyncio_thread = asyncio.to_thread(lambda: asyncio.run(_entered()))
        assert await asyncio_thread == signal.SIG_DFL, "another thread cannot handle signals"
    finally:
        signal.signal(signal.SIGTERM, before)


async def _entered():
    async with ends_with_server():
        return signal.getsignal(signal.SIGTERM)


async def test_closed_streams_are_an_error_of_the_application(tmp_path):
    async with Servers(tmp_path) as servers:
        streams = await rmqkit.streams.open(servers.address, PARENT)
        browser = Browser(EventStreamResponse(streams, "s"))
        await asyncio.sleep(1)
        await streams.close()
        with pytest.raises(ClientError, match="closed while it was read"):
            await browser.task
        with pytest.raises(ClientError, match="not open"):
            await answered(streams)


@pytest.mark.parametrize("options", [{"ping": 0}, {"ping": 0.5}, {"stalled_after": 0}])
def test_refused_options(options):
    with pytest.raises(SettingsError, match=r"must be at least 1 second"):
        EventStreamResponse(None, "s", **options)
    with pytest.raises(TimeIllegal):
        EventStreamResponse(None, "s", **dict.fromkeys(options, -1))


# -- frameworks


async def test_fastapi_accepts_it_as_a_response(tmp_path):
    done = []
    async with opened(tmp_path) as (_, streams):
        app = FastAPI()

        @app.get("/chats/{chat}")
        async def follow(chat: str, tasks: BackgroundTasks) -> EventStreamResponse:
            tasks.add_task(done.append, chat)
            return EventStreamResponse(streams, chat, headers={"X-Chat": chat, "cache-control": "no-cache"})

        await streams.append("s", "a", last=True)
        browser = await Browser(app, "/chats/s").end()
        assert (browser.status, browser.words, done) == (200, ["a", ""], ["s"])
        assert (browser.headers["x-chat"], browser.headers["cache-control"]) == ("s", "no-cache")
        assert (await Browser(app, "/chats/s", last_id="1.0.s").end()).status == 204
        assert (await Browser(app, "/chats/a$b").end()).status == 400


async def test_a_middleware_of_fastapi_passes_events_as_they_arrive_and_the_disconnect(tmp_path):
    async with opened(tmp_path) as (_, streams):
        app = FastAPI()

        @app.get("/{chat}")
        async def follow(chat: str) -> EventStreamResponse:
            return EventStreamResponse(streams, chat)

        @app.middleware("http")
        async def note(request, call_next):
            response = await call_next(request)
            response.headers["x-noted"] = "yes"
            return response

        await streams.append("s", "a")
        browser = Browser(app, "/s")
        await browser.has(1)
        assert (browser.headers["x-noted"], browser.words) == ("yes", ["a"])
        browser.leave()
        await browser.task
        assert tasks_of_responses() == []


async def test_starlette_accepts_it_as_a_response(tmp_path):
    async with opened(tmp_path) as (_, streams):

        async def follow(request):
            response = EventStreamResponse(streams, request.path_params["chat"])
            response.set_cookie("seen", "yes")
            return response

        await streams.append("s", "a", last=True)
        browser = await Browser(Starlette(routes=[Route("/{chat}", follow)]), "/s").end()
        assert (browser.status, browser.words) == (200, ["a", ""])
        assert browser.headers["set-cookie"].startswith("seen=yes")


async def test_it_is_an_asgi_application_without_the_framework(tmp_path, monkeypatch):
    assert issubclass(EventStreamResponse, Response)
    for name in [name for name in sys.modules if name.startswith(("rmqkit.sse", "starlette."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    plain = importlib.import_module("rmqkit.sse").EventStreamResponse
    assert plain.__bases__ == (object,)
    async with opened(tmp_path) as (_, streams):
        await streams.append("s", "a", last=True)
        assert (await Browser(plain(streams, "s")).end()).words == ["a", ""]
