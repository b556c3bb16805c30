"""The few parts of Spark that jobs over splits use, in this process: tests of jobs need no JVM."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from pyspark import cloudpickle
from pyspark.sql import SparkSession

__all__ = ["in_process"]


def in_process(conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session for a job. Functions, items and results are pickled, as for a worker."""
    return cast("SparkSession", _Session(conf or {}))


class _Session:
    defaultParallelism = 2  # noqa: N815 - Spark's name

    def __init__(self, conf: Mapping[str, str]) -> None:
        self.conf = self
        self.getAll = conf

    @property
    def sparkContext(self) -> _Session:  # noqa: N802 - Spark's name
        return self

    def parallelize(self, items: Iterable[Any], partitions: int) -> _Items:
        assert partitions > 0
        return _Items(_sent(list(items)))


class _Items:
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def map(self, work: Callable[[Any], Any]) -> _Items:
        work = _sent(work)
        return _Items([_sent(work(item)) for item in self._items])

    def mapPartitions(self, work: Callable[[Iterator[Any]], Iterable[Any]]) -> _Items:  # noqa: N802 - Spark's name
        return _Items(_sent(list(_sent(work)(iter(self._items)))))

    def treeReduce(self, add: Callable[[Any, Any], Any]) -> Any:  # noqa: N802 - Spark's name
        return functools.reduce(_sent(add), self._items)

    def collect(self) -> list[Any]:
        return self._items


def _sent(value: Any) -> Any:
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return pickle.loads(dumps(value))
