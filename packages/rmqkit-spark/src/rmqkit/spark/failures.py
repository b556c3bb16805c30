"""rmqkit's own error in place of Spark's long text about a failed task.

An error of a task or the planner reaches the driver as text: two long stack traces in an exception of PySpark.
`one_line` finds rmqkit's error in the text and raises it again, with the same class and the same line::

    with one_line():
        frame.collect()     # StoreError: /data/store/commitlog does not exist: give the store directory, ...

Other errors pass unchanged. Fields of the error (an address, a code) are lost, because Spark sends only the text.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rmqkit import extras
from rmqkit.errors import RmqError, SettingsError

CHECKPOINT_REMEDY = "restore a complete copy of it, or start with another checkpointLocation and startingOffsets"

# The last line of a traceback, unless an error that was raised while this one was handled follows. The readers in Java
# raise exceptions of the same names; Java writes them after "Caused by: ".
_RAISED = re.compile(
    r"(?:^|: )(rmqkit(?:\.\w+)+)\.(\w+): (.*)$(?!\n\n(?:During handling of|The above exception was))", re.MULTILINE
)
_PYTHON_SLOW = re.compile(r"[Pp]ython worker (?:failed to connect back|to connect back)")
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '(rmqkit|msgspec|numpy|pyarrow)\b", re.MULTILINE)
# A stream's process reads the offsets of a checkpoint before it calls our reader.
_NO_JSON = re.compile(
    r'python_streaming_source_runner\.py", line \d+, in \w+(?:\n {4}.*)*\n {2}File "[^"]*/json/__init__\.py"'
    r"(?s:.)*?^json\.decoder\.JSONDecodeError: (.*)$",
    re.MULTILINE,
)


class PythonSlow(RmqError):
    """Python was not ready in the time that Spark allows, because the machine is busy."""

    def __init__(self) -> None:
        super().__init__(
            "Python was not ready within the 10 s that Spark allows it, the machine is busy: start the query again, its"
            " checkpoint is unchanged, or start it with rmqkit.spark.start_stream, which tries again"
        )


@contextmanager
def one_line() -> Iterator[None]:
    """Raise rmqkit's own error in place of the PySpark error that contains it.
    Raises RmqError: the error, in its own class, that ended a worker, the planner or a stream.
    Raises SettingsError: the executors lack a package."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        ours = error_within(error)
        if ours is None:
            raise
        raise ours from None


def error_within(error: BaseException) -> RmqError | None:
    """Return rmqkit's error from the text of an exception of PySpark (such as ``query.exception()``), or None if the
    text has none."""
    message = str(error)
    if _PYTHON_SLOW.search(message):
        return PythonSlow()
    if missing := _MISSING.search(message):
        return SettingsError(
            f"Spark's executors have no Python package {missing[1]}: {extras.install('spark')} with the Python"
            " that they run (PYSPARK_PYTHON), or give them an environment that has it (spark.archives)"
        )
    if garbled := _NO_JSON.search(message):
        return SettingsError(
            f"rocketmq: the checkpoint has unusable offsets, no JSON: {garbled[1]}; {CHECKPOINT_REMEDY}"
        )
    raised = _RAISED.findall(message)
    if not raised:
        return None
    module, name, text = raised[-1]  # the last one: earlier ones are causes that it was raised from
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError:  # the executors have another version of the package
        return None
    if not (isinstance(kind, type) and issubclass(kind, RmqError)):
        return None
    # Not with the constructor: it needs fields that the text does not contain.
    ours = kind.__new__(kind)
    ours.args = (text,)
    return ours


def hide_closed_connections() -> None:
    """Omit the tracebacks of closed connections in a Python worker of Spark. ``show()`` and ``limit()`` close the
    connection of a worker that still writes. This is not an error, but PySpark's daemon prints it."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") != "pyspark.daemon":
        return
    printed = traceback.print_exc

    def print_exc(*values: Any, **where: Any) -> None:
        if not isinstance(sys.exception(), BrokenPipeError | ConnectionResetError):
            printed(*values, **where)

    traceback.print_exc = print_exc
