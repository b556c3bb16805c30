"""`rmq standalone` with a gRPC endpoint, as a process that can be killed, restarted on its port, and asked for the
sizes of its tables.

On SIGUSR1 the process writes `sizes` of its endpoint to a file, as one line of JSON. With ``--quick`` the endpoint's
times are short: a receive may hide messages for a second, where the usual minimum is a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rmqkit.admin import Admin
from rmqkit.proxy.service import endpoint, receipt_handles, receiving
from rmqkit.proxy.service.endpoint import Endpoint
from tests.faults.grpc_tables import sizes
from tests.interop.server_process import ServerProcess, wait_until
from tests.ports import free_port

READY_SECONDS = STOP_SECONDS = 150
READY = r"^ready namesrv=(?P<names>\S+) broker=(?P<broker>\S+) grpc=(?P<grpc>\S+) store="
QUICK = "--quick"
ROOT = Path(__file__).parents[2]


class GrpcBroker:
    """The process, over a store that remains; killed at the end.

    Attributes:
        address: of its endpoint, the same after every start.
        starts: number of starts.
    """

    def __init__(self, folder: Path, conf: Mapping[str, object], *, is_quick: bool = False) -> None:
        self._folder = folder
        self._conf = dict(conf)
        self._options = [QUICK] * is_quick
        self._sizes = folder / "sizes.json"
        self._process: ServerProcess | None = None
        self._port = free_port()
        self.address = self.name_server = self.broker = ""
        self.starts = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is started"
        return self._process.pid

    def start(self) -> None:
        """Start the process. Return when it reports that it is ready."""
        conf = self._folder / "broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in self._conf.items()))
        where = ["--host", "127.0.0.1", "--namesrv-port", "0", "--port", "0", "--store", str(self._folder / "store")]
        settings = ["-c", str(conf), "--set", f"grpcServerPort={self._port}"]
        program = [sys.executable, "-m", "tests.faults.grpc_broker", str(self._sizes), *self._options]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.starts += 1
        log = self._folder / f"broker-{self.starts}.log"
        self._process = ServerProcess([*program, "standalone", *where, *settings], log, env)
        ready = self._process.wait_ready(READY, READY_SECONDS)
        self.address, self.name_server, self.broker = ready["grpc"], ready["names"], ready["broker"]

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Send SIGTERM and check that the process stops."""
        assert self._process is not None, "the broker is started"
        code = self._process.stop(signal.SIGTERM, STOP_SECONDS)
        assert code == 0, f"ended with {code}; {self._process.log_tail()}"

    def sizes(self) -> dict[str, int]:
        """Return the present sizes of its tables."""
        self._sizes.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        wait_until(self._sizes.exists, READY_SECONDS, "table sizes")
        found: dict[str, int] = json.loads(self._sizes.read_text())
        return found

    async def make(self, topics: Mapping[str, str], groups: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Create topics with their message types, and groups with their settings."""
        async with Admin(self.name_server) as admin:
            for topic, kind in topics.items():
                await admin.topics.create(topic, broker=self.broker, attributes=f"+message.type={kind}")
            for group, settings in (groups or {}).items():
                await admin.groups.update(group, dict(settings), self.broker)

    def log(self) -> str:
        """Return the end of the running process's log."""
        return "" if self._process is None else self._process.log_tail()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()


def main() -> None:
    """Run as the process: the arguments are the file for the sizes, perhaps ``--quick``, then the words for `rmq`."""
    path = Path(sys.argv.pop(1))
    if sys.argv[1] == QUICK:
        del sys.argv[1]
        receiving._INVISIBLE_MS_MIN = 500
        receiving._RENEWED_MS = 3000
        receipt_handles._AHEAD_MS = 2500
        receipt_handles._EXTENSIONS_MS = (3000,)
        endpoint.ROUND_SECONDS = 0.1
    started: list[Endpoint] = []
    start = Endpoint.start

    def noted(endpoint: Endpoint) -> None:
        started.append(endpoint)
        start(endpoint)

    def write(*_: object) -> None:
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(sizes(started[-1])))
        unfinished.rename(path)

    Endpoint.start = noted  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, write)
    from rmqkit.__main__ import main as rmq

    rmq()


if __name__ == "__main__":
    main()
