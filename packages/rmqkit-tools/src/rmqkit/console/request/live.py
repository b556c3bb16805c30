"""Server-sent events: the refreshes of a page, and the rows of a tail.

A refresh renders the ``live`` block of a page, and sends the block if it has changed. Then the next refresh begins. A
comment every 15 s keeps the connection open. After an hour the stream ends, and the browser opens another stream. At
most 100 pages have a stream at a time, and 20 tails (5 of one user). If a browser disconnects, its stream ends at the
next write. A console that stops ends all streams immediately. Browsers retry until a console answers.

A tail starts after the rows of its page: ``after`` has the end of the page in each queue, as an offset. The id of each
event with rows has the same form, so a browser that connects again continues at this id (`offsets_text`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import StreamingResponse

from rmqkit.admin.pulls import AdminPuller
from rmqkit.client.consumer.reader import Start, TopicReader, Wanted
from rmqkit.console.html import render
from rmqkit.console.request.request import Ask, Fault, Page
from rmqkit.console.request.state import Hub
from rmqkit.errors import RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.sentences import _

STREAMS_MAX, TAILS_MAX, TAILS_A_USER = 100, 20, 5
STREAM_S, TAIL_S, HEARTBEAT_S = 3_600.0, 900.0, 15.0
ROWS_A_SECOND, QUEUES_MAX = 50, 64


def refreshes(
    ask: Ask, view: Callable[[], Awaitable[Page]], values: Callable[[Page], dict[str, object]]
) -> StreamingResponse:
    """Return a stream with the refreshes of a page. Raises Fault: too many streams are open."""
    hub = ask.console

    async def events() -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end, before, pause_s = loop.time() + STREAM_S, "", 1.0
        yield b"retry: 3000\n\n"
        while loop.time() < end and not hub.ending.is_set():
            try:
                page = await view()
                text, pause_s = render.block(page.template, values(page)), max(1.0, page.live_s or 0.0)
                # The age of the snapshot is in the status line, outside of the block, so it is no change of the block.
                mark = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
                if mark != before:
                    before = mark
                    yield _event("live", text)
                yield _event("status", str(hub.clock.now_ms()))
                if not page.live_s:
                    break
            except (RmqError, Fault) as error:
                yield _event("trouble", str(error))
            async for beat in _pause(hub, pause_s):
                yield beat
        if not hub.ending.is_set():
            yield _event("end", "")

    return _response(ask, "page", events(), STREAMS_MAX, STREAMS_MAX)


async def _sleep(hub: Hub, seconds: float) -> None:
    """Wait for some seconds, or until the console stops."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await hub.ending.wait()


async def _pause(hub: Hub, seconds: float) -> AsyncIterator[bytes]:
    while seconds > 0 and not hub.ending.is_set():
        await _sleep(hub, min(seconds, HEARTBEAT_S))
        seconds -= HEARTBEAT_S
        if seconds > 0:
            yield b": still here\n\n"


def offsets_text(offsets: Mapping[str, int]) -> str:
    """Return the offsets of queues as ``broker:queue=offset,…``; empty if the text is too long for an address."""
    return ",".join(f"{queue}={offset}" for queue, offset in offsets.items()) if len(offsets) <= QUEUES_MAX else ""


def offsets_of(text: str) -> dict[str, int]:
    """Return the offsets in a text of `offsets_text`. Parts with another form are skipped."""
    pairs = (part.rpartition("=") for part in text.split(",")[:QUEUES_MAX])
    return {queue: int(offset) for queue, __, offset in pairs if queue and offset.isdecimal() and len(offset) < 19}


def _queue(topic: str, text: str) -> MessageQueue:
    broker, __, queue_id = text.rpartition(":")
    return MessageQueue(topic, broker, int(queue_id) if queue_id.isdecimal() and len(queue_id) < 10 else -1)


