"""The columns of tables that a query uses, and the conditions that its rows have to meet (`planned_reads`).

Spark does not pass columns and filters to a source that is written in Python, but it passes them to its own Parquet
reader. Therefore the query is planned over empty Parquet tables with the same columns, and the scans in this plan show
the columns and filters.

===============  =====================================================================================================
session          source of the scans
===============  =====================================================================================================
classic          the nodes of the physical plan, as objects of the JVM
Spark Connect    the text of the physical plan, from the server's answer to AnalyzePlan
===============  =====================================================================================================

The result always includes everything that the query uses: if a leaf of the plan is unknown, if a scan has unexpected
columns, or if a text is redacted, the result is "every column, no condition". Evaluating a column that is left out
raises an error (`unread`), so a mistake in this module never leads to wrong query results. Such a column is not a plain
attribute, and Spark simplifies the plan less. Therefore the query is planned a second time with `unread` in place of
these columns, and a column that the second plan evaluates is read, too.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rmqkit.arrow.reader import Condition
from rmqkit.arrow.schema import Column
from rmqkit.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EMPTY = "file:/dev/null"
"""An empty file that every machine has; its tables are planned, but never read."""

_COMPARISONS = {
    "EqualTo",
    "EqualNullSafe",
    "LessThan",
    "LessThanOrEqual",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
}

_HIDES: Mapping[str, Callable[[Any], Any]] = {
    "AdaptiveSparkPlanExec": lambda leaf: leaf.inputPlan(),
    "InMemoryTableScanExec": lambda leaf: leaf.relation().cachedPlan(),
    "ReusedExchangeExec": lambda leaf: leaf.child(),
    "ReusedSubqueryExec": lambda leaf: leaf.child(),
}
"""Leaves that contain another plan, and functions that return this plan."""

_READS_NO_FILE = {"OneRowRelationExec", "RangeExec", "LocalTableScanExec", "RowDataSourceScanExec"}
"""Leaves that cannot read the tables. Others may: `UnionLoopExec` has logical plans, `RDDScanExec` any lineage."""

_TEXT_OPERATOR = re.compile(r"^\(\d+\) (.+)$", re.MULTILINE)
_TEXT_SCAN = re.compile(r"^ReadSchema: (.*)$", re.MULTILINE)
_TEXT_UNKNOWN = ("UnionLoop", "Scan ExistingRDD")
_TEXT_CUT = ("(redacted)", "... ")
_TEXT_FILTER = (
    r"(?<=[\[ ])(EqualTo|EqualNullSafe|In)\(({mark}t\d+c\d+)(?:,([\w%|.:+-]+)|, \[([\w%|.:,+-]+)\])\)(?=, |\]\n)"
)
"""Filters in a text that are not part of an Or or a Not, and have simple values."""

_PLANS_MAX = 3

_log = logging.getLogger(__name__)


Marked = Mapping[str, tuple[str, Column]]
"""Table and column by their unique names in the plan."""


class Read(Struct, frozen=True):
    """The part of a table that a query needs: its columns, and the conditions that all of its rows meet."""

    columns: frozenset[str]
    conditions: tuple[Condition, ...] = ()


class _Scan(Struct, frozen=True):
    """One scan of a table in a plan."""

    table: str
    read: Read


class _NotUnderstood(Exception):
    """The plan may read a table in an unknown way."""


def planned_reads(
    spark: SparkSession,
    work: Callable[[], DataFrame],
    shapes: Mapping[str, Sequence[Column]],
    new_table: Callable[[str, DataFrame], None],
) -> dict[str, Read]:
    """Plan some work over empty tables, and return the part of each table that it needs.

    Args:
        work: function that makes the data frame from the tables that were passed to ``new_table``.
        shapes: the columns of each table, by the table's name.
        new_table: function that receives the name of a table and the empty table.

    Raises:
        AnalysisException: Spark cannot analyze the query of ``work``.
    """
    # Unique column names, which identify the tables in the plan.
    mark = f"c{uuid.uuid4().hex}"
    marked = {f"{mark}t{i}c{j}": (name, one) for i, name in enumerate(shapes) for j, one in enumerate(shapes[name])}
    every = {name: frozenset(column.name for column in columns) for name, columns in shapes.items()}

    def scans_with(plain: Mapping[str, frozenset[str]]) -> dict[str, list[Read]]:
        for name in shapes:
            new_table(name, _empty_table(spark, name, plain[name], marked))
        frame = work()
        scans = _scans_of_text(frame, mark, marked) if is_connect(spark) else _scans_of_plan(frame, marked)
        return {name: [scan.read for scan in scans if scan.table == name] for name in shapes}

    try:
        first = scans_with(every)
        # Spark cannot load a table without columns: if a query only counts rows, one column is read.
        columns = {name: _columns(first[name]) or frozenset({shapes[name][0].name}) for name in shapes}
        for _ in range(_PLANS_MAX):
            again = scans_with(columns)
            if all(_columns(again[name]) <= columns[name] for name in shapes):
                # The conditions of one scan must not exclude rows of another scan.
                tests = {name: reads[0].conditions if len(reads) == 1 else () for name, reads in first.items()}
                return {name: Read(columns[name], tests[name]) for name in shapes}
            columns = {name: columns[name] | _columns(again[name]) for name in shapes}
        unknown = "the columns of the plan depend on the columns that are read"
    except _NotUnderstood as error:
        unknown = str(error)
    _log.info("every column and message is read: %s", unknown)
    return {name: Read(columns) for name, columns in every.items()}


def unread(column: Column, witness: str = "") -> str:
    """Return a Spark expression for a column that is not read: it has the column's type, and raises an error. It also
    evaluates the column ``witness``, if given."""
    said = f"rmqkit: the column {column.name} was not read, because the plan of the query did not use it: set the"
    text = f"'{said} option columns of spark.read.format(\"rocketmq-store\")'"
    text = f"concat({text}, cast({witness} as string))" if witness else text
    return f"cast(raise_error({text}) as {column.spark})"


def _empty_table(spark: SparkSession, table: str, plain: Collection[str], marked: Marked) -> DataFrame:
    """Make an empty Parquet table in which evaluating a column that is not in ``plain`` raises an error."""
    own = {alias: column for alias, (name, column) in marked.items() if name == table}
    empty = spark.read.schema(", ".join(f"{alias} {column.spark}" for alias, column in own.items())).parquet(_EMPTY)
    shown = {alias: alias if column.name in plain else unread(column, alias) for alias, column in own.items()}
    return empty.selectExpr(*(f"{shown[alias]} as `{column.name}`" for alias, column in own.items()))


def _columns(reads: Sequence[Read]) -> frozenset[str]:
    """Return the columns of several scans."""
    return frozenset[str]().union(*(read.columns for read in reads))


# ---------------------------------------------------------------- plans as objects


def _scans_of_plan(frame: DataFrame, marked: Marked) -> list[_Scan]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return list(_scans_below(frame._jdf.queryExecution().executedPlan(), marked))
    except (Py4JError, PySparkException) as error:
        raise _NotUnderstood(str(error).splitlines()[0]) from None


def _scans_below(plan: Any, marked: Marked) -> Iterator[_Scan]:
    """Yield the scans of the tables in a physical plan, its subqueries and the plans that its leaves contain."""
    for leaf in _each(plan.collectLeaves()):
        kind = leaf.getClass().getSimpleName()
        if kind in _HIDES:
            yield from _scans_below(_HIDES[kind](leaf), marked)
        elif kind == "FileSourceScanExec":
            filters = list(_each(leaf.pushedDownFilters()))
            yield from _scan_of(leaf.relation().dataSchema(), leaf.requiredSchema(), filters, marked)
        elif kind == "BatchScanExec":
            # Parquet uses this scan only if spark.sql.sources.useV1SourceList is changed. Ignore other sources.
            scan = leaf.scan()
            if scan.getClass().getSimpleName() == "ParquetScan":
                yield from _scan_of(scan.dataSchema(), scan.readSchema(), [], marked)
        elif kind not in _READS_NO_FILE:
            raise _NotUnderstood(f"the plan has a {kind}")
    for subquery in _each(plan.subqueriesAll()):
        yield from _scans_below(subquery, marked)


def _scan_of(all_columns: Any, required: Any, filters: Sequence[Any], marked: Marked) -> Iterator[_Scan]:
    """Yield the scan if the column names of its file show that it is one of the tables."""
    tables = {marked[name][0] for name in all_columns.fieldNames() if name in marked}
    if not tables:
        return
    (table,) = tables
    names = list(required.fieldNames())
    if not all(name in marked for name in names):
        raise _NotUnderstood(f"a scan reads {', '.join(names)}")
    found = (_condition_of(one, marked) for one in filters)
    conditions = tuple(condition for condition in found if condition is not None)
    yield _Scan(table, Read(frozenset(marked[name][1].name for name in names), conditions))


def _condition_of(pushed: Any, marked: Marked) -> Condition | None:
    """Convert a filter (``org.apache.spark.sql.sources.Filter``) to a condition, or return None if the filter cannot
    limit the read of a store."""
    kind = pushed.getClass().getSimpleName()
    if kind not in _COMPARISONS or pushed.attribute() not in marked:
        return None
    column = marked[pushed.attribute()][1].name
    values = list(pushed.values()) if kind == "In" else [pushed.value()]
    match column:
        case "topic" if all(isinstance(value, str) for value in values):
            return Condition(column, kind, tuple(values))
        case "queueId" if all(isinstance(value, int) for value in values):
            return Condition(column, kind, tuple(values))
        case "storeTimestamp" if None not in values:
            return Condition(column, kind, tuple(map(_microseconds, values)))
    return None


def _microseconds(time: Any) -> int:
    """Convert a Timestamp or an Instant of Java to µs since the epoch."""
    instant = time.toInstant() if time.getClass().getSimpleName() == "Timestamp" else time
    return int(instant.getEpochSecond()) * 1_000_000 + int(instant.getNano()) // 1000


def _each(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a Scala Seq."""
    return (sequence.apply(i) for i in range(sequence.size()))


