"""Commands that only read stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rmqkit.cli.pipeline.running import LOCAL, Conf, Json, Master, Options, Store, pairs, session
from rmqkit.cli.pipeline.showing import Rows, collect, fields, show
from rmqkit.cli.store import Config, print_report, print_report_json, settings_of

_OF_TOPIC = ("topic", "messages", "bytes", "queues", "latency_ms_p50", "latency_ms_p99", "latency_ms_max", "skewed")
_Limit = Annotated[int, typer.Option(min=1, help="Most rows to show.")]


def summary(
    store: Store, options: Options = None, master: Master = LOCAL, conf: Conf = None, as_json: Json = False
) -> None:
    """Count the messages, times and bytes of every topic and tag."""
    with session("summary", master, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.summary import summary as summarise

        found = collect(summarise(spark, store, pairs(options)))
    show(found, as_json=as_json)


def audit(
    store: Store,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML report with plots.", show_default=False)
    ] = None,
    period_seconds: Annotated[int, typer.Option("--period", min=1, help="Count traffic by so many seconds.")] = 3600,
    hot_keys: Annotated[int, typer.Option(min=0, help="How many of the most frequent keys.")] = 20,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Say what happened in a store: traffic, latency, sizes, hot keys, lag, retries, what waits."""
    with session("audit", master, conf, store, as_json=as_json) as spark:
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
    right: Annotated[str, typer.Argument(metavar="STORE", help="The store to compare it with.")],
    content_only: Annotated[
        bool, typer.Option("--content", help="Compare topics, properties and bodies; not what the broker adds.")
    ] = False,
    limit: _Limit = 50,
    options: Options = None,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Say what distinguishes two stores: messages, queues, configuration; exit code 1 when they differ."""
    with session("diff", master, conf, left, right, as_json=as_json) as spark:
        from rmqkit.spark.jobs.diff import diff as compare

        found = compare(spark, left, right, pairs(options), content_only=content_only)
        shown = fields(found, is_equal=found.is_equal, differences=collect(found.differences, limit))
    show(shown, as_json=as_json)
    if not found.is_equal:
        raise typer.Exit(1)


def verify(
    store: Store,
    config: Config = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Look at a store that a broker holds.")] = False,
    log_only: Annotated[bool, typer.Option("--log-only", help="Leave out all files but the commit log.")] = False,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Check every record, queue entry, extension unit and index chain; exit code 1 when something is damaged."""
    with session("verify", master, conf, store, as_json=as_json) as spark:
        from rmqkit.spark.jobs.verify import verify as verified

        found = verified(spark, store, settings_of(config), read_only=read_only, log_only=log_only)
    if as_json:
        print_report_json(found)
    else:
        show({"segments": found.segments}, as_json=False)
        print_report(store, found)
    if not found.is_sound:
        raise typer.Exit(1)
