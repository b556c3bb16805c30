"""Commands that write: to a store's directory, to archives, to topics."""

from __future__ import annotations

from typing import Annotated

import typer

from rmqkit.cli.pipeline.running import LOCAL, Conf, Json, Master, Options, Store, pairs, session
from rmqkit.cli.pipeline.showing import show
from rmqkit.cli.store import Config, settings_of


def rebuild(
    store: Store,
    queues: Annotated[bool, typer.Option("--queues", help="Only consume queues, batch and extension files.")] = False,
    index: Annotated[bool, typer.Option("--index", help="Only index files.")] = False,
    config: Config = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Make queues and index files anew from the commit log; a running broker's store is refused."""
    with session("rebuild", master, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.rebuild import rebuild as make_anew

        is_all = queues == index
        made = make_anew(spark, store, settings_of(config), queues=queues or is_all, index=index or is_all)
    show(made, as_json=as_json)


def archive(
    store: Store,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder or address of the archive, or an empty one.")],
    table_format: Annotated[str, typer.Option("--format", help="parquet, delta or iceberg.")] = "parquet",
    partition_by: Annotated[str, typer.Option(help="topic, day, both or an empty text.")] = "topic,day",
    includes_newest: Annotated[
        bool, typer.Option("--include-newest", help="Also the file that is written to.")
    ] = False,
    verify: Annotated[str, typer.Option(help="footers, or full: every byte, body and CRC.")] = "footers",
    delete_after_hours: Annotated[
        float | None,
        typer.Option("--delete-after", min=0, help="Delete archived log files that are so many hours old."),
    ] = None,
    catalog: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Property of the Iceberg catalog; repeatable.")
    ] = None,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Add the sealed files of a log to a table of Parquet files, each once."""
    with session("archive", master, conf, store, as_json=as_json) as spark:
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
    target: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic that the messages are sent to.")],
    name_server: Annotated[
        str, typer.Option("--name-servers", metavar="HOST:PORT;...", help="Default: NAMESRV_ADDR.")
    ] = "",
    topic: Annotated[str, typer.Option(help="Only of this topic.")] = "",
    tag: Annotated[str, typer.Option(help="Only with this tag.")] = "",
    key: Annotated[str, typer.Option(help="Only with this key or unique key.")] = "",
    where: Annotated[str, typer.Option(metavar="SQL", help="Only what meets this condition over the columns.")] = "",
    begin_ms: Annotated[int | None, typer.Option("--begin", metavar="MS", help="Only stored then or later.")] = None,
    end_ms: Annotated[int | None, typer.Option("--end", metavar="MS", help="Only stored then or earlier.")] = None,
    replay_id: Annotated[
        str, typer.Option("--id", help="Name of the replay; the same goes on. Default: from source, target, filter.")
    ] = "",
    rate: Annotated[int, typer.Option(min=0, help="Messages a second at most; 0: as fast as possible.")] = 0,
    is_ordered: Annotated[
        bool, typer.Option("--ordered", help="Keep the order of messages with the same sharding key.")
    ] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be sent.")] = False,
    sink: Annotated[
        list[str] | None, typer.Option("--sink", metavar="NAME=VALUE", help="Option of the sink; repeatable.")
    ] = None,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Send the messages of a store or an archive to a topic, each once, however often it is interrupted."""
    with session("replay", master, conf, store, as_json=as_json) as spark:
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
