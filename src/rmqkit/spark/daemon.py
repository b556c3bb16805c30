"""The daemon of Python workers (``spark.python.daemon.module``): PySpark's own, which says less.

``show()`` and ``limit()`` end tasks that have sent enough rows: Spark closes the connection of a worker that still
writes. That is no fault, yet PySpark's daemon prints a traceback for each. Here that is left out. Whatever else the
daemon has to say is printed.
"""

from __future__ import annotations

import builtins
from typing import Any

from pyspark import daemon

_CLOSED = ("BrokenPipeError", "ConnectionResetError")


def say(*values: object, **where: Any) -> None:
    """Print, unless it is that a connection was closed while a worker wrote to it."""
    text = " ".join(map(str, values))
    if not ("failed to flush" in text and text.rstrip().rpartition("\n")[2].startswith(_CLOSED)):
        builtins.print(*values, **where)


if __name__ == "__main__":
    vars(daemon)["print"] = say
    daemon.manager()
