"""The input of ``rmq send`` (arguments, lines, files, JSON lines), and the sending."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rmqkit.admin.messages.sending import CHUNK_COUNT, Outcome, Pace, Stop, is_illegal, send_chunk
from rmqkit.cli.frame.connected import note, note_wait
from rmqkit.cli.frame.printing import body_text, camel
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.errors import MessageIllegal, RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import SHARDING_KEY, copied_properties

_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 8 << 20
_READS_HELD_MAX = 4

Given = PlacedMessage | RmqError
"""A message, or the error of an input that is not a message."""


class Line(PlacedMessage, forbid_unknown_fields=True, kw_only=True):
    """The fields of a JSON line, besides ``body`` and ``bodyBase64``."""

    topic: str = ""
    body: bytes = b""


_SPELLED = {camel(name): name for name in Line.__struct_fields__}
_OF_STORED = {camel(name) for name in ReceivedMessage.__struct_fields__}


def from_line(text: bytes, template: PlacedMessage) -> PlacedMessage:
    """Return the message of a JSON line, with other fields from a template. Raises MessageIllegal: an invalid line."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        body = msgspec.convert(given.pop("body", ""), str).encode()
        body = base64.b64decode(given.pop("bodyBase64")) if "bodyBase64" in given else body
        if "offsetMsgId" in given:  # a line of `rmq tail`: send it like `rmq replay`
            properties = given.get("properties", {})
            given = {name: value for name, value in given.items() if value and name not in _OF_STORED}
            given |= {"properties": copied_properties(properties), "shardingKey": properties.get(SHARDING_KEY)}
        if isinstance(given.get("keys"), str):
            given["keys"] = given["keys"].split()
        given = {_SPELLED.get(name, name): value for name, value in given.items()}
        line = msgspec.convert(given, Line)
    except (msgspec.MsgspecError, binascii.Error, TypeError) as error:
        raise MessageIllegal(f"line {body_text(text)!r} is not a message in JSON: {error}") from None
    fields = {name: getattr(line, name) for name in given.keys() - {"topic"}}
    fields |= {"body": body, "properties": {**template.properties, **line.properties}}
    undelayed = {"delay_level": 0, "delay": None, "deliver_at": None} if line.is_delayed else {}
    return replace(template, **{**undelayed, **fields})


async def send_all(
    producer: Producer,
    given: AsyncIterator[list[Given]],
    pace: Pace,
    stop: Stop,
    report: Callable[[int, Sequence[Outcome]], None],
    batch_count: int,
) -> None:
    """Send all messages. Raises RmqError: no legal message of a chunk could be sent."""
    number = 0
    async for some in given:
        for first in range(0, len(some), pace.chunk_count):
            chunk = some[first : first + pace.chunk_count]
            with stop.held():
                messages = [one for one in chunk if not isinstance(one, RmqError)]
                sent = iter(await send_chunk(producer, messages, batch_count=batch_count, on_wait=note_wait))
                outcomes = [one if isinstance(one, RmqError) else next(sent) for one in chunk]
                report(number, outcomes)
            number += len(chunk)
            failures = [one for one in outcomes if isinstance(one, RmqError) and not is_illegal(one)]
            if failures and not any(isinstance(one, SendResult) for one in outcomes):
                raise failures[0]
            await pace.passed(len(chunk))


# ---------------------------------------------------------------- input


async def messages_of(
    texts: AsyncIterator[list[bytes]], template: PlacedMessage, count: int | None, is_json: bool
) -> AsyncIterator[list[Given]]:
    """Yield the messages or their errors, at most ``count``."""
    async for some in texts:
        some = some[:count]
        yield [_message(one, template) if is_json else replace(template, body=one) for one in some]
        if count is not None and (count := count - len(some)) <= 0:
            return


async def texts_of(
    bodies: list[str], files: list[Path], *, json_lines: bool, is_repeated: bool
) -> AsyncIterator[list[bytes]]:
    """Yield bodies or lines, several at a time."""
    if files and json_lines:
        for path in files:
            with await asyncio.to_thread(open, path, "rb") as file:
                while some := await asyncio.to_thread(file.readlines, _READ_BYTES):
                    yield [line for one in some if (line := one.rstrip(b"\r\n"))]
    elif bodies or files:
        contents: list[Callable[[], bytes]] = [partial(os.fsencode, one) for one in bodies] + [
            one.read_bytes for one in files
        ]
        some = []
        for read in itertools.cycle(contents) if is_repeated else contents:
            some.append(read())
            if len(some) == CHUNK_COUNT or len(some[-1]) > _READ_BYTES:
                yield some
                some = []
        yield some
    else:
        if sys.stdin.isatty():
            note("type one message per line; Ctrl-D ends the input")
        async for some in _stdin_lines():
            yield some


async def _stdin_lines() -> AsyncIterator[list[bytes]]:
    """Yield non-empty lines as they arrive. A thread reads them, and waits while too many are buffered."""
    held: asyncio.Queue[bytes] = asyncio.Queue(_READS_HELD_MAX)
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        chunk = b"-"
        with contextlib.suppress(CancelledError, RuntimeError):  # the loop is closed
            while chunk:
                chunk = os.read(descriptor, _READ_BYTES)
                asyncio.run_coroutine_threadsafe(held.put(chunk), loop).result()

    threading.Thread(target=read, name="stdin", daemon=True).start()
    rest = b""
    while chunk := await held.get():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            raise RmqError(f"a line of stdin has more than {_LINE_BYTES_MAX:,} bytes: send it with --file")
        yield [line for one in lines if (line := one.rstrip(b"\r"))]
    yield [rest] if rest else []


def _message(text: bytes, template: PlacedMessage) -> Given:
    try:
        return from_line(text, template)
    except MessageIllegal as error:
        return error


def json_line(number: int, outcome: Outcome) -> str:
    line: dict[str, Any] = {"number": number}
    if isinstance(outcome, RmqError):
        line["error"] = str(outcome)
    else:
        line |= {"status": outcome.status.value, "msgId": outcome.msg_id, "offsetMsgId": outcome.offset_msg_id}
        line |= {"topic": outcome.queue.topic, "brokerName": outcome.queue.broker_name}
        line |= {"queueId": outcome.queue.queue_id, "queueOffset": outcome.queue_offset}
    return msgspec.json.encode(line).decode()
