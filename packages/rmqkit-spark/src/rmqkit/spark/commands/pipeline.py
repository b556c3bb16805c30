"""The commands of ``rmq pipeline``, which read stores, write files and topics, and search for messages."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmqkit.cli.frame.printing import jsonable, time_ms
from rmqkit.cli.servers.store import Config, print_report, print_report_json, settings_of
from rmqkit.spark.commands.session import (
    LOCAL,
    Conf,
    Json,
    Master,
    Options,
    Remote,
    Rows,
    Store,
    WorkDir,
    collect,
    disk_path,
    fields,
    pairs,
    session,
    show,
    stop_requested,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rmqkit.store.settings import StoreSettings


_OF_TOPIC = ("topic", "messages", "bytes", "queues", "latency_ms_p50", "latency_ms_p99", "latency_ms_max", "skewed")
_Limit = Annotated[int, typer.Option(min=1, help="Maximum number of rows to show.")]


def summary(
    store: Store,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Summarize every topic and tag: messages, bytes, first and last time."""
    with session("summary", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.summary import summary as summarise

        found = collect(summarise(spark, store, pairs(options)))
    show(found, as_json=as_json)


def audit(
    store: Store,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML report with plots.", show_default=False)
    ] = None,
    period_seconds: Annotated[
        int, typer.Option("--period", min=1, help="Count traffic in periods of this many seconds.")
    ] = 3600,
    hot_keys: Annotated[int, typer.Option(min=0, help="Number of the most frequent keys to show.")] = 20,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Report on a store: traffic, latency, sizes, hot keys, lag, retries, pending messages."""
    with session("audit", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.audit import audit as audited
        from rmqkit.spark.jobs.audit_report import findings, write_report

        found = audited(spark, store, pairs(options), period_seconds=period_seconds, hot_keys=hot_keys)
    if report is not None:
        write_report(found, report)
    if as_json:
        show(found, as_json=True)
    else:
        show(
            Rows(list(_OF_TOPIC), [tuple(getattr(one, name) for name in _OF_TOPIC) for one in found.topics]),
            as_json=False,
        )
        for title, finding in [*findings(found), *(("Note", note) for note in found.notes)]:
            print(f"{title}: {finding}")
        if report is not None:
            print(f"Report: {report}")


def diff(
    left: Store,
    right: Annotated[str, typer.Argument(metavar="STORE", help="Store to compare with.")],
    content_only: Annotated[
        bool, typer.Option("--content", help="Compare only topics, properties and bodies, not the broker's fields.")
    ] = False,
    limit: _Limit = 50,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Compare two stores: messages, queues, configuration. The exit code is 1 if they differ."""
    with session("diff", master, remote, conf, left, right, as_json=as_json) as spark:
        from rmqkit.spark.jobs.diff import diff as compare

        found = compare(spark, left, right, pairs(options), content_only=content_only)
        shown = fields(found, is_equal=found.is_equal, differences=collect(found.differences, limit))
    show(shown, as_json=as_json)
    if not found.is_equal:
        raise typer.Exit(1)


def verify(
    store: Store,
    config: Config = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Read the store although a broker is using it.")
    ] = False,
    log_only: Annotated[bool, typer.Option("--log-only", help="Check only the commit log.")] = False,
    work_dir: WorkDir = "",
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Check every record, queue entry, extension unit and index chain. The exit code is 1 if anything is damaged."""
    with session("verify", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.verify import verify as verified

        settings = settings_of(config, disk_path(store))
        found = verified(spark, store, settings, read_only=read_only, log_only=log_only, work_dir=work_dir)
    _note_archive(settings, "checked")
    if as_json:
        print_report_json(found)
    else:
        show({"segments": found.segments}, as_json=False)
        print_report(store, found)
    if not found.is_sound:
        raise typer.Exit(1)


def rebuild(
    store: Store,
    queues: Annotated[
        bool, typer.Option("--queues", help="Rebuild only consume queues, batch and extension files.")
    ] = False,
    index: Annotated[bool, typer.Option("--index", help="Rebuild only index files.")] = False,
    target: Annotated[
        str,
        typer.Option("--target", metavar="URL", help="Where the files of a store at a URL go: a URL or a folder."),
    ] = "",
    work_dir: WorkDir = "",
    config: Config = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Rebuild consume queues and index files from the commit log. Stop the broker first."""
    with session("rebuild", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.rebuild import rebuild as rebuild_store

        is_all, settings = queues == index, settings_of(config, disk_path(store))
        made = rebuild_store(
            spark,
            store,
            settings,
            queues=queues or is_all,
            index=index or is_all,
            target=target,
            work_dir=work_dir,
        )
    _note_archive(settings, "read")
    show(made, as_json=as_json)


def _note_archive(settings: StoreSettings | None, done: str) -> None:
    """Report that a job left out the segments of the archive in the broker's configuration."""
    if settings is not None and settings.archive:
        from rmqkit.store.archive.places import shown

        print(
            f"rmq: only the log files of the store were {done}, not the segments in {shown(settings.archive)}, which"
            " have queues and checks of their own",
            file=sys.stderr,
        )


def archive(
    store: Store,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Folder or URL of the archive; it may be empty or missing.")
    ],
    table_format: Annotated[str, typer.Option("--format", help="Table format: parquet, delta or iceberg.")] = "parquet",
    partition_by: Annotated[
        str, typer.Option(help="Partition by topic, day, both (topic,day), or nothing (an empty string).")
    ] = "topic,day",
    includes_newest: Annotated[
        bool,
        typer.Option("--include-newest", help="Archive the newest log file, too, which the broker still writes to."),
    ] = False,
    verify: Annotated[
        str, typer.Option(help="What to check after writing: footers, or full (every byte, body and CRC).")
    ] = "footers",
    delete_after_hours: Annotated[
        float | None,
        typer.Option("--delete-after", min=0, help="Delete archived log files older than this many hours."),
    ] = None,
    catalog: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Property of the Iceberg catalog; repeatable.")
    ] = None,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Add the sealed commit log files of a store to a Parquet, Delta or Iceberg table, each file once."""
    with session("archive", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.archive import archive as add_to_archive

        done = add_to_archive(
            spark,
            store,
            target,
            pairs(options),
            table_format=table_format,
            partition_by=[name.strip() for name in partition_by.split(",") if name.strip()],
            includes_newest=includes_newest,
            verify=verify,
            delete_after_hours=delete_after_hours,
            catalog=pairs(catalog),
        )
    show(done, as_json=as_json)


def replay(
    store: Store,
    target: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to send the messages to.")],
    name_server: Annotated[
        str, typer.Option("--name-servers", metavar="HOST:PORT;...", help="Name servers. (default: NAMESRV_ADDR)")
    ] = "",
    topic: Annotated[str, typer.Option(help="Only messages of this topic.")] = "",
    tag: Annotated[str, typer.Option(help="Only messages with this tag.")] = "",
    key: Annotated[str, typer.Option(help="Only messages with this key or unique key.")] = "",
    where: Annotated[
        str, typer.Option(metavar="SQL", help="Only messages that match this SQL condition over the columns.")
    ] = "",
    begin_ms: Annotated[
        int | None, typer.Option("--begin", metavar="MS", help="Only messages stored at or after this time.")
    ] = None,
    end_ms: Annotated[
        int | None, typer.Option("--end", metavar="MS", help="Only messages stored at or before this time.")
    ] = None,
    replay_id: Annotated[
        str,
        typer.Option(
            "--id",
            help="Name of the replay. Use the same name to continue. (default: derived from source, target and filter)",
        ),
    ] = "",
    rate: Annotated[int, typer.Option(min=0, help="Maximum messages per second; 0 means no limit.")] = 0,
    is_ordered: Annotated[
        bool, typer.Option("--ordered", help="Keep the order of messages with the same sharding key.")
    ] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be sent, but send nothing.")] = False,
    sink: Annotated[
        list[str] | None, typer.Option("--sink", metavar="NAME=VALUE", help="Option of the rocketmq sink; repeatable.")
    ] = None,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Send the messages of a store or an archive to a topic. Each is sent once, even if you interrupt the replay."""
    with session("replay", master, remote, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.replay import Filter
        from rmqkit.spark.jobs.replay import replay as send_again

        done = send_again(
            spark,
            store,
            target,
            pairs(options),
            sink={**({"nameServer": name_server} if name_server else {}), **pairs(sink)},
            wanted=Filter(topic=topic, tag=tag, key=key, where=where, begin_ms=begin_ms, end_ms=end_ms),
            replay_id=replay_id,
            rate=rate,
            is_ordered=is_ordered,
            is_dry_run=is_dry_run,
        )
    show(done, as_json=as_json)


# Long: the function declares and describes its options.
def table(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to read.")],
    schema: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Schema of the bodies: JSON Schema, Avro (FILE.avsc), or Protobuf's descriptor (FILE.desc).",
            show_default=False,
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Table: PATH or parquet://PATH, delta://PATH, or iceberg://CATALOG/NAMESPACE.TABLE.",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder of the stream's progress; one for each table.", show_default=False),
    ],
    name_server: Annotated[
        str, typer.Option("--name-servers", metavar="HOST:PORT;...", help="Name servers. (default: NAMESRV_ADDR)")
    ] = "",
    message: Annotated[
        str, typer.Option(metavar="NAME", help="Full name of the Protobuf message, if the descriptor has several.")
    ] = "",
    is_once: Annotated[
        bool, typer.Option("--once", help="Stop when the messages that exist at the start are written.")
    ] = False,
    interval_s: Annotated[
        int, typer.Option("--interval", min=0, help="Seconds from one batch to the next; 0 means no pause.")
    ] = 60,
    is_compacted: Annotated[
        bool, typer.Option("--compact", help="Merge small files at the end, and after every 60 batches.")
    ] = False,
    catalog: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Property of the Iceberg catalog; repeatable.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--option",
            metavar="NAME=VALUE",
            help="Option of the rocketmq format; repeatable.",
            show_default=False,
        ),
    ] = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Append the messages of a live topic to a typed table, each once. It runs until Ctrl-C or SIGTERM.

    Messages that do not fit the schema go to a second table, TARGET_rejected, with the reason."""
    with session("table", master, "", conf, as_json=as_json) as spark, stop_requested() as stop:
        from rmqkit.spark.jobs.typed_table import write_table

        done = write_table(
            spark,
            topic,
            schema,
            target,
            checkpoint,
            {**({"nameServer": name_server} if name_server else {}), **pairs(options)},
            message=message,
            is_once=is_once,
            interval_s=interval_s,
            catalog=pairs(catalog),
            is_compacted=is_compacted,
            stop=stop,
        )
    show(done, as_json=as_json)


_SHOWN = ("storeTimestamp", "topic", "queueId", "queueOffset", "msgId", "tags", "keys", "body")
_Path = Annotated[str, typer.Argument(metavar="PATH", help="Store directory, or a folder written by archive.")]
_RowLimit = Annotated[int | None, typer.Option(min=1, help="Maximum number of rows. (default: 50; all with --json)")]
_ROWS_SHOWN = 50


def query(
    path: _Path,
    topic: Annotated[str, typer.Option(help="Only messages of this topic.")] = "",
    key: Annotated[str, typer.Option(help="Only messages with this key or unique key.")] = "",
    msg_id: Annotated[str, typer.Option("--id", help="Message id: the unique key or the offset message id.")] = "",
    begin: Annotated[
        str | None, typer.Option("--from", help="Only messages stored at or after this time: ms or ISO.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Only messages stored at or before this time: ms or ISO.")
    ] = None,
    limit: _RowLimit = None,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Find messages by topic, key, id and time."""
    begin_ms, end_ms = (None if text is None else time_ms(text) for text in (begin, end))
    given = pairs(options)
    with session("query", master, remote, conf, path, as_json=as_json) as spark:
        from rmqkit.spark.jobs.query import query as find

        frame = find(spark, path, given, topic=topic, key=key, msg_id=msg_id, begin_ms=begin_ms, end_ms=end_ms)
        if not as_json and "columns" not in given:
            frame = frame.select(*_SHOWN)
        _print_rows(frame, limit, as_json=as_json)


