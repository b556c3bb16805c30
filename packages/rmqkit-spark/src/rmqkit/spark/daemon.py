"""The daemon of Python workers (``spark.python.daemon.module``): PySpark's own, which says less.

``show()`` and ``limit()`` end tasks that have sent enough rows: Spark closes the connection of a worker that still
writes. That is no fault, yet PySpark's daemon prints a traceback for each. Here that is left out. Whatever else the
daemon has to say is printed.

At the end of a session Spark closes the connections of idle workers, too, and each writes its EOFError to nobody.

Only workers of tasks are started by this daemon. Those that plan a read are started by PySpark's own, whatever is set:
in them `keep_quiet` is called as soon as they import a source, or `rmqkit.spark.lookup`.
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


def print(*values: object, **where: Any) -> None:  # noqa: A001 - what the daemon calls
    """Print, unless a connection was closed while a worker wrote to it."""
    if not isinstance(sys.exception(), _CLOSED):
        builtins.print(*values, **where)


def print_exc() -> None:
    """Print a traceback, unless a connection was closed while a worker wrote to it."""
    if not isinstance(sys.exception(), _CLOSED):
        traceback.print_exc()


def keep_quiet() -> None:
    """Have PySpark's daemon say less, if this is a process of its making."""
    main = sys.modules["__main__"]
    # A worker is forked by `python -m pyspark.daemon`: the names that it calls are those of its __main__, not those of
    # the module `daemon` that was imported above, a second copy.
    if getattr(main.__spec__, "name", "") == "pyspark.daemon":
        _replace_in(main)


def _replace_in(module: ModuleType) -> None:
    # In the daemon's eyes this module is the function `print` and the module `traceback`.
    vars(module).update(print=print, traceback=sys.modules[__name__])


if __name__ == "__main__":
    _replace_in(daemon)
    daemon.manager()
