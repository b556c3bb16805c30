"""Our own name server and broker as the processes a user would start: `rmq standalone`, or one of each."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.interop.server_process import ServerProcess

RMQ = Path(sys.executable).with_name("rmq")
READY_SECONDS = 150
STOP_SECONDS = 150
READY_LINE = r"^ready namesrv=(?P<namesrv>\S+) broker=(?P<broker>\S+) store=(?P<store>.+)$"


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running `rmq standalone`."""

    process: ServerProcess
    namesrv_addr: str
    broker_addr: str
    store_dir: Path

    def stop(self) -> None:
        """Send SIGTERM, and check that the exit code is 0 and the store is clean: an unclean stop leaves `abort`."""
        exit_code = self.process.stop(signal.SIGTERM, STOP_SECONDS)
        assert exit_code == 0, f"ended with {exit_code}; {self.process.log_tail()}"
        assert not (self.store_dir / "abort").exists(), f"abort left in {self.store_dir}; {self.process.log_tail()}"


@contextmanager
def run_standalone(store_dir: Path, work_dir: Path, *options: str) -> Iterator[Standalone]:
    """Start `rmq standalone` on free loopback ports, with ``options`` on the command line. It is killed at the end if
    it still runs.
    """
    command: Sequence[str | Path] = [
        RMQ,
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


@contextmanager
def run_name_server(work_dir: Path, port: int = 0, conf: str = "") -> Iterator[tuple[ServerProcess, str]]:
    """Run `rmq namesrv`. Yield its process and address."""
    config = work_dir / f"rmq-namesrv-{port}.conf"
    config.write_text(f"kvConfigPath={work_dir}/kvConfig-{port}.json\n{conf}")
    command: list[str | Path] = [RMQ, "namesrv", "--host", "127.0.0.1", "--port", str(port), "-c", config]
    with ServerProcess(command, work_dir / f"rmq-namesrv-{port}.log") as process:
        yield process, process.wait_ready(r"^ready namesrv=(\S+)$", READY_SECONDS)[1]


@contextmanager
def run_broker(
    store_dir: Path, work_dir: Path, name_servers: str, conf: Mapping[str, object]
) -> Iterator[tuple[ServerProcess, str]]:
    """Run `rmq broker` on a free port. Yield its process and address. `conf` is its `broker.conf`. It is killed at the
    end if it still runs.
    """
    config = work_dir / "rmq-broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in {"listenPort": 0, **conf}.items()))
    where = ("--host", "127.0.0.1", "--store", store_dir, "-n", name_servers)
    command: list[str | Path] = [RMQ, "broker", *where, "-c", config]
    with ServerProcess(command, work_dir / "rmq-broker.log") as process:
        yield process, process.wait_ready(r"^ready broker=(\S+) ", READY_SECONDS)[1]


@contextmanager
def run_proxy(work_dir: Path, name_servers: str, conf: Mapping[str, object]) -> Iterator[tuple[ServerProcess, str]]:
    """Run `rmq proxy` on free ports. Yield its process and gRPC address. It is killed at the end if it still runs."""
    with _run_proxy(work_dir, name_servers, conf) as (process, grpc_addr, _):
        yield process, grpc_addr


@contextmanager
def run_remoting_proxy(work_dir: Path, name_servers: str) -> Iterator[str]:
    """Run `rmq proxy` on free ports and yield its address for remoting clients. It must stop cleanly."""
    with _run_proxy(work_dir, name_servers, {}) as (process, _, remoting_addr):
        yield remoting_addr
        assert process.stop(signal.SIGTERM, STOP_SECONDS) == 0, process.log_tail()


@contextmanager
def _run_proxy(
    work_dir: Path, name_servers: str, conf: Mapping[str, object]
) -> Iterator[tuple[ServerProcess, str, str]]:
    config = work_dir / "rmq-proxy.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
    command: list[str | Path] = [RMQ, "proxy", "--host", "127.0.0.1", "--port", "0", "-n", name_servers, "-c", config]
    with ServerProcess(command, work_dir / "rmq-proxy.log") as process:
        ready = process.wait_ready(r"^ready grpc=(\S+) remoting=(\S+)", READY_SECONDS)
        yield process, ready[1], ready[2]
