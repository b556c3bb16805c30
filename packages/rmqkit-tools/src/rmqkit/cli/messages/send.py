"""``rmq send TOPIC``: messages from arguments, lines, files, or JSON lines."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from rmqkit.admin.messages.sending import CHUNK_COUNT, Outcome, Pace, Stop, is_illegal, send_chunk
from rmqkit.admin.tail import queue_text
from rmqkit.cli import with_options
from rmqkit.cli.frame.connected import Tally, note, note_wait, run, runtime_for, sending_settings
from rmqkit.cli.frame.nouns import COMMON, LIVE_TOPICS
from rmqkit.cli.frame.printing import body_text, camel, time_ms
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import ExitCode, MessageIllegal, RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.properties import SHARDING_KEY, own_properties

app = typer.Typer(name="send", add_completion=False)

_GROUP = "rmq-send"
_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 8 << 20
_READS_HELD_MAX = 4

Given = PlacedMessage | RmqError
"""A message, or why there is none in its place."""


class Line(PlacedMessage, forbid_unknown_fields=True, kw_only=True):
    """What a JSON line may say, besides ``body`` and ``bodyBase64``."""

    topic: str = ""
    body: bytes = b""


_SPELLED = {camel(name): name for name in Line.__struct_fields__}
_OF_STORED = {camel(name) for name in ReceivedMessage.__struct_fields__}


def from_line(text: bytes, template: PlacedMessage) -> PlacedMessage:
    """The message of a JSON line; what it leaves out is the template's. Raises MessageIllegal: it is none."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        body = msgspec.convert(given.pop("body", ""), str).encode()
        body = base64.b64decode(given.pop("bodyBase64")) if "bodyBase64" in given else body
        if "offsetMsgId" in given:  # `rmq tail` printed it: as `rmq replay` would send it
            properties = given.get("properties", {})
            given = {name: value for name, value in given.items() if value and name not in _OF_STORED}
            given |= {"properties": own_properties(properties), "shardingKey": properties.get(SHARDING_KEY)}
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


# Long: it declares the command's options.
@app.command()
@with_options(COMMON)
def send(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=LIVE_TOPICS)],
    bodies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BODY]...", help="Message bodies, one message each. (default: read lines from stdin)"),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            "-f",
            help="File to send as one message, or with --json-lines as one message per line; repeatable.",
        ),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Read each line as a JSON object: body, keys, tags, …")
    ] = False,
    tags: Annotated[str | None, typer.Option(help="Message tag.", show_default=False)] = None,
    keys: Annotated[list[str] | None, typer.Option(help="Message key; repeatable.")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="Message property; repeatable.")
    ] = None,
    delay_level: Annotated[
        int,
        typer.Option(
            min=0,
            help="Delay level, 1 (1 s) to 18 (2 h). A larger one is refused. --delay takes any time.",
            show_default=False,
        ),
    ] = 0,
    delay: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Deliver this many seconds after the broker has it.", show_default=False
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Deliver at this time (ISO or ms since 1970).", show_default=False),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="[BROKER:]ID", help="Send to this queue only.", show_default=False)
    ] = None,
    shard_key: Annotated[
        str | None,
        typer.Option(
            help="Sharding key. Messages with the same key go to one queue and stay in order.", show_default=False
        ),
    ] = None,
    batch_count: Annotated[int, typer.Option("--batch", min=1, help="Number of messages per request.")] = 1,
    rate: Annotated[float, typer.Option(min=0, help="Maximum messages per second; 0 means no limit.")] = 0,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of messages to send. Arguments and files repeat until it is reached.",
            show_default=False,
        ),
    ] = None,
    bytes_max: Annotated[
        int,
        typer.Option(
            "--max-bytes", min=1, help="Maximum body size in bytes. The broker has its own limit, maxMessageSize."
        ),
    ] = ProducerSettings().message_bytes_max,
    **options: Any,
) -> None:
    """Send messages to a topic, from arguments, lines of stdin, files, or JSON lines.

    A JSON line is an object with body or bodyBase64. It may have tags, keys,
    properties, shardingKey, queueId, brokerName, flag, delayLevel, delay
    (seconds), deliverAt (ISO, or seconds since 1970) and msgId. You can also
    send what `rmq tail --json` prints. Empty lines are skipped. The exit code is 1 when some messages could not
    be sent."""
    if (delay_level > 0) + (delay is not None) + (at is not None) > 1:
        raise typer.BadParameter("use only one of --delay-level, --delay and --at")
    broker_name, queue_id = _place(queue)
    template = PlacedMessage(
        topic=topic,
        body=b"",
        tags=tags,
        keys=keys or [],
        properties=_pairs(properties or []),
        delay_level=delay_level,
        delay=delay,
        deliver_at=None if at is None else time_ms(at) / 1000,
        sharding_key=shard_key,
        queue_id=queue_id,
        broker_name=broker_name,
    )
    texts = _texts(bodies or [], files or [], json_lines=json_lines, is_repeated=count is not None)
    total = count or (None if json_lines else len(bodies or []) + len(files or []) or None)
    as_json = options["as_json"]
    tally = Tally("sending", total, is_shown=not (as_json and sys.stdout.isatty()))
    settings = sending_settings(options, message_bytes_max=bytes_max)
    last: list[SendResult] = []

    def report(number: int, outcomes: Sequence[Outcome]) -> None:
        sent = [one for one in outcomes if isinstance(one, SendResult)]
        tally.add(len(sent), [one for one in outcomes if isinstance(one, RmqError)])
        last[:] = sent[-1:] or last
        if as_json:
            print("\n".join(_json_line(number + i, one) for i, one in enumerate(outcomes)), flush=True)

    async def work(stop: Stop) -> None:
        async with (
            runtime_for(topic, options, must_exist=False) as runtime,
            Producer(_GROUP, settings=settings, runtime=runtime) as producer,
        ):
            with tally:
                await _send_all(
                    producer, _messages(texts, template, count, json_lines), Pace(rate), stop, report, batch_count
                )

    try:
        is_whole = run(work)
    except RmqError:
        if tally.sent:
            note(f"stopped, {tally.line(topic, has_cause=False)}")
        raise
    text = tally.line(topic)
    if tally.sent == 1 and not tally.failed:
        text = f"sent {last[0].msg_id} to {topic}, {queue_text(last[0].queue)}@{last[0].queue_offset}"
    if as_json or tally.failed or not is_whole:
        note(text if is_whole else f"stopped, {text}")
    else:
        print(text)
    if not is_whole or tally.failed:
        raise typer.Exit(1 if is_whole else ExitCode.INTERRUPTED)


