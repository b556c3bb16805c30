"""A Spark session for a command of ``rmq pipeline``, and the output of its result as tables or JSON.

Data frames are fetched while the session runs, and printed after it has stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rmqkit.arrow.fs import RemotePath, exists, resolve
from rmqkit.cli.frame.printing import cell, jsonable, print_table
from rmqkit.errors import RmqError, SettingsError, StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


LOCAL = "local[*]"
_STACK_OR_PLAN = re.compile(r";\n|\n\t|\n\nJVM")

_only: Any = partial(typer.Option, show_default=False)
Store = Annotated[str, typer.Argument(metavar="STORE", help="Store directory (storePathRootDir), or its URL.")]
Options = Annotated[
    list[str] | None,
    _only("-o", "--option", metavar="NAME=VALUE", help="Option of the rocketmq-store format; repeatable."),
]
Master = Annotated[str, typer.Option(help="Spark master: local[2], spark://host:7077, k8s://...")]
Remote = Annotated[
    str, typer.Option(metavar="sc://HOST:PORT", help="Spark Connect server to use in place of a master.")
]
Conf = Annotated[list[str] | None, _only(metavar="KEY=VALUE", help="Setting of the Spark session; repeatable.")]
WorkDir = Annotated[
    str,
    _only("--work-dir", metavar="DIR", help="Folder for the working copy of a store at a URL. (default: temporary)"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def disk_path(store: str) -> Path | None:
    """Return the path of a store on a disk, or None if the store is at an address."""
    path = resolve(store)
    return None if isinstance(path, RemotePath) else Path(path)


def pairs(texts: list[str] | None) -> dict[str, str]:
    """Convert ``["a=1", "b=2"]`` to a mapping. Raises SettingsError: a text has no ``=``."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise SettingsError(f"{text!r} is not a setting: write it as key=value")
        found[key] = value
    return found


@contextmanager
def session(
    name: str, master: str, remote: str, conf: list[str] | None, *stores: str, as_json: bool
) -> Iterator[SparkSession]:
    """Provide a Spark session for one job that reads ``stores``, with Spark's progress bar if stderr is a terminal.
    The session is stopped at the end, unless this process had it before. Raises RmqError, with one line, for every
    error of rmqkit or Spark in the job. Raises StoreError before Spark starts: a store is neither an address nor a
    directory."""
    settings = pairs(conf)
    if sys.stderr.isatty() and not (as_json or remote or "SPARK_REMOTE" in os.environ):  # a server has its own setting
        settings = {"spark.ui.showConsoleProgress": "true", **settings}
    for path in map(resolve, stores):
        if not isinstance(path, RemotePath) and not exists(path):
            raise StoreError(f"{path} is not a directory: give the store directory, which contains commitlog")
    if not as_json:
        print(
            f"rmq: {name} starts Spark at {master}" if not remote else f"rmq: {name} uses Spark Connect",
            file=sys.stderr,
        )
    from rmqkit.spark import spark_session

    has_session = _has_session()
    with ended_if_interrupted():
        spark = spark_session(f"rmq pipeline {name}", master, settings, remote=remote)
    try:
        with one_line_errors():
            yield spark
    finally:
        if not has_session:
            spark.stop()


@contextmanager
def ended_if_interrupted() -> Iterator[None]:
    """Stop the processes that an interrupted start leaves: Spark's JVM ignores Ctrl-C, and continues to run if this
    process stops before the JVM has reported that it is ready."""
    before = _children()
    try:
        yield
    except BaseException:
        for child in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        raise


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Provide an event that SIGINT and SIGTERM set, so that a stream stops after its batch. A second signal has its
    usual effect."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(*_: object) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()


def _children() -> set[int]:
    return {int(child) for tasks in Path("/proc/self/task").glob("*/children") for child in tasks.read_text().split()}


def _has_session() -> bool:
    """Return True if this process already has a session, such as the session of a notebook."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


@contextmanager
def one_line_errors() -> Iterator[None]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from rmqkit.spark.failures import one_line

    try:
        with one_line():
            yield
    except (PySparkException, Py4JError) as error:  # such as a mistake in a query: only Spark's own text
        raise RmqError(" ".join(_STACK_OR_PLAN.split(str(error), maxsplit=1)[0].split())) from error


class Rows(msgspec.Struct):
    """The rows of a data frame, or its first rows."""

    names: list[str]
    rows: list[tuple[Any, ...]]
    is_cut: bool = False


def collect(frame: DataFrame, limit: int | None = None) -> Rows:
    """Fetch at most ``limit`` rows of a data frame."""
    rows = frame.collect() if limit is None else frame.limit(limit + 1).collect()
    return Rows(list(frame.columns), [tuple(row) for row in rows[:limit]], limit is not None and len(rows) > limit)


def fields(found: msgspec.Struct, **others: Any) -> dict[str, Any]:
    """Return the fields of a job's result. ``others`` (such as the rows of a data frame) are added, or replace
    fields."""
    return {name: getattr(found, name) for name in found.__struct_fields__} | others


def show(found: Rows | msgspec.Struct | Mapping[str, Any], *, as_json: bool) -> None:
    """Print a data frame, or the totals of a job and their tables. In JSON a data frame is a list of objects, and
    totals are an object with the names of their fields."""
    if as_json:
        print(json.dumps(_objects(found), ensure_ascii=False))
    elif isinstance(found, Rows):
        _print(found)
    else:
        values = fields(found) if isinstance(found, msgspec.Struct) else found
        tables = {name: _rows(value) for name, value in values.items()}
        facts = [
            (_words(name), cell(name, value)) for name, value in values.items() if tables[name] is None and value != []
        ]
        if facts:
            print_table(["what", ""], facts)
        for name, rows in tables.items():
            if rows is not None and rows.rows:
                print(f"{_words(name)}:")
                _print(rows)


def _print(found: Rows) -> None:
    columns = list(zip(*found.rows, strict=True)) or [()] * len(found.names)
    right = [_words(name) for name, values in zip(found.names, columns, strict=True) if _is_numeric(values)]
    shown = (tuple(map(cell, found.names, row)) for row in found.rows)
    print_table(list(map(_words, found.names)), shown, right=right)
    if found.is_cut:
        print(f"rmq: there are more than {len(found.rows)} rows, --limit shows more", file=sys.stderr)


def _words(name: str) -> str:
    """Split ``firstStoreTimestamp`` into words, so that a heading can be wrapped."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()


def _is_numeric(values: Any) -> bool:
    return any(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _rows(value: Any) -> Rows | None:
    """Convert a field of totals to a table; None if the field is not a table."""
    if isinstance(value, Rows):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, msgspec.Struct) for one in value):
        names = list(value[0].__struct_fields__)
        return Rows(names, [tuple(getattr(one, name) for name in names) for one in value])
    return Rows(["what", "count"], list(value.items())) if isinstance(value, dict) else None


def _objects(found: Any) -> Any:
    match found:
        case Rows():
            return [dict(zip(found.names, map(jsonable, row), strict=True)) for row in found.rows]
        case dict():
            return {name: _objects(value) for name, value in found.items()}
    return jsonable(found)
