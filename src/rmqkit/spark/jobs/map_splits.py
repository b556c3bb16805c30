"""Work done beside the files: a function per split, in the Python workers, and only its results go to Spark.

Shipping rows into the JVM costs more than decoding them, so a job that reduces does it here, before Spark sees
anything. (``mapInArrow`` would do as well, but pyspark refuses it without pandas, which nothing here needs.)
Source: spark.md §0, §5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmqkit.spark.source.splits import Split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["map_splits"]


def map_splits(
    spark: SparkSession, splits: Sequence[Split], work: Callable[[Split], Iterator[tuple[Any, ...]]], schema: str
) -> DataFrame:
    """The rows that ``work`` yields for every split, few rows a split, one task per split.
    ``work`` is a function of an importable module, or a closure over what can be pickled; ``schema`` is Spark DDL."""
    todo = spark.sparkContext.parallelize(splits, max(1, len(splits)))
    return spark.createDataFrame(todo.flatMap(work), schema)