# ---------------------------------------------------------------- plans as texts


def _scans_of_text(frame: DataFrame, mark: str, marked: Marked) -> list[_Scan]:
    # `explain` would print to sys.stdout, which the whole process shares.
    text: str = frame._explain_string(mode="formatted")  # type: ignore[operator]
    operators = _TEXT_OPERATOR.findall(text)
    for unknown in (*_TEXT_CUT, *_TEXT_UNKNOWN):
        if unknown in text if unknown in _TEXT_CUT else any(one.startswith(unknown) for one in operators):
            raise _NotUnderstood(f"the text of the plan has {unknown!r}")
    scans: list[_Scan] = []
    schemas = _TEXT_SCAN.findall(text)
    if len(schemas) < sum("parquet" in one.lower() for one in operators if "Scan" in one):
        raise _NotUnderstood("the text of the plan has a scan without columns")
    for schema in schemas:
        names = re.findall(rf"{mark}t\d+c\d+(?=:)", schema)
        if schema != "struct<>" and not names:
            continue  # another file
        if schema != "struct<{}>".format(",".join(f"{name}:{marked[name][1].spark}" for name in names)):
            raise _NotUnderstood(f"a scan reads {schema}")
        read = Read(frozenset(marked[name][1].name for name in names))
        # A scan without columns may belong to any table.
        scans += [
            _Scan(table, read) for table in {marked[name][0] for name in names} or {name for name, _ in marked.values()}
        ]
    if {table for table, _ in marked.values()} - {scan.table for scan in scans}:
        raise _NotUnderstood("the text of the plan has no scan of a table")
    return [_with_conditions(scan, text, mark, marked) for scan in scans]


def _with_conditions(scan: _Scan, text: str, mark: str, marked: Marked) -> _Scan:
    """Add to a scan the conditions on topic and queue that are in a text. The caller uses them only if the table has no
    other scan."""
    conditions = []
    for kind, alias, value, values in re.findall(_TEXT_FILTER.format(mark=mark), text):
        table, column = marked[alias]
        texts = values.split(",") if values else [value]
        if table == scan.table and column.name == "topic":
            conditions.append(Condition(column.name, kind, tuple(texts)))
        elif table == scan.table and column.name == "queueId":
            conditions.append(Condition(column.name, kind, tuple(map(int, texts))))
    return _Scan(scan.table, Read(scan.read.columns, tuple(conditions)))
