"""``rmq store``: looking into and repairing a store directory without a broker; tables, ``--json`` for programs."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.table import Table

from rmqkit import settings as configuration
from rmqkit.errors import RmqError, StoreLocked
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.store import fsck
from rmqkit.store.findings import Finding, Progress
from rmqkit.store.scan import need_numpy
from rmqkit.store.settings import StoreSettings

__all__ = ["app"]

_ROWS = 50
_BODY_CHARS = 40
_FILE_WIDTH = 160
_READ_ONLY_HINT = ", or look at it as it is now with --read-only"


_HELP = "Look into a store directory without a broker, and repair it."
app = typer.Typer(name="store", help=_HELP, no_args_is_help=True, add_completion=False)
_Root = Annotated[Path, typer.Argument(metavar="DIR", help="Store directory (storePathRootDir).")]
_Config = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="broker.conf of the store, for its file sizes.", show_default=False),
]
_ReadOnly = Annotated[bool, typer.Option("--read-only", help="Look at a store that a broker holds, as it is now.")]
_only: Any = partial(typer.Option, show_default=False)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def verify(root: _Root, config: _Config = None, read_only: _ReadOnly = False, as_json: _Json = False) -> None:
    """Check every record, queue entry, extension unit and index chain; exit code 1 when something is damaged."""
    with _one_line_errors(_READ_ONLY_HINT), _progress_bar("verify") as progress:
        report = fsck.verify(root, _settings(config), read_only=read_only, progress=progress)
    if as_json:
        print(json.dumps({"is_sound": report.is_sound, **msgspec.to_builtins(report)}))
    else:
        for finding in report.findings:
            print(finding)
        if (more := sum(report.counts.values()) - len(report.findings)) > 0:
            print(f"... and {more} more")
        print(f"{root}: {_verdict(report)}")
        _print_table(["what", "looked at"], report.checked.items())
        if report.counts:
            _print_table(["what is wrong", "times"], report.counts.items())
    _exit(is_sound=report.is_sound)


@app.command()
def rebuild(
    root: _Root,
    queues: Annotated[bool, typer.Option("--queues", help="Consume queues, with batch and extension files.")] = False,
    index: Annotated[bool, typer.Option("--index", help="Index files.")] = False,
    config: _Config = None,
    as_json: _Json = False,
) -> None:
    """Make queues or index files anew from the commit log; a running broker's store is refused."""
    if not (queues or index):
        raise RmqError("nothing to rebuild: say --queues, --index or both")
    with _one_line_errors(), _progress_bar("rebuild") as progress:
        need_numpy("rebuild")
        from rmqkit.store.rebuild import rebuild as make_anew

        made = make_anew(root, _settings(config), queues=queues, index=index, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(made)))
    else:
        print(f"{root}: {made.records} records, {made.queues} queues and {made.index_files} index files made anew")


@app.command()
def repair(
    root: _Root,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    config: _Config = None,
    as_json: _Json = False,
) -> None:
    """Repair what the commit log determines, and name the rest; exit code 1 when something stays damaged."""
    with _one_line_errors(), _progress_bar("repair") as progress:
        need_numpy("repair")
        from rmqkit.store.repair import repair as repair_store

        repaired = repair_store(root, _settings(config), is_dry_run=is_dry_run, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(repaired)))
    else:
        for step in repaired.steps:
            print(f"would be done: {step}" if is_dry_run else f"done: {step}")
        for finding in repaired.remaining:
            print(f"cannot be repaired: {finding}")
        state = "damaged" if repaired.remaining else "can be repaired" if is_dry_run and repaired.steps else "sound"
        print(f"{root}: {state}")
    _exit(is_sound=not repaired.remaining)


