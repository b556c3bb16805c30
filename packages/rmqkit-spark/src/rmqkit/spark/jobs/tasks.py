"""Execution of a job's functions in Spark's tasks: with RDDs, or over Spark Connect, which has no RDDs.

=================  ==========================================  =====================================================
function           session in the driver's process             session of Spark Connect (``sc://``)
=================  ==========================================  =====================================================
`run_tasks`        ``parallelize(items).map(work).collect()``  a read of `rmqkit.spark.source.tasks`, results pickled
`reduce_tasks`     the same with ``treeReduce``                the same, added up in the program
`regroup_tasks`    ``flatMap(work).groupByKey()``              the same with ``groupBy(key).applyInArrow``
`rows_of_tasks`    ``createDataFrame`` of an RDD               the same, with a schema
=================  ==========================================  =====================================================

Over Connect the server needs this package and the same minor version of Python, because functions are pickled. A job is
planned in the calling program, so the program must reach the store at the same path or address as the server.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from rmqkit.spark.failures import one_line
from rmqkit.spark.session import is_connect
from rmqkit.spark.source.tasks import FORMAT, task_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["core_count", "reduce_tasks", "regroup_tasks", "rows_of_tasks", "run_tasks"]

Result = TypeVar("Result")
Item = TypeVar("Item")

_PROBE_ROWS = 1 << 16


def core_count(spark: SparkSession) -> int:
    """Return the number of tasks that Spark runs at the same time (its default parallelism)."""
    if not is_connect(spark):
        return spark.sparkContext.defaultParallelism
    # Connect does not report the number, but divides a range into this number of parts.
    parts = spark.range(_PROBE_ROWS).selectExpr("spark_partition_id() as part").distinct()
    return parts.count()


def run_tasks(
    spark: SparkSession, work: Callable[[Item], Result], items: Sequence[Item], task_count: int | None = None
) -> list[Result]:
    """Run ``work`` on every item, by default in one task per item. Return the results in the order of the items.
    Raises RmqError: a task failed; the text has one line."""
    if not items:
        return []
    with one_line():
        if is_connect(spark):
            rows = _read(
                spark,
                lambda one: [(one[0], pickle.dumps(work(one[1])))],
                list(enumerate(items)),
                task_count,
                "number int, result binary",
            ).collect()
            results: list[Result] = [pickle.loads(row[1]) for row in sorted(rows, key=lambda row: int(row[0]))]
        else:
            results = spark.sparkContext.parallelize(items, task_count or len(items)).map(work).collect()
    assert len(results) == len(items), "each item has a result"
    return results


def reduce_tasks(
    spark: SparkSession,
    work: Callable[[Item], Result],
    items: Sequence[Item],
    add: Callable[[Result, Result], Result],
) -> Result:
    """Run ``work`` on every item and add up the results. ``items`` must not be empty.
    Raises RmqError: see `run_tasks`."""
    if is_connect(spark):
        return functools.reduce(add, run_tasks(spark, work, items))
    with one_line():
        return spark.sparkContext.parallelize(items, len(items)).map(work).treeReduce(add)


def regroup_tasks(
    spark: SparkSession,
    work: Callable[[Item], Iterable[tuple[Any, Any]]],
    items: Sequence[Item],
    fold: Callable[[Any, Iterable[Any]], Iterable[Result]],
) -> list[Result]:
    """Run ``work`` on every item. ``work`` yields keys with values. Then run ``fold`` on every key with all values of
    the key, in any order. Return the results that ``fold`` yields. Keys are tuples of numbers and texts, or None.
    Raises RmqError: see `run_tasks`."""
    if not items:
        return []
    with one_line():
        if not is_connect(spark):
            context = spark.sparkContext
            groups = context.parallelize(items, len(items)).flatMap(work).groupByKey(context.defaultParallelism)
            results: list[Result] = groups.flatMap(lambda row: fold(*row)).collect()
            return results

        def pickled(item: Item) -> Iterator[tuple[bytes, bytes]]:
            for key, value in work(item):
                # Use the text of a key, not its pickle: equal keys can have different pickles.
                yield repr(key).encode(), pickle.dumps((key, value))

        def folded(table: pa.Table) -> pa.Table:
            pairs = [pickle.loads(one) for one in table["pair"].to_pylist()]
            results = [pickle.dumps(one) for one in fold(pairs[0][0], [value for _, value in pairs])]
            return pa.table({"result": pa.array(results, pa.binary())})

        frame = _read(spark, pickled, items, None, "key binary, pair binary")
        rows = frame.groupBy("key").applyInArrow(folded, "result binary").collect()
        return [pickle.loads(row[0]) for row in rows]


def rows_of_tasks(
    spark: SparkSession,
    work: Callable[[Item], Iterable[tuple[Any, ...]]],
    items: Sequence[Item],
    task_count: int,
    schema: str,
) -> DataFrame:
    """Run ``work`` on every item. Return a data frame with the rows that ``work`` yields.

    Transferring rows to the JVM costs more than decoding them, so a job reduces its rows in the Python workers first.
    (``mapInArrow`` would work, too, but pyspark requires pandas for it.)

    ``work`` is a function of an importable module, or a closure over picklable values. ``schema`` is Spark DDL."""
    if is_connect(spark):
        return _read(spark, work, items, task_count, schema)
    todo = spark.sparkContext.parallelize(items, task_count)
    return spark.createDataFrame(todo.flatMap(work), schema)


def _read(
    spark: SparkSession,
    work: Callable[[Any], Iterable[tuple[Any, ...]]],
    items: Sequence[Any],
    task_count: int | None,
    schema: str,
) -> DataFrame:
    """Return the rows that ``work`` yields for items, as a read by `TaskSource`. Each task gets consecutive items."""
    count = min(task_count or len(items), len(items))
    groups = [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]
    return spark.read.format(FORMAT).schema(schema).options(**task_options(work, groups)).load()
