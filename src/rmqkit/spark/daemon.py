"""The daemon of Python workers (``spark.python.daemon.module``): PySpark's own, which says less.

``show()`` and ``limit()`` end tasks that have sent enough rows: Spark closes the connection of a worker that still
writes. That is no fault, yet PySpark's daemon prints a traceback for each. Here that is left out. Whatever else the
daemon has to say is printed.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from typing import Any

from pyspark import daemon

__all__ = ["format_exc", "print", "print_exc"]

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


if __name__ == "__main__":
    # In the daemon's eyes this module is the function `print` and the module `traceback`.
    vars(daemon).update(print=print, traceback=sys.modules["__main__"])
    daemon.manager()