@app.command()
def stat(root: _Root, config: _Config = None, read_only: _ReadOnly = False, as_json: _Json = False) -> None:
    """Count what the log holds, in all and for each queue."""
    with _one_line_errors(_READ_ONLY_HINT), _progress_bar("stat") as progress:
        found = fsck.stat(root, _settings(config), read_only=read_only, progress=progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        facts = {name: getattr(found, name) for name in found.__struct_fields__ if name != "queues"}
        _print_table(["log", ""], ((name.replace("_", " "), _shown(name, v)) for name, v in facts.items()))
        rows = (
            (q.topic, q.queue_id, q.messages, q.bytes, q.min_offset, q.max_offset, _time_text(q.last_store_timestamp))
            for q in found.queues
        )
        _print_table(["topic", "queue", "messages", "bytes", "min", "max", "last stored"], rows)
    _exit(is_sound=not found.damaged_bytes)


@app.command()
def dump(
    root: _Root,
    topic: Annotated[str | None, _only(help="Only this topic.")] = None,
    queue_id: Annotated[int | None, _only("--queue", help="Only this queue id.", min=0)] = None,
    begin: Annotated[str | None, _only("--from", help="Stored at or after: ms or ISO time.")] = None,
    end: Annotated[str | None, _only("--to", help="Stored at or before: ms or ISO time.")] = None,
    key: Annotated[str | None, _only(help="Only messages with this key or unique key.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Most messages. [default: 50; all with --json]")] = None,
    config: _Config = None,
    read_only: _ReadOnly = False,
    as_json: _Json = False,
) -> None:
    """Print the messages of the log in its order."""
    damage: list[Finding] = []
    count_max = limit if limit is not None or as_json else _ROWS
    shown: list[list[str]] = []
    with _one_line_errors(_READ_ONLY_HINT):
        messages = fsck.dump(
            root,
            _settings(config),
            topic=topic,
            queue_id=queue_id,
            begin_ms=0 if begin is None else _time_ms(begin),
            end_ms=None if end is None else _time_ms(end),
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
        _print_table(["stored", "topic", "queue", "offset", "tags", "keys", "body"], shown)
    for finding in damage:
        print(f"rmq: {finding}", file=sys.stderr)
    _exit(is_sound=not damage)


# ---------------------------------------------------------------- what is asked


def _settings(config: Path | None) -> StoreSettings | None:
    if config is None:
        return None
    loaded = configuration.load([StoreSettings], configuration.read_properties(config), source=str(config))
    settings: StoreSettings = loaded.values[0]
    return settings


def _time_ms(text: str) -> int:
    """Milliseconds since the epoch from a number of them or an ISO time (local unless it has a zone)."""
    if text.isdecimal():
        return int(text)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise RmqError(f"time {text!r} must be ms since the epoch or like 2026-01-31T12:00:00") from None


@contextmanager
def _one_line_errors(hint: str = "") -> Iterator[None]:
    """Args: ``hint`` ends the text about a store that a broker holds."""
    try:
        yield
    except StoreLocked as error:
        raise RmqError(f"{error}{hint}") from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise RmqError(f"cannot read or write {error.filename or 'the store'}: {error.strerror}") from None


# ---------------------------------------------------------------- what is printed


@contextmanager
def _progress_bar(what: str) -> Iterator[Progress]:
    """A bar on stderr, when a person looks at it."""
    console = Console(stderr=True)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(headings: list[str], rows: Any) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table, width=console.width if console.is_terminal else _FILE_WIDTH)


def _verdict(report: fsck.Report) -> str:
    words = ["sound" if report.is_sound else "damaged"]
    words += ["held by a broker"] if report.is_live else []
    words += ["not stopped in order"] if report.is_unclean and not report.is_live else []
    return ", ".join(words)


def _shown(name: str, value: Any) -> str:
    return _time_text(value) if name.endswith("_timestamp") and value else str(value)


def _time_text(time_ms: int) -> str:
    """ISO local time, or the number when it is no time a calendar has."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def _row(message: ReceivedMessage) -> list[str]:
    body = message.body[: 4 * _BODY_CHARS].decode("utf-8", "backslashreplace")
    printable = "".join(char if char.isprintable() else "·" for char in body)
    more = "…" if len(printable) > _BODY_CHARS or len(message.body) > 4 * _BODY_CHARS else ""
    place = [message.topic, str(message.queue_id), str(message.queue_offset)]
    words = [message.tags or "", " ".join(message.keys)]
    return [_time_text(message.store_timestamp), *place, *words, printable[:_BODY_CHARS] + more]


def _jsonable(message: ReceivedMessage) -> dict[str, Any]:
    """Every field; the body as text, or as ``body_base64`` when it is not UTF-8."""
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
