"""The session of a ``rmq pipeline`` command: its options, its progress, its errors, its end."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as ProgressBar

from rmqkit.errors import RmqError, SettingsError, StoreError
from rmqkit.spark.fs import RemotePath, exists, resolve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
_POLL_SECONDS = 0.2
_STACK_OR_PLAN = re.compile(r";\n|\n\t|\n\nJVM")

_only: Any = partial(typer.Option, show_default=False)
Store = Annotated[str, typer.Argument(metavar="STORE", help="Store directory (storePathRootDir), or its address.")]
Options = Annotated[
    list[str] | None, _only("-o", "--option", metavar="NAME=VALUE", help="Option of rocketmq-store; repeatable.")
]
Master = Annotated[str, typer.Option(help="Spark master: local[2], spark://host:7077, k8s://...")]
Conf = Annotated[list[str] | None, _only(metavar="KEY=VALUE", help="Setting of the Spark session; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def pairs(texts: list[str] | None) -> dict[str, str]:
    """``["a=1", "b=2"]`` as a mapping. Raises SettingsError: one of them has no ``=``."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise SettingsError(f"{text!r} is no setting: write it as key=value")
        found[key] = value
    return found


@contextmanager
def session(name: str, master: str, conf: list[str] | None, *stores: str, as_json: bool) -> Iterator[SparkSession]:
    """A Spark session for one job that reads ``stores``, with a bar on stderr when a person looks at it; it is stopped
    in the end, unless this process had it before. Raises RmqError, with one line, for whatever fails in the job, and
    StoreError before Spark starts: a store that is not an address is no directory."""
    settings = pairs(conf)
    for path in map(resolve, stores):
        if not isinstance(path, RemotePath) and not exists(path):
            raise StoreError(f"{path} is no directory: give the store directory, the one that holds commitlog")
    if not as_json:
        print(f"rmq: {name} starts Spark at {master}", file=sys.stderr)
    from rmqkit.spark import spark_session

    has_session = _has_session()
    with _ended_if_interrupted():
        spark = spark_session(f"rmq pipeline {name}", master, settings)
    try:
        with _one_line(), _stage_bars(spark, is_hidden=as_json):
            yield spark
    finally:
        if not has_session:
            spark.stop()


@contextmanager
def _ended_if_interrupted() -> Iterator[None]:
    """End the processes that an interrupted start leaves: Spark's Java machine ignores Ctrl-C, and outlives us when it
    finds nobody to tell that it is ready."""
    before = _children()
    try:
        yield
    except BaseException:
        for child in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        raise


def _children() -> set[int]:
    return {int(child) for tasks in Path("/proc/self/task").glob("*/children") for child in tasks.read_text().split()}


def _has_session() -> bool:
    """Whether this process has one already, such as that of a notebook."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


@contextmanager
def _one_line() -> Iterator[None]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from rmqkit.spark.failures import one_line

    try:
        with one_line():
            yield
    except (PySparkException, Py4JError) as error:  # such as a mistake in a query: Spark's own words alone
        raise RmqError(" ".join(_STACK_OR_PLAN.split(str(error), maxsplit=1)[0].split())) from error


@contextmanager
def _stage_bars(spark: SparkSession, *, is_hidden: bool) -> Iterator[None]:
    """A bar for each stage that runs, tasks being what is counted."""
    console = Console(stderr=True)
    if is_hidden or not console.is_terminal:
        yield
        return
    done = threading.Event()
    with ProgressBar(console=console, transient=True, redirect_stdout=False) as bars:
        poll = threading.Thread(target=_follow, args=(spark.sparkContext.statusTracker(), bars, done), daemon=True)
        poll.start()
        try:
            yield
        finally:
            done.set()
            poll.join()


def _follow(tracker: Any, bars: ProgressBar, done: threading.Event) -> None:
    """Follow the stages until ``done``, or Spark is gone, of which the job itself tells."""
    from py4j.protocol import Py4JError

    with suppress(Py4JError, OSError):
        _poll(tracker, bars, done)


def _poll(tracker: Any, bars: ProgressBar, done: threading.Event) -> None:
    shown: dict[int, Any] = {}
    while not done.wait(_POLL_SECONDS):
        running = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()}
        for stage in shown.keys() - running.keys():
            bars.remove_task(shown.pop(stage))
        for stage, info in running.items():
            if info is not None:
                if stage not in shown:
                    shown[stage] = bars.add_task(f"stage {stage}", total=info.numTasks)
                bars.update(shown[stage], completed=info.numCompletedTasks)
