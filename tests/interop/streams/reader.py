"""A streaming query as a separate program, whose driver and executors can be killed between plan and read of a batch.

``python -m tests.interop.streams.reader`` takes a `Plan` as JSON. Before it reads a batch it prints ``batch N``, and
waits for a line of input. `Reader` is the other side.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from tests.faults.spark.query import PYTHON_PATH
from tests.interop.server_process import wait_until
from tests.spark.session import SMALL, short_lived, spark_home
from tests.spark.standalone_cluster import kill, processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

__all__ = ["Plan", "Reader", "store_batch", "stored"]

SECONDS = 150
_EXECUTOR = "CoarseGrainedExecutorBackend"


class Plan(msgspec.Struct):
    """The query of a program, and the folders of its result and its checkpoint."""

    format: str
    body: str
    options: dict[str, str]
    master: str
    session: dict[str, str]
    out: str
    checkpoint: str


class Source(Protocol):
    """The parts of a side that a program needs."""

    format: str
    body: str
    session: Mapping[str, str]


class Reader:
    """A running program. Leaving the ``with`` block kills all its processes."""

    def __init__(
        self, side: Source, master: str, options: dict[str, str], out: Path, checkpoint: Path, folder: Path
    ) -> None:
        plan = Plan(side.format, side.body, options, master, dict(side.session), str(out), str(checkpoint))
        self._log = folder / "reader.log"
        own = {"PYTHONPATH": PYTHON_PATH, "SPARK_HOME": str(spark_home(folder)), "JAVA_TOOL_OPTIONS": short_lived()}
        with self._log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.interop.streams.reader", msgspec.json.encode(plan).decode()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **own},
                start_new_session=True,
            )

    def until_planned(self, batch_id: int) -> None:
        """Wait until a batch is planned."""
        self._until(f"batch {batch_id}")

    def read(self, batch_id: int) -> None:
        """Let the program read a planned batch, and wait until the batch is stored."""
        assert self._popen.stdin is not None, "stdin is a pipe"
        self._popen.stdin.write(b"read\n")
        self._popen.stdin.flush()
        self._until(f"stored {batch_id}")

    def kill_executors(self) -> None:
        """Kill the executors; Spark starts others."""
        executors = {pid for pid, command in processes(self._popen.pid) if _EXECUTOR in command}
        assert executors, f"the program has executors; {self._tail()}"
        for pid in executors:
            kill(pid)

    def kill(self) -> None:
        """Kill the driver and all other processes of the program."""

        def is_empty() -> bool:
            left = dict(processes(self._popen.pid))
            for pid in left:
                kill(pid)
            self._popen.poll()
            return not left

        wait_until(is_empty, SECONDS, "end of the processes of the program")
        self._popen.wait()

    def _until(self, line: str) -> None:
        def is_said() -> bool:
            assert self._popen.poll() is None, f"the program ended; {self._tail()}"
            return re.search(rf"^{line}$", self._log.read_text(errors="replace"), re.MULTILINE) is not None

        wait_until(is_said, SECONDS, f"{line!r}; {self._tail()}")

    def _tail(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if "\tat " not in line]
        return "\n".join(lines[-20:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


def stored(out: Path) -> dict[int, list[str]]:
    """Return the rows of each stored batch."""
    return {int(file.name): json.loads(file.read_text()) for file in out.iterdir() if file.name.isdigit()}


def store_batch(out: Path, batch_id: int, rows: DataFrame) -> None:
    """Store the rows of a batch. They replace the rows of an earlier attempt."""
    bodies = [row.body for row in rows.collect()]
    file = out / f".{batch_id}"
    file.write_text(json.dumps(bodies))
    file.rename(out / str(batch_id))


# ---------------------------------------------------------------- inside the program


def run(plan: Plan) -> None:
    """Run the query until the process is killed, or the input ends."""
    from rmqkit.spark import spark_session, start_stream

    spark = spark_session("reader", plan.master, {**SMALL, "spark.executor.memory": "512m", **plan.session})

    def store(rows: DataFrame, batch_id: int) -> None:
        print(f"batch {batch_id}", flush=True)
        if not sys.stdin.readline():
            os._exit(1)  # the parent process is gone
        store_batch(Path(plan.out), batch_id, rows)
        print(f"stored {batch_id}", flush=True)

    source = spark.readStream.format(plan.format).options(**plan.options).load()
    rows = source.selectExpr(f"cast({plan.body} as string) as body")
    start_stream(rows.writeStream.foreachBatch(store).option("checkpointLocation", plan.checkpoint)).awaitTermination()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Plan))
