"""``rmq store``: inspect and repair a store directory without a broker; output as tables, or JSON with ``--json``."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress as ProgressBar

from rmqkit import extras
from rmqkit import settings as configuration
from rmqkit.cli.frame.printing import body_text, cell, jsonable, print_table, time_ms, time_text
from rmqkit.cli.others import module_of_another_package
from rmqkit.errors import RmqError, SettingsError, StoreError, StoreLocked
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.store.log.scan import need_numpy
from rmqkit.store.offline import check as fsck
from rmqkit.store.offline.findings import Finding, Progress
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 50
_READ_ONLY_HINT = ", or read the store as it is now with --read-only"


_HELP = "Inspect and repair a store directory, without a broker."
app = typer.Typer(name="store", help=_HELP, no_args_is_help=True, add_completion=False)
_Root = Annotated[Path, typer.Argument(metavar="DIR", help="Store directory (storePathRootDir).")]
Config = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        help="The broker.conf of this store. It is needed if file sizes are not the defaults.",
        show_default=False,
    ),
]
_ReadOnly = Annotated[bool, typer.Option("--read-only", help="Read the store although a broker is using it.")]
_only: Any = partial(typer.Option, show_default=False)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def verify(root: _Root, config: Config = None, read_only: _ReadOnly = False, as_json: _Json = False) -> None:
    """Check every record, queue entry, extension unit and index chain. The exit code is 1 if anything is damaged."""
    with one_line_errors(_READ_ONLY_HINT), progress_bar("verify") as progress:
        report = fsck.verify(root, settings_of(config, root), read_only=read_only, progress=progress)
    if as_json:
        print_report_json(report)
    else:
        print_report(root, report)
    _exit(is_sound=report.is_sound)


@app.command()
def rebuild(
    root: _Root,
    queues: Annotated[
        bool, typer.Option("--queues", help="Rebuild consume queues, with batch and extension files.")
    ] = False,
    index: Annotated[bool, typer.Option("--index", help="Rebuild index files.")] = False,
    config: Config = None,
    as_json: _Json = False,
) -> None:
    """Rebuild consume queues or index files from the commit log. Stop the broker first."""
    if not (queues or index):
        raise SettingsError("nothing to rebuild: give --queues, --index or both")
    with one_line_errors(), progress_bar("rebuild") as progress:
        need_numpy("rebuild")
        from rmqkit.store.offline.rebuild import rebuild as rebuild_store

        made = rebuild_store(root, settings_of(config, root), queues=queues, index=index, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(made)))
    else:
        print(f"{root}: {made.records} records, {made.queues} queues and {made.index_files} index files rebuilt")


@app.command()
def repair(
    root: _Root,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, but change nothing.")] = False,
    config: Config = None,
    as_json: _Json = False,
) -> None:
    """Repair everything that can be rebuilt from the commit log, and list the rest.

    Changes of topics and groups that are only in journals are written to the files, which Apache's brokers read. The
    exit code is 1 if something is still damaged. Stop the broker first."""
    with one_line_errors(), progress_bar("repair") as progress:
        need_numpy("repair")
        from rmqkit.store.offline.repair import repair as repair_store

        repaired = repair_store(root, settings_of(config, root), is_dry_run=is_dry_run, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(repaired)))
    else:
        for step in repaired.steps:
            print(f"would do: {step}" if is_dry_run else f"done: {step}")
        for finding in repaired.remaining:
            print(f"cannot be repaired: {finding}")
        state = "damaged" if repaired.remaining else "can be repaired" if is_dry_run and repaired.steps else "sound"
        print(f"{root}: {state}")
    _exit(is_sound=not repaired.remaining)


@app.command()
def stat(root: _Root, config: Config = None, read_only: _ReadOnly = False, as_json: _Json = False) -> None:
    """Count the messages and bytes of the log, in total and per queue."""
    with one_line_errors(_READ_ONLY_HINT), progress_bar("stat") as progress:
        found = fsck.stat(root, settings_of(config, root), read_only=read_only, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        facts = {name: getattr(found, name) for name in found.__struct_fields__ if name != "queues"}
        print_table(["log", ""], ((name.replace("_", " "), _shown(name, v)) for name, v in facts.items()))
        rows = (
            (q.topic, q.queue_id, q.messages, q.bytes, q.min_offset, q.max_offset, time_text(q.last_store_timestamp))
            for q in found.queues
        )
        print_table(["topic", "queue", "messages", "bytes", "min", "max", "last stored"], rows)
    _exit(is_sound=not found.damaged_bytes)


@app.command()
def dump(
    root: _Root,
    topic: Annotated[str | None, _only(help="Only messages of this topic.")] = None,
    queue_id: Annotated[int | None, _only("--queue", help="Only messages of this queue id.", min=0)] = None,
    begin: Annotated[str | None, _only("--from", help="Only messages stored at or after this time: ms or ISO.")] = None,
    end: Annotated[str | None, _only("--to", help="Only messages stored at or before this time: ms or ISO.")] = None,
    key: Annotated[str | None, _only(help="Only messages with this key or unique key.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of messages. (default: 50; all with --json)")
    ] = None,
    config: Config = None,
    read_only: _ReadOnly = False,
    as_json: _Json = False,
) -> None:
    """Print the messages of the commit log, in log order."""
    damage: list[Finding] = []
    count_max = limit if limit is not None or as_json else _ROWS
    shown: list[list[str]] = []
    with one_line_errors(_READ_ONLY_HINT):
        messages = fsck.dump(
            root,
            settings_of(config, root),
            topic=topic,
            queue_id=queue_id,
            begin_ms=0 if begin is None else time_ms(begin),
            end_ms=None if end is None else time_ms(end),
            key=key,
            read_only=read_only,
            on_damage=damage.append,
        )
        for count, message in enumerate(messages):
            if count == count_max:
                print(f"rmq: there are more than {count_max} messages, --limit shows more", file=sys.stderr)
                break
            if as_json:
                print(json.dumps(_jsonable(message), ensure_ascii=False))
            else:
                shown.append(_row(message))
    if not as_json:
        print_table(["stored", "topic", "queue", "offset", "tags", "keys", "body"], shown)
    for finding in damage:
        print(f"rmq: {finding}", file=sys.stderr)
    _exit(is_sound=not damage)


@app.command()
def query(
    root: Annotated[
        str, typer.Argument(metavar="STORE", help="Store directory, or its address, as s3://bucket/store.")
    ],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A statement of DuckDB; the table is called messages.")],
    limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of rows. [default: 50 in a table, else all]")
    ] = None,
    skip_damage: Annotated[bool, typer.Option("--skip-damage", help="Skip damaged messages.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    as_json: _Json = False,
    archive: Annotated[
        str,
        typer.Option(
            metavar="ARCHIVE", help="Query the segments of this archive, too: /mnt/archive/broker-a, or its address."
        ),
    ] = "",
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe", help="Let SQL read and write other files, load extensions, use the network."),
    ] = False,
) -> None:
    """Query a store with SQL: `select topic, count(*) from messages group by topic`. You can run this command while a
    broker uses the store.

    The columns are topic, queueId, queueOffset, msgId, keys, tags, properties, body, bornTimestamp, storeTimestamp and
    more: `describe messages` lists them. A query decodes only the columns that it names. Conditions on topic, queueId
    and storeTimestamp make it faster, because other messages are not decoded. With --json each row is a line."""
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json exclude each other")
    with extras.needed("query", "SQL over a store"):
        import duckdb  # noqa: F401 - checked first: the error names the extra that installs everything
    arrow = module_of_another_package("store query", "query")
    with one_line_errors(), _said_otherwise(arrow.DAMAGE_HINT, "--skip-damage reads on"):
        messages = arrow.dataset(root, corrupt="skip" if skip_damage else "fail", archive=archive)
        found = arrow.query(messages, sql, unsafe=unsafe)
        if found is None:
            return
        is_table = not (as_csv or as_json)
        count_max = _ROWS if limit is None and is_table else limit
        rows = (row for batch in _read(found, messages) for row in batch.to_pylist(maps_as_pydicts="lossy"))
        kept = list(itertools.islice(rows, count_max)) if is_table else itertools.islice(rows, count_max)
        if as_json:
            for row in kept:
                fields = {name: jsonable(plain(value)) for name, value in row.items()}
                print(msgspec.json.encode(fields).decode())
        elif as_csv:
            write = csv.writer(sys.stdout, lineterminator="\n").writerow
            write(found.schema.names)
            for row in kept:
                write(_csv_cell(row[name]) for name in found.schema.names)
        else:
            names = found.schema.names
            right = [field.name for field in found.schema if _is_number(field.type)]
            print_table(names, ([cell("", plain(row[name])) for name in names] for row in kept), right=right)
        if count_max is not None and is_table and next(rows, None) is not None:
            print(f"rmq: there are more than {count_max} rows, --limit shows more", file=sys.stderr)


def _read(found: pa.RecordBatchReader, messages: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a result. Raises StoreError: the store could not be read to its end."""
    try:
        yield from found
    except Exception:
        if messages.failure is None:
            raise
        raise messages.failure from None


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow.types

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind))


