"""A standalone cluster of Spark on loopback: a master and workers in processes of their own.

Unlike ``local-cluster``, the master and the workers outlive a driver, so a killed driver leaves them to remove its
executors. Every worker has one core, and starts one executor for an application.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rmqkit.spark.session import find_java_home
from tests.interop.server_process import ServerProcess, wait_until
from tests.ports import HOST
from tests.spark.session import short_lived, spark_home

__all__ = ["CLUSTER_CONF", "WORKERS", "SparkCluster", "kill", "processes"]

WORKERS = 2
READY_SECONDS = 150
END_SECONDS = 60
CLUSTER_CONF: Mapping[str, str] = {
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    # The first task waits until every worker has an executor: the worker may still end that of a former driver.
    "spark.cores.max": str(WORKERS),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
}
"""Settings of a driver that uses the cluster."""


class SparkCluster:
    """A running master with `WORKERS` workers. Leaving the ``with`` block kills their processes and the executors.

    Args:
        folder: for logs and the files of executors.
        environ: the environment of all processes, for example without Java on its path.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = folder
        self._environ = {
            **environ,
            "SPARK_HOME": str(spark_home()),
            "JAVA_HOME": str(find_java_home(environ)),
            "JAVA_TOOL_OPTIONS": short_lived(),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            # The master otherwise ends an application whose executors were killed ten times in a row.
            "SPARK_DAEMON_JAVA_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        self._servers: list[ServerProcess] = []
        self.master = ""

    def members(self) -> dict[int, str]:
        """Return the processes of the master, the workers, and the executors: id and command line."""
        return {pid: line for server in self._servers for pid, line in processes(server.pid)}

    def _start(self, room: str, log: str, *options: str) -> ServerProcess:
        command = [Path(self._environ["SPARK_HOME"], "bin", "spark-class"), f"org.apache.spark.deploy.{room}", *options]
        server = ServerProcess(command, self._folder / f"{log}.log", self._environ)
        self._servers.append(server)
        return server

    def __enter__(self) -> Self:
        own = ("--host", HOST, "--port", "0", "--webui-port", "0")
        try:
            master = self._start("master.Master", "master", *own)
            self.master = master.wait_ready(r"Starting Spark master at (spark://\S+)", READY_SECONDS)[1]
            room = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / "work"))
            workers = [self._start("worker.Worker", f"worker{i}", *own, *room, self.master) for i in range(WORKERS)]
            for worker in workers:
                worker.wait_ready("Successfully registered with master", READY_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        def is_empty() -> bool:
            for pid in self.members():
                kill(pid)
            return not self.members()

        wait_until(is_empty, END_SECONDS, "end of the processes of the cluster")
        for server in self._servers:
            server.kill()


def processes(session: int) -> Iterator[tuple[int, str]]:
    """Yield the id and command line of each process of a session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    yield int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue


def kill(pid: int) -> None:
    """Send SIGKILL to a process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
