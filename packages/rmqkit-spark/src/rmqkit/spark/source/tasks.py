"""`TaskSource` runs functions in tasks of a session without RDDs, for `rmqkit.spark.jobs.tasks`.

Spark Connect sends data frames to its server, but no functions over lists. Therefore a list of items is passed in the
options of a source, whose partitions are the tasks: each task gets only its own items. `TaskSource` is an internal
format.
"""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

FORMAT = "rmqkit-tasks"
# Spark hides values of options with "secret" in their names: items may contain addresses with credentials.
_WORK = "secretwork"
_GROUPS = "secretgroups"


def task_options(work: Callable[[Any], Iterable[tuple[Any, ...]]], groups: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Return the options to read the rows that ``work`` yields for items; each task gets one group of items."""
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    # Pickle each group separately: the planner handles only bytes, and a task unpickles only its own group.
    pickled = [dumps(list(group)) for group in groups]
    return {_WORK: b64encode(dumps(work)).decode(), _GROUPS: b64encode(pickle.dumps(pickled)).decode()}


class TaskSource(DataSource):
    """Rows that a function makes from items. The caller passes the schema."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader that runs the function."""
        return TaskReader(b64decode(self.options[_WORK]), b64decode(self.options[_GROUPS]))


class TaskReader(DataSourceReader):
    """Reader that processes one group of items in each task."""

    def __init__(self, work: bytes, groups: bytes) -> None:
        self._work, self._groups = work, groups

    def partitions(self) -> Sequence[InputPartition]:
        """Return a partition for each group of items. Then forget the groups, so that tasks get a reader without the
        groups."""
        assert self._groups, "Spark plans a read once"
        groups, self._groups = pickle.loads(self._groups), b""
        return [InputPartition(group) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield the results of the function for the items of a task."""
        work = pickle.loads(self._work)
        for item in pickle.loads(partition.value):
            yield from work(item)
