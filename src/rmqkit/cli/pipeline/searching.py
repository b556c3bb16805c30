"""Commands that look for messages in a store, or in an archive of one."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.cli.pipeline.running import LOCAL, Conf, Json, Master, Options, pairs, session
from rmqkit.cli.pipeline.showing import collect, show
from rmqkit.cli.printing import jsonable
from rmqkit.cli.times import time_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SHOWN = ("storeTimestamp", "topic", "queueId", "queueOffset", "msgId", "tags", "keys", "body")
_Path = Annotated[str, typer.Argument(metavar="PATH", help="Store directory, or a folder made by archive.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="Most rows. [default: 50; all with --json]")]
_ROWS = 50


def query(
    path: _Path,
    topic: Annotated[str, typer.Option(help="Only this topic.")] = "",
    key: Annotated[str, typer.Option(help="Only messages with this key or unique id.")] = "",
    msg_id: Annotated[str, typer.Option("--id", help="Unique id, or offset message id.")] = "",
    begin: Annotated[str | None, typer.Option("--from", help="Stored at or after: ms or ISO time.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Stored at or before: ms or ISO time.")] = None,
    limit: _Limit = None,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Find messages by topic, key, id and time."""
    begin_ms, end_ms = (None if text is None else time_ms(text) for text in (begin, end))
    given = pairs(options)
    with session("query", master, conf, path, as_json=as_json) as spark:
        from rmqkit.spark.jobs.query import query as find

        frame = find(spark, path, given, topic=topic, key=key, msg_id=msg_id, begin_ms=begin_ms, end_ms=end_ms)
        if not as_json and "columns" not in given:
            frame = frame.select(*_SHOWN)
        _print(frame, limit, as_json=as_json)


def sql(
    path: _Path,
    text: Annotated[str, typer.Argument(metavar="SELECT", help="Such as: select topic, count(*) from messages")],
    limit: _Limit = None,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Ask with SQL: messages, consumequeue, index, commitlog_raw, topics, offsets, delay, transactions."""
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # a page for each mistake in a statement
    with session("sql", master, conf, path, as_json=as_json) as spark:
        from rmqkit.spark.jobs.query import sql as ask

        _print(ask(spark, path, text, pairs(options)), limit, as_json=as_json)


def _print(frame: DataFrame, limit: int | None, *, as_json: bool) -> None:
    """Rows as a table, or as JSON, one line each, as they come."""
    if not as_json:
        show(collect(frame, limit or _ROWS), as_json=False)
        return
    for row in (frame if limit is None else frame.limit(limit)).toLocalIterator():
        print(json.dumps({name: jsonable(value) for name, value in row.asDict().items()}, ensure_ascii=False))
