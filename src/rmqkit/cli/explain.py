"""``rmq explain``: why a message was not consumed by a group; the sentence, the evidence, the remedy."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.admin.api import Admin
from rmqkit.cli.admin.frame import Broker, Group, Named, Topic, View, command_of

if TYPE_CHECKING:
    from rmqkit.admin.causes import Explanation

_FILE_WIDTH = 160
_VALUE_WIDTH_MIN = 20

Id = Annotated[str, Named("-i", "--id", help="Offset message id or unique key of a message.")]

app = typer.Typer(name="explain", add_completion=False)


async def _explain(
    admin: Admin,
    topic: Topic,
    group: Group,
    message: Id = "",
    key: Annotated[str, typer.Option("-k", "--key", help="Instead of an id: one of its keys.")] = "",
    queue: Annotated[int | None, typer.Option("-q", "--queue", min=0, help="Instead of an id: its queue …")] = None,
    offset: Annotated[int | None, typer.Option("-o", "--offset", min=0, help="… and its offset there.")] = None,
    broker: Broker = None,
) -> View:
    """Why a message was not consumed by a group: one sentence, the evidence, what to do."""
    if bool(message) + bool(key) + (offset is not None) != 1 or (queue is None) != (offset is None):
        raise typer.BadParameter("which message? give its id, or --key, or --queue and --offset")
    from rmqkit.admin.explain import At, Key, explain

    named = Key(key) if key else message if queue is None or offset is None else At(queue, offset, broker)
    found = await explain(admin, topic, group, named)
    return View(found, list(page(found, shutil.get_terminal_size((_FILE_WIDTH, 0)).columns)))


def page(found: Explanation, width: int) -> Iterator[str]:
    """The lines of an explanation, none longer than ``width`` where words allow it."""
    yield from textwrap.wrap(f"{found.cause}: {found.sentence}", width)
    yield ""
    rows = [(one.name, str(one.value), one.source) for one in found.evidence]
    names, values, sources = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else (0, 0, 0)
    room = min(values, max(width - names - sources - 4, _VALUE_WIDTH_MIN))
    for name, value, source in rows:
        first, *rest = textwrap.wrap(value, room) or [""]
        yield f"{name:<{names}}  {first:<{room}}  {source}"
        yield from (f"{'':<{names}}  {line}" for line in rest)
    yield ""
    yield from textwrap.wrap(f"Remedy: {found.remedy}", width)


app.command("explain", help=_explain.__doc__)(command_of(_explain, watch=False))
