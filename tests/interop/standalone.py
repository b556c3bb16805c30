"""Our own name server and broker as the process a user would start: `rmq standalone`."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.interop.server_process import ServerProcess

READY_SECONDS = 20
STOP_SECONDS = 20
READY_LINE = r"^ready namesrv=(?P<namesrv>\S+) broker=(?P<broker>\S+) store=(?P<store>.+)$"


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running `rmq standalone`."""

    process: ServerProcess
    namesrv_addr: str
    broker_addr: str
    store_dir: Path

    def stop(self) -> None:
        """SIGTERM has to end it with code 0 and a clean store: `abort` is what an unclean stop leaves."""
        exit_code = self.process.stop(signal.SIGTERM, STOP_SECONDS)
        assert exit_code == 0, f"ended with {exit_code}; {self.process.log_tail()}"
        assert not (self.store_dir / "abort").exists(), f"abort left in {self.store_dir}; {self.process.log_tail()}"


@contextmanager
def run_standalone(store_dir: Path, work_dir: Path, *options: str) -> Iterator[Standalone]:
    """Start it on free loopback ports; `options` are added to the command line. Killed at the end if it still runs."""
    command: Sequence[str | Path] = [
        Path(sys.executable).with_name("rmq"),
        "standalone",
        *("--host", "127.0.0.1"),
        *("--namesrv-port", "0"),
        *("--port", "0"),
        *("--store", store_dir),
        *options,
    ]
    with ServerProcess(command, work_dir / "standalone.log") as process:
        ready = process.wait_ready(READY_LINE, READY_SECONDS)
        assert Path(ready["store"]) == store_dir
        yield Standalone(process, ready["namesrv"], ready["broker"], store_dir)