def sql(
    path: _Path,
    text: Annotated[str, typer.Argument(metavar="SELECT", help="Query, such as: select topic, count(*) from messages")],
    limit: _RowLimit = None,
    options: Options = None,
    master: Master = LOCAL,
    remote: Remote = "",
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Run a SQL query on a store or an archive.

    The tables are messages, consumequeue, index, commitlog_raw, topics,
    offsets, delay and transactions."""
    logging.getLogger("SQLQueryContextLogger").setLevel(
        logging.CRITICAL
    )  # it logs a long text for each mistake in a statement
    with session("sql", master, remote, conf, path, as_json=as_json) as spark:
        from rmqkit.spark.jobs.query import sql as ask

        _print_rows(ask(spark, path, text, pairs(options)), limit, as_json=as_json)


def _print_rows(frame: DataFrame, limit: int | None, *, as_json: bool) -> None:
    """Print rows as a table, or as JSON, one line per row, as soon as they arrive."""
    if not as_json:
        show(collect(frame, limit or _ROWS_SHOWN), as_json=False)
        return
    for row in (frame if limit is None else frame.limit(limit)).toLocalIterator():
        print(json.dumps({name: jsonable(value) for name, value in row.asDict().items()}, ensure_ascii=False))


app = typer.Typer(
    name="pipeline", help="Spark jobs over store directories and topics.", no_args_is_help=True, add_completion=False
)
for _command in (summary, audit, diff, verify, rebuild, query, sql, archive, replay, table):
    app.command()(_command)


@app.callback()
def _pipeline() -> None: ...
