"""``rmq tail TOPIC``: print messages when they are stored, one per line.

On a terminal, without ``--format``, a body is cut to fit into the line. Files and pipes get whole bodies, so that they
can be searched.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import string
import sys
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin.messages.sending import Stop
from rmqkit.cli import with_options
from rmqkit.cli.admin.message import shown
from rmqkit.cli.frame.connected import client_settings, note, run, runtime_for
from rmqkit.cli.frame.nouns import COMMON, LIVE_TOPICS
from rmqkit.cli.frame.printing import time_ms, time_text
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.reader import Start, TopicReader, Wanted
from rmqkit.client.runtime.settings import PullConsumerSettings
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import own_properties

app = typer.Typer(name="tail", add_completion=False)

LINE_FORMAT = "{time} {queue}@{offset} {tags} {keys} {body}"
FIELDS = ("time", "queue", "offset", "tags", "keys", "body", "topic", "id", "born", "properties")
_BODY_CELLS_MIN = 24
_OFFSET_DIGITS_MAX = 12
"""A number with more digits is a time in ms."""


# Long: it declares the command's options.
@app.command()
@with_options(COMMON)
def tail(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=LIVE_TOPICS)],
    begin: Annotated[
        str,
        typer.Option(
            "--from", metavar="PLACE", help="Where to start: end, beginning, a time (ISO or ms), or an offset."
        ),
    ] = "end",
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
    keys: Annotated[
        list[str] | None, typer.Option("--key", help="Only messages with this key or message id; repeatable.")
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="[BROKER:]ID", help="Only messages in this queue; repeatable."),
    ] = None,
    line_format: Annotated[
        str, typer.Option("--format", help=f"Format of each line. Fields: {', '.join(FIELDS)}.")
    ] = LINE_FORMAT,
    is_whole: Annotated[
        bool, typer.Option("--whole", help="Show whole bodies. By default bodies are cut to the line.")
    ] = False,
    group: Annotated[
        str, typer.Option(help="Consumer group for the requests. No offsets are saved for it.")
    ] = TOOLS_GROUP,
    **options: Any,
) -> None:
    """Show new messages of a topic as they arrive, until Ctrl-C.

    No offsets are saved, and other consumers are not affected."""
    if sql is not None and tags != "*":
        raise typer.BadParameter("use --tags or --sql, not both: in SQL92, compare TAGS")
    check_format(line_format)
    wanted = Wanted(sql or tags, "TAG" if sql is None else "SQL92", keys or (), queues or ())
    start, as_json = _start(begin), options["as_json"]
    is_cut = line_format == LINE_FORMAT and not is_whole and sys.stdout.isatty()

    async def work(stop: Stop) -> None:
        left = count
        settings = client_settings(PullConsumerSettings, options)
        with contextlib.suppress(TimeoutError):
            async with (
                runtime_for(topic, options) as runtime,
                PullConsumer(group, settings=settings, runtime=runtime) as consumer,
                TopicReader(consumer, topic, start, wanted, note) as messages,
                asyncio.timeout(seconds),
            ):
                while left is None or left > 0:
                    some = (await messages.next())[:left]
                    left = None if left is None else left - len(some)
                    columns = columns_for(is_cut)
                    if as_json:
                        lines = [msgspec.json.encode(shown(one)).decode() for one in some]
                    else:
                        lines = [line_text(line_format, one, columns) for one in some]
                    print("\n".join(lines), flush=True)

    run(work)


def _start(text: str) -> Start:
    if text == "end":
        return Start()
    if text == "beginning":
        return Start(offset=0)
    if text.isdecimal() and len(text) <= _OFFSET_DIGITS_MAX:
        return Start(offset=int(text))
    return Start(time_ms=time_ms(text))


def columns_for(is_cut: bool) -> int | None:
    """Return the current number of columns of a line; None if lines are not cut."""
    return shutil.get_terminal_size().columns if is_cut else None


def check_format(text: str) -> None:
    """Check the format of a line. Raises BadParameter: it has fields that are not in `FIELDS`."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        unknown = names.difference(FIELDS)
    except ValueError as error:
        raise typer.BadParameter(f"--format {text!r}: {error}") from None
    if unknown:
        raise typer.BadParameter(f"--format has no field {{{min(unknown)}}}: the fields are {', '.join(FIELDS)}")


def line_text(text: str, message: ReceivedMessage, columns: int | None) -> str:
    """Return the line of a message; a body at its end is cut so that the line fits into ``columns``."""
    line = text.format(
        time=time_text(message.store_timestamp),
        queue=f"{message.broker_name}:{message.queue_id}",
        offset=message.queue_offset,
        tags=_in_line(message.tags or "-"),
        keys=_in_line(" ".join(message.keys) or "-"),
        body="" if columns else _body(message.body),
        topic=message.topic,
        id=_in_line(message.msg_id),
        born=time_text(message.born_timestamp),
        properties=_in_line(" ".join(f"{name}={value}" for name, value in own_properties(message.properties).items())),
    )
    return line + _beginning(message.body, columns, line) if columns else line


def _body(body: bytes) -> str:
    return _in_line(body.decode("utf-8", "backslashreplace"))


def _beginning(body: bytes, columns: int, line: str) -> str:
    """Return the part of a body that fits after the beginning of a line; if it is cut, also the size of the body."""
    from rich.cells import cell_len, set_cell_size

    cells_max = max(_BODY_CELLS_MIN, columns - cell_len(line))
    text, size = _body(body[: 4 * cells_max]), f"… ({len(body):,} bytes)"
    if len(body) <= 4 * cells_max and cell_len(text) <= cells_max:
        return text
    return set_cell_size(text, cells_max - len(size)) + size


def _in_line(text: str) -> str:
    """Return a text without characters that end the line or control the terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