async def _send_all(
    producer: Producer,
    given: AsyncIterator[list[Given]],
    pace: Pace,
    stop: Stop,
    report: Callable[[int, Sequence[Outcome]], None],
    batch_count: int,
) -> None:
    """Send until there are no more. Raises RmqError: nothing of a chunk could be sent, though it is legal."""
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


# ---------------------------------------------------------------- what is given


async def _messages(
    texts: AsyncIterator[list[bytes]], template: PlacedMessage, count: int | None, is_json: bool
) -> AsyncIterator[list[Given]]:
    """The messages, or what is wrong with them; ``count`` at most."""
    async for some in texts:
        some = some[:count]
        yield [_message(one, template) if is_json else replace(template, body=one) for one in some]
        if count is not None and (count := count - len(some)) <= 0:
            return


async def _texts(
    bodies: list[str], files: list[Path], *, json_lines: bool, is_repeated: bool
) -> AsyncIterator[list[bytes]]:
    """Bodies or lines, some at a time."""
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
    """Lines that are not empty, as they come; a thread reads them and waits while too many are held."""
    held: asyncio.Queue[bytes] = asyncio.Queue(_READS_HELD_MAX)
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        chunk = b"-"
        with contextlib.suppress(CancelledError, RuntimeError):  # the loop has ended
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


def _place(queue: str | None) -> tuple[str | None, int | None]:
    """Broker and id of a queue as people write it."""
    if queue is None:
        return None, None
    broker_name, _, queue_id = queue.rpartition(":")
    if not queue_id.isdecimal():
        raise typer.BadParameter(f"queue {queue!r} must be an id, or broker:id: 3, broker-a:3")
    return broker_name or None, int(queue_id)


def _pairs(texts: Iterable[str]) -> dict[str, str]:
    found = dict(text.partition("=")[::2] for text in texts)
    if "" in found or "" in found.values():
        raise typer.BadParameter(f"a property must be NAME=VALUE: {', '.join(texts)}")
    return found


def _json_line(number: int, outcome: Outcome) -> str:
    line: dict[str, Any] = {"number": number}
    if isinstance(outcome, RmqError):
        line["error"] = str(outcome)
    else:
        line |= {"status": outcome.status.value, "msgId": outcome.msg_id, "offsetMsgId": outcome.offset_msg_id}
        line |= {"topic": outcome.queue.topic, "brokerName": outcome.queue.broker_name}
        line |= {"queueId": outcome.queue.queue_id, "queueOffset": outcome.queue_offset}
    return msgspec.json.encode(line).decode()