def _advance(offsets: dict[str, int], messages: list[ReceivedMessage]) -> None:
    """Move offsets past messages. If all are missing, add none: messages of queues without an offset would be lost."""
    if offsets:
        offsets.update((f"{one.broker_name}:{one.queue_id}", one.queue_offset + 1) for one in messages)


def tail_rows(
    ask: Ask, topic: str, wanted: Wanted, rows_html: Callable[[list[ReceivedMessage]], Awaitable[str]]
) -> StreamingResponse:
    """Return a stream with the new rows of a topic, at most 50 per second. Further messages are only counted.
    Raises Fault: too many tails are open."""
    say = ask.say
    offsets = offsets_of(ask.request.headers.get("last-event-id") or ask.text("after"))

    async def events() -> AsyncIterator[bytes]:
        waiting: deque[ReceivedMessage] = deque(maxlen=ROWS_A_SECOND)
        came, notes = 0, deque[str](maxlen=8)
        loop = asyncio.get_running_loop()
        end = loop.time() + TAIL_S
        yield b"retry: 3000\n\n"

        async def follow(reader: TopicReader) -> None:
            nonlocal came
            while True:
                messages = await reader.next()
                came += len(messages)
                _advance(offsets, messages)
                waiting.extend(messages)

        try:
            start = Start(offsets={_queue(topic, text): offset for text, offset in offsets.items()})
            async with TopicReader(AdminPuller(ask.admin.calls), topic, start, wanted, notes.append) as reader:
                task = asyncio.create_task(follow(reader), name="console tail")
                try:
                    shown, beat = 0, 0.0
                    since = _("following") if offsets else _("following: messages stored from now on are shown")
                    yield _event("status", say(since))
                    while loop.time() < end and not task.done():
                        await _sleep(ask.console, 1.0)
                        if ask.console.ending.is_set():
                            return
                        beat += 1.0
                        for note in iter(lambda: notes.popleft() if notes else None, None):
                            yield _event("status", say(note))
                        if waiting:
                            rows = list(waiting)
                            waiting.clear()
                            shown += len(rows)
                            yield _event("rows", await rows_html(rows), offsets_text(offsets))
                            if came > shown:
                                yield _event("dropped", f"{came - shown:,}")
                            beat = 0.0
                        elif beat >= HEARTBEAT_S:
                            beat = 0.0
                            yield b": still here\n\n"
                    if task.done():
                        task.result()
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            yield _event("end", say(_("the tail stops after 15 minutes: load the page again to continue")))
        except RmqError as error:
            yield _event("end", say(str(error)))

    return _response(ask, "tail", events(), TAILS_MAX, TAILS_A_USER)


def _response(ask: Ask, kind: str, events: AsyncIterator[bytes], whole_max: int, own_max: int) -> StreamingResponse:
    """Return the events as a response. The connection of the request is returned when the events end."""
    hub, keys = ask.console, (kind, f"{kind} {ask.user.name}")
    if hub.streams.get(keys[0], 0) >= whole_max or hub.streams.get(keys[1], 0) >= own_max:
        why = _("{own} streams of one user are open at a time, {all} in all: close some", own=own_max, all=whole_max)
        raise Fault(429, _("Too many streams"), why)

    async def counted() -> AsyncIterator[bytes]:
        # Count the stream at its first event: a response that never starts would never be subtracted.
        for key in keys:
            hub.streams[key] = hub.streams.get(key, 0) + 1
        try:
            async for event in events:
                yield event
        finally:
            for key in keys:
                hub.streams[key] -= 1
            with contextlib.suppress(RuntimeError):
                await events.aclose()  # type: ignore[attr-defined]
            ask.close()

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _event(name: str, text: str, event_id: str = "") -> bytes:
    # A bare CR also ends a line of an event stream. Without the split, a message key with a CR could add a field.
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    own = f"id: {event_id}\n" if event_id else ""
    return f"event: {name}\n{own}{lines}\n".encode("utf-8", "replace")
