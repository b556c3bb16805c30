"""Access of tests to private names of the console. No other test file uses these names."""

from __future__ import annotations

import asyncio
from typing import Any

from rmqkit.console.jobs import Jobs
from rmqkit.console.watch.history import History


async def oldest_of(history: History) -> Any:
    """The time and the step of the oldest block of each level in the file."""
    return await history._in_thread(history._oldest)


async def rows_of(history: History, query: str, *values: int) -> list[Any]:
    """The rows of a query to the file, which no other connection can open."""
    return await history._in_thread(lambda: history._file.execute(query, values).fetchall())


def task_of(jobs: Jobs, name: str) -> asyncio.Task[None]:
    """The task of a job, which a test cancels as a kill does."""
    return jobs._runs[name].task
