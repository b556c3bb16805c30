"""``rmq send TOPIC``: send messages from arguments, lines, files, or JSON lines.

This module declares the command; `rmqkit.cli.messages.sending` does the work, and is imported when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmqkit.cli import with_options
from rmqkit.cli.frame.nouns import COMMON, LIVE_TOPICS
from rmqkit.errors import ExitCode, RmqError

if TYPE_CHECKING:
    from rmqkit.admin.messages.sending import Outcome, Stop
    from rmqkit.client.observe.hooks import SendResult

app = typer.Typer(name="send", add_completion=False)

_GROUP = "rmq-send"


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
            help="Delay level, 1 (1 s) to 18 (2 h). Larger levels are refused. --delay accepts any time.",
            show_default=False,
        ),
    ] = 0,
    delay: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Deliver this many seconds after the broker received it.", show_default=False
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
            help="Number of messages to send. Arguments and files repeat until then.",
            show_default=False,
        ),
    ] = None,
    bytes_max: Annotated[
        int,
        typer.Option(
            "--max-bytes", min=1, help="Maximum body size in bytes. The broker has its own limit, maxMessageSize."
        ),
    ] = 4 << 20,
    **options: Any,
) -> None:
    """Send messages to a topic, from arguments, lines of stdin, files, or JSON lines.

    A JSON line is an object with body or bodyBase64. It may have tags, keys,
    properties, shardingKey, queueId, brokerName, flag, delayLevel, delay
    (seconds), deliverAt (ISO, or seconds since 1970) and msgId. The lines that
    `rmq tail --json` prints are accepted, too. Empty lines are skipped. The exit
    code is 1 if some messages could not be sent."""
    from rmqkit.admin.messages.sending import Pace
    from rmqkit.cli.frame.connected import Tally, note, run, runtime_for, sending_settings
    from rmqkit.cli.frame.printing import time_ms
    from rmqkit.cli.messages.sending import json_line, messages_of, send_all, texts_of
    from rmqkit.client.observe.hooks import SendResult
    from rmqkit.client.producer.producer import Producer
    from rmqkit.client.producer.selectors import PlacedMessage
    from rmqkit.protocol.schemas.clients import queue_text

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
    texts = texts_of(bodies or [], files or [], json_lines=json_lines, is_repeated=count is not None)
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
            print("\n".join(json_line(number + i, one) for i, one in enumerate(outcomes)), flush=True)

    async def work(stop: Stop) -> None:
        async with (
            runtime_for(topic, options, must_exist=False) as runtime,
            Producer(_GROUP, settings=settings, runtime=runtime) as producer,
        ):
            with tally:
                await send_all(
                    producer, messages_of(texts, template, count, json_lines), Pace(rate), stop, report, batch_count
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


def _place(queue: str | None) -> tuple[str | None, int | None]:
    """Return broker and id of a queue from its text in the option."""
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
