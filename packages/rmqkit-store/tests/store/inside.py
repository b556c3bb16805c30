"""Access of tests to private names of a store. No other test file uses these names."""

from __future__ import annotations

from typing import Any


def appender_of(store: Any) -> Any:
    """Return the part of a store that appends to its log."""
    return store._appender


def next_file_of(log: Any) -> Any:
    """Return the log file that is created before it is needed."""
    return log._next
