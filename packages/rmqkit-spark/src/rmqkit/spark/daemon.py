"""The daemon of Python workers (``spark.python.daemon.module``): PySpark's own, with less output.

``show()`` and ``limit()`` end tasks that have sent enough rows: Spark closes the connection while the worker still
writes. This is not an error, but PySpark's daemon prints a traceback for each closed connection. This daemon omits
these tracebacks and prints all other output.

At the end of a session Spark also closes the connections of idle workers, and each of these workers reports a harmless
EOFError.

This daemon starts only workers of tasks. PySpark's own daemon starts the workers that plan a read, and no setting
changes that. In these workers `keep_quiet` is called when they import a source, or `rmqkit.spark.lookup`.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from types import ModuleType
from typing import Any

from pyspark import daemon

__all__ = ["format_exc", "keep_quiet", "print", "print_exc"]

_CLOSED = (BrokenPipeError, ConnectionResetError)
format_exc = traceback.format_exc


def print(*values: object, **where: Any) -> None:  # noqa: A001 - the name that the daemon calls
    """Print, unless a connection was closed while a worker wrote to it."""
    if not isinstance(sys.exception(), _CLOSED):
        builtins.print(*values, **where)


def print_exc() -> None:
    """Print a traceback, unless a connection was closed while a worker wrote to it."""
    if not isinstance(sys.exception(), _CLOSED):
        traceback.print_exc()


def keep_quiet() -> None:
    """Replace the output functions of PySpark's daemon, if it forked this process."""
    main = sys.modules["__main__"]
    # A worker is forked by `python -m pyspark.daemon`: it calls the names in its __main__, not in the module `daemon`
    # that was imported above, which is a second copy.
    if getattr(main.__spec__, "name", "") == "pyspark.daemon":
        _replace_in(main)


def _replace_in(module: ModuleType) -> None:
    # The daemon uses the function `print` and the module `traceback`: replace both with this module's versions.
    vars(module).update(print=print, traceback=sys.modules[__name__])


if __name__ == "__main__":
    _replace_in(daemon)
    daemon.manager()
