"""A Structured Streaming query as a separate program, so that it can be killed.

``python -m tests.faults.spark.query`` takes a `Plan` as JSON. The query runs until the input is ``finish``. Then it
runs again to the end of the available data, and the program prints ``ended``.

`Query` and `Program` are the other side. They start the program in a new session, so that all its processes (Spark's
Java machines, Python workers) can be found and killed by their ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.interop.server_process import wait_until
from tests.spark.session import short_lived, spark_home
from tests.spark.standalone_cluster import kill, processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["PYTHON_PATH", "Plan", "Query"]

ROOT = Path(__file__).parents[3]
PYTHON_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
RUNNING, FINISH, ENDED = "running", "finish", "ended"
KILL_SECONDS = 150
WAIT_SECONDS = 900.0
RESTARTS_MAX = 5


class Plan(msgspec.Struct):
    """The plan of a query: a source, some expressions and a sink."""

    source: str
    source_options: dict[str, str]
    select: list[str]
    sink: str
    sink_options: dict[str, str]
    checkpoint: str
    master: str = "local[2]"
    conf: dict[str, str] = {}


class Program:
    """A running query. ``log`` has its output."""

    def __init__(self, plan: Plan, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._begun = output.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.spark.query", msgspec.json.encode(plan).decode()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHON_PATH,
                    "SPARK_HOME": str(spark_home()),
                    "JAVA_TOOL_OPTIONS": short_lived(),
                },
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """Return the output so far."""
        with self.log.open("rb") as file:
            file.seek(self._begun)
            return file.read().decode(errors="replace")

    @property
    def is_running(self) -> bool:
        """Return True until the process has exited."""
        return self._popen.poll() is None

    @property
    def has_ended_well(self) -> bool:
        """Return True if the query reached the end of the available data."""
        return f"\n{ENDED}\n" in f"\n{self.said}"

    def finish(self) -> None:
        """Ask the query to finish."""
        assert self._popen.stdin is not None, "stdin is a pipe"
        self._popen.stdin.write(f"{FINISH}\n".encode())
        self._popen.stdin.flush()

    def members(self) -> dict[int, str]:
        """Return all processes of its session: id and command line."""
        return dict(processes(self._popen.pid))

    def kill(self) -> None:
        """Send SIGKILL to all its processes until none is left."""

        def is_empty() -> bool:
            for pid in self.members():
                kill(pid)
            self._popen.poll()
            return not self.members()

        wait_until(is_empty, KILL_SECONDS, f"end of the processes of session {self._popen.pid}")
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


class Query:
    """A query that continues from its checkpoint in one program after the other.

    Args:
        say: called with the reason when a program exits by itself.

    Attributes:
        restarts: number of programs that exited by themselves. A driver exits if its Python process is killed, or is
            not ready within Spark's limit of ten seconds.
    """

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self.checkpoint = Path(plan.checkpoint)
        self.restarts = 0
        self._plan = plan
        self._log = folder / "query.log"
        self._say = say
        self._programs: list[Program] = []

    @property
    def program(self) -> Program:
        """Return the running program."""
        return self._programs[-1]

    @property
    def planned(self) -> int:
        """Return the number of planned batches."""
        return _count(self.checkpoint / "offsets")

    @property
    def committed(self) -> int:
        """Return the number of committed batches."""
        return _count(self.checkpoint / "commits")

    def start(self) -> None:
        """Start a program. A previous program that was not killed may still be exiting."""
        self._programs.append(Program(self._plan, self._log))

    async def kill(self) -> None:
        """Kill all processes of all programs."""
        for program in self._programs:
            await asyncio.to_thread(program.kill)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds. Restart the program if it exits meanwhile.
        Raises AssertionError: it takes too long, or programs exit again and again."""
        deadline = time.monotonic() + WAIT_SECONDS
        restarts_max = self.restarts + RESTARTS_MAX
        while not condition():
            program = self.program
            if not program.is_running and not program.has_ended_well:
                self._say(f"the query ended: {_reason(program)}")
                self.restarts += 1
                assert self.restarts <= restarts_max, program.said[-3000:]
                await asyncio.to_thread(program.kill)
                self.start()
            assert time.monotonic() < deadline, f"no {what} within {WAIT_SECONDS:g} s:\n{program.said[-3000:]}"
            await asyncio.sleep(0.02)

    async def finish(self) -> None:
        """Run the query to the end of the available data."""
        asked: Program | None = None

        def is_over() -> bool:
            nonlocal asked
            if asked is not self.program and RUNNING in self.program.said:  # a new program must be asked again
                asked = self.program
                asked.finish()
            return self.program.has_ended_well

        await self.until(is_over, "the end of the query")


def _reason(program: Program) -> str:
    lines = [line for line in program.said.splitlines() if "rror" in line or "ended" in line]
    return lines[-1][:300] if lines else "it said nothing"


def _count(folder: Path) -> int:
    return 1 + max((int(file.name) for file in folder.glob("*") if file.name.isdigit()), default=-1)


# ---------------------------------------------------------------- inside the program


def run(plan: Plan) -> None:
    """Run the query until it must finish, then read all available data."""
    from rmqkit.spark import spark_session

    is_to_finish = threading.Event()
    threading.Thread(target=_listen, args=[is_to_finish], daemon=True).start()
    spark = spark_session("faults", plan.master, {"spark.sql.session.timeZone": "UTC", **plan.conf})
    query = _start(spark, plan, available_now=False)
    print(RUNNING, flush=True)
    while not is_to_finish.wait(0.1):
        if not query.isActive:
            raise SystemExit(f"the query ended: {query.exception()}")
    query.stop()
    query = _start(spark, plan, available_now=True)
    query.awaitTermination()
    told = query.lastProgress
    print(json.dumps({"batch": told.batchId if told else None}), flush=True)
    print(ENDED, flush=True)
    spark.stop()


def _start(spark: SparkSession, plan: Plan, *, available_now: bool) -> StreamingQuery:
    source = spark.readStream.format(plan.source).options(**plan.source_options).load()
    sink = source.selectExpr(*plan.select).writeStream.format(plan.sink).options(**plan.sink_options)
    sink = sink.option("checkpointLocation", plan.checkpoint)
    return (sink.trigger(availableNow=True) if available_now else sink).start()


def _listen(is_to_finish: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == FINISH:
            is_to_finish.set()
    os._exit(1)  # the parent process is gone


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Plan))
