"""`TaskSource` runs functions in Spark's tasks where the session has no RDDs, for `rmqkit.spark.jobs.tasks`.

Spark Connect sends data frames to its server, and no functions over lists. So a list of items travels as the options
of a source, whose partitions are the tasks: each gets its own items and no others. It is no format for programs.
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
# With "secret" in their names Spark shows the values in no plan: items may have addresses with credentials.
_WORK = "secretwork"
_GROUPS = "secretgroups"


def task_options(work: Callable[[Any], Iterable[tuple[Any, ...]]], groups: Sequence[Sequence[Any]]) -> dict[str, str]:
    """The options of a read whose rows are what ``work`` yields of every item; each group is the items of a task."""
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    # Each group by itself: the planner handles bytes only, and the one task that gets a group unpickles it.
    pickled = [dumps(list(group)) for group in groups]
    return {_WORK: b64encode(dumps(work)).decode(), _GROUPS: b64encode(pickle.dumps(pickled)).decode()}


class TaskSource(DataSource):
    """Rows that a function makes of items. The caller gives the schema."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader that runs the function."""
        return TaskReader(b64decode(self.options[_WORK]), b64decode(self.options[_GROUPS]))


class TaskReader(DataSourceReader):
    """Runs one group of items in each task."""

    def __init__(self, work: bytes, groups: bytes) -> None:
        self._work, self._groups = work, groups

    def partitions(self) -> Sequence[InputPartition]:
        """One for each group. The groups stay behind: what reads a partition has a copy of this reader."""
        assert self._groups, "Spark plans a read once"
        groups, self._groups = pickle.loads(self._groups), b""
        return [InputPartition(group) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield what the function makes of a task's items."""
        work = pickle.loads(self._work)
        for item in pickle.loads(partition.value):
            yield from work(item)