def plain(value: Any) -> Any:
    """Return a value of SQL for display and JSON: DuckDB's sums of integers are decimals."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | time) and not isinstance(value, datetime) else value


def _csv_cell(value: Any) -> Any:
    value = jsonable(plain(value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


# ---------------------------------------------------------------- also used by the Spark jobs


def print_report_json(report: fsck.Report) -> None:
    """Print the report on a store as JSON."""
    gaps = [{"path": path, "position": start, "end": end} for (path, start), end in report.gaps.items()]
    print(json.dumps({"is_sound": report.is_sound, **msgspec.to_builtins(report), "gaps": gaps}))


def print_report(root: Path | str, report: fsck.Report) -> None:
    """Print the report on a store: findings, verdict, counts."""
    for finding in report.findings:
        print(finding)
    if (more := sum(report.counts.values()) - len(report.findings)) > 0:
        print(f"... and {more} more")
    print(f"{root}: {_verdict(report)}")
    if (count := report.checked[fsck.UNWRITTEN]) and not report.is_live:
        said = "of topics and groups, which Apache's brokers do not read; to write them to the files, run"
        print(f"{count} {fsck.UNWRITTEN} {said}: rmq store repair {shlex.quote(str(root))}")
    print_table(["what", "checked"], report.checked.items())
    if report.counts:
        print_table(["problem", "count"], report.counts.items())


# ---------------------------------------------------------------- input


def settings_of(config: Path | None, store: Path | None) -> StoreSettings | None:
    """Return the settings in a broker.conf, for the store in ``store``. If ``store`` is a copy, replace the
    directories of the log by the directories in the copy. Return None without a configuration.
    Raises SettingsError: a setting is not valid, or the copy lacks a directory."""
    if config is None:
        return None
    texts = configuration.read_properties(config)
    settings: StoreSettings = configuration.load([StoreSettings], texts, source=str(config)).values[0]
    if store is None:
        return settings
    root = Path(settings.store_path_root_dir).expanduser().absolute()
    store = store.absolute()
    if "storePathRootDir" not in texts or root == store or (root.exists() and root.resolve() == store.resolve()):
        return settings
    for name in ("store_path_commit_log", "read_only_commit_log_store_paths"):
        paths = [Path(text.strip()).expanduser() for text in getattr(settings, name).split(",") if text.strip()]
        setattr(settings, name, ",".join(str(_in_copy(path, root, store, config)) for path in paths))
    return settings


def _in_copy(path: Path, root: Path, copy: Path, config: Path) -> Path:
    """Return the directory of the log in ``copy``. The log of the original store ``root`` is in ``path``."""
    if path.is_relative_to(root):
        return copy / path.relative_to(root)
    if (copy / "commitlog").is_dir():
        return copy / "commitlog"
    raise SettingsError(
        f"{config} has the commit log of {root} in {path}, and {copy} has no commitlog: copy the log to"
        f" {copy / 'commitlog'}, or name its directory as storePathCommitLog in a copy of the file without"
        " storePathRootDir"
    )


@contextmanager
def one_line_errors(hint: str = "") -> Iterator[None]:
    """Convert errors of a store to errors of one line. ``hint`` is the end of the text about a locked store."""
    try:
        yield
    except StoreLocked as error:
        raise RmqError(f"{error}{hint}") from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise RmqError(f"cannot read or write {error.filename or 'the store'}: {error.strerror}") from None


@contextmanager
def _said_otherwise(hint: str, ours: str) -> Iterator[None]:
    """Replace a Python argument in the text of an error by an option of the command."""
    try:
        yield
    except StoreError as error:
        raise StoreError(str(error).replace(hint, ours)) from None


# ---------------------------------------------------------------- output


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show a progress bar on stderr, if it is a terminal."""
    console = Console(stderr=True)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _verdict(report: fsck.Report) -> str:
    words = ["sound" if report.is_sound else "damaged"]
    words += ["in use by a broker"] if report.is_live else []
    words += ["not shut down cleanly"] if report.is_unclean and not report.is_live else []
    return ", ".join(words)


def _shown(name: str, value: Any) -> str:
    return time_text(value) if name.endswith("_timestamp") and value else str(value)


def _row(message: ReceivedMessage) -> list[str]:
    place = [message.topic, str(message.queue_id), str(message.queue_offset)]
    words = [message.tags or "", " ".join(message.keys)]
    return [time_text(message.store_timestamp), *place, *words, body_text(message.body)]


def _jsonable(message: ReceivedMessage) -> dict[str, Any]:
    """Return every field; the body as text, or as ``body_base64`` if it is not UTF-8."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    del fields["broker_name"]
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = fields.pop("body")
    return fields


def _exit(*, is_sound: bool) -> None:
    if not is_sound:
        raise typer.Exit(1)
