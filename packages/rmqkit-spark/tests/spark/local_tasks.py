"""A stand-in for the part of a Spark context that jobs use. It runs every task in this process and pickles the
input and the result, as Spark does. Tests of tasks take milliseconds with it instead of seconds."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark import cloudpickle

__all__ = ["LOCAL"]


def sent(value: Any) -> Any:
    """Return the value as it arrives after pickling."""
    return pickle.loads(pickle.dumps(value))


class Tasks:
    """Elements and what is to be done with each of them."""

    def __init__(self, items: Sequence[Any], work: Callable[[Any], Iterable[Any]] = lambda item: [item]) -> None:
        self._items, self._work = items, work

    def flatMap(self, work: Callable[[Any], Iterable[Any]]) -> Tasks:  # noqa: N802 - Spark's name
        return Tasks(self.collect(), pickle.loads(cloudpickle.dumps(work)))

    def map(self, work: Callable[[Any], Any]) -> Tasks:
        sent_work = pickle.loads(cloudpickle.dumps(work))
        return Tasks(self.collect(), lambda item: [sent_work(item)])

    def collect(self) -> list[Any]:
        return [sent(one) for item in self._items for one in self._work(sent(item))]


class _Context:
    defaultParallelism = 2  # noqa: N815 - Spark's name

    def parallelize(self, items: Iterable[Any], slices: int) -> Tasks:
        assert slices > 0
        return Tasks(list(items))


class _Session:
    sparkContext = _Context()  # noqa: N815 - Spark's name


LOCAL: Any = _Session()
"""To be given to a job in place of a session."""
