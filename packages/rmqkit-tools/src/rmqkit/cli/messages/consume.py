"""``rmq consume TOPIC --group G``: consume messages as a member of a group, one per line.

A message counts as consumed only when its line is written: the group's offset never passes a message that was not
printed. If a member is killed, the next member prints its uncommitted messages again (at least once). Redelivered
messages of the group (retries) are printed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import shlex
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin.messages.sending import Stop
from rmqkit.cli import with_options
from rmqkit.cli.admin.message import shown
from rmqkit.cli.frame.connected import client_settings, note, run, runtime_for
from rmqkit.cli.frame.nouns import COMMON, LIVE_GROUPS, LIVE_TOPICS
from rmqkit.cli.messages.tail import FIELDS, LINE_FORMAT, check_format, columns_for, line_text
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.schemas.clients import MessageQueue

app = typer.Typer(name="consume", add_completion=False)

_PATIENCE_SECONDS = 5.0
"""Time without a queue after which the command prints possible causes."""


class Begin(enum.Enum):
    """The start of a group in a queue without an offset: at the first message, or after the last."""

    BEGINNING = "beginning"
    END = "end"


_START = {Begin.BEGINNING: StartFrom.FIRST_OFFSET, Begin.END: StartFrom.NEW_MESSAGES}


# Long: it declares the command's options.
@app.command()
@with_options(COMMON)
def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=LIVE_TOPICS)],
    group: Annotated[str, typer.Option("-g", "--group", help="Consumer group to join.", autocompletion=LIVE_GROUPS)],
    begin: Annotated[Begin, typer.Option("--from", help="Where a group without offsets starts.")] = Begin.BEGINNING,
    count: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of messages.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--for", metavar="SECONDS", min=0, help="Stop after this number of seconds.", show_default=False),
    ] = None,
    tags: Annotated[str, typer.Option(help='Only messages with these tags: "a || b".', show_default=False)] = "*",
    sql: Annotated[
        str | None, typer.Option(help="Only messages that match this SQL92 expression.", show_default=False)
    ] = None,
    line_format: Annotated[
        str, typer.Option("--format", help=f"Format of each line. Fields: {', '.join(FIELDS)}.")
    ] = LINE_FORMAT,
    is_whole: Annotated[
        bool, typer.Option("--whole", help="Show whole bodies. By default bodies are cut to the line.")
    ] = False,
    **options: Any,
) -> None:
    """Consume messages as a member of a group, until Ctrl-C. Printed messages count as consumed.

    The members of the group share the queues, so all of them must have the same topics, tags and SQL expressions.
    Messages that --tags or --sql do not select are skipped for the whole group. Use `rmq tail` to see messages without
    consuming them."""
    if sql is not None and tags != "*":
        raise typer.BadParameter("--tags and --sql exclude each other: write TAGS into the SQL92 text")
    check_format(line_format)
    as_json, is_cut = options["as_json"], line_format == LINE_FORMAT and not is_whole and sys.stdout.isatty()

    def changed(queues: set[MessageQueue], held: set[MessageQueue]) -> None:
        note(f"group {group} has {len(held):,} of {len(queues):,} queues of {topic} here")

    def tell_if_idle(consumer: PushConsumer) -> None:
        if not any(queue.topic == topic for queue in consumer.held_queues()):
            name = shlex.quote(group)
            note(
                f"group {group} has no queue of {topic} here: either other members have them all (rmq consumer "
                f"connections {name}), or the broker does not know the group (rmq group create {name})"
            )

    async def work(stop: Stop) -> None:
        settings = client_settings(PushConsumerSettings, options, start_from=_START[begin])
        async with runtime_for(topic, options) as runtime:
            consumer = PushConsumer(group, settings=settings, runtime=runtime)
            consumer.subscribe(topic, sql or tags, expression_type="TAG" if sql is None else "SQL92")
            if sys.stderr.isatty():
                consumer.on_queues_changed(topic, changed)
            stream, left = consumer.messages(), count
            with contextlib.suppress(TimeoutError):
                async with consumer, asyncio.timeout(seconds):
                    asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, tell_if_idle, consumer)
                    async for message in stream:
                        if as_json:
                            print(msgspec.json.encode(shown(message)).decode(), flush=True)
                        else:
                            print(line_text(line_format, message, columns_for(is_cut)), flush=True)
                        stream.settle()  # the message is printed, so a stop must not lead to its redelivery
                        left = None if left is None else left - 1
                        if left == 0:
                            return

    with _warnings_printed():
        run(work)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def _warnings_printed() -> Iterator[None]:
    """Print the consumer's warnings on stderr: a consumer logs errors and retries, while other commands stop."""
    notes, log = _Notes(logging.WARNING), logging.getLogger("rmqkit")
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)
