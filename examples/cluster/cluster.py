"""A whole cluster on this machine: two name servers, two masters, a slave for each. Ctrl-C stops it.

    python examples/cluster/cluster.py [FOLDER] [--port 9876] [--broker-port 10911]

Every server is a process of its own with a store and a log under FOLDER (default: a new one under /tmp). Masters answer
a send when their slave has the message, too; consumers read from the slave while its master is away. Kill a master and
look: everything acknowledged is still read, and sends go to the other one. Port 0 picks free ports.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RMQ = Path(sys.executable).with_name("rmq")
READY_SECONDS = 30.0
GROUPS = ("broker-a", "broker-b")
SHARED = "brokerIP1=127.0.0.1 mappedFileSizeCommitLog=67108864 slaveReadEnable=true".split()
MASTER = "brokerRole=SYNC_MASTER inSyncReplicas=2".split()
SLAVE = "brokerRole=SLAVE brokerId=1".split()


@dataclass
class Server:
    """One process: what it is, where it listens, where its log is."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""

    def wait_ready(self) -> None:
        """Wait for the line in which it says its address; its end, or silence, ends the program."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log.read_text().splitlines():
                if line.startswith("ready "):
                    self.address = line.split()[1].partition("=")[2]
                    return
            time.sleep(0.02)
        raise SystemExit(f"{self.name} is not ready; see {self.log}:\n{self.log.read_text()[-500:]}")


class Cluster:
    """Starts the servers in the order in which they need each other, and stops them in the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[Server] = []

    def start(self, port: int, broker_port: int) -> None:
        for index in range(2):
            own = ["--port", port + index if port else 0, "--set", f"kvConfigPath={self.folder}/n{index}/kvConfig.json"]
            self._run(f"namesrv-{index}", "name server", "namesrv", *own).wait_ready()
        for role, settings in (("master", MASTER), ("slave", SLAVE)):
            begun = []
            for at, group in enumerate(GROUPS):
                own_port = broker_port and broker_port + 20 * at + 10 * (role == "slave")
                store = self.folder / f"{group}-{role}"
                pairs = [f"brokerName={group}", f"namesrvAddr={self.name_servers}", *SHARED, *settings]
                words = [part for pair in pairs for part in ("--set", pair)]
                begun.append(self._run(f"{group}-{role}", role, "broker", "--port", own_port, "--store", store, *words))
            for server in begun:
                server.wait_ready()

    def stop(self) -> None:
        """Slaves first, name servers last; one that does not end is killed after a while."""
        for server in reversed(self.servers):
            server.process.terminate()
            try:
                server.process.wait(READY_SECONDS)
            except subprocess.TimeoutExpired:
                server.process.kill()

    @property
    def name_servers(self) -> str:
        return ";".join(server.address for server in self.servers if server.role == "name server")

    def show(self) -> None:
        table = Table(title=f"NAMESRV_ADDR='{self.name_servers}'")
        for heading in ("server", "role", "address", "process", "log"):
            table.add_column(heading, overflow="fold")
        for one in self.servers:
            table.add_row(one.name, one.role, one.address, str(one.process.pid), str(one.log))
        console = Console()
        console.width = max(console.width, 100)
        console.print(table)

    def watch(self) -> None:
        """Tell of every server that ends by itself, until it is interrupted."""
        running = list(self.servers)
        while running:
            for server in [one for one in running if one.process.poll() is not None]:
                running.remove(server)
                print(f"{server.name} ended with {server.process.returncode}", flush=True)
            time.sleep(0.2)

    def _run(self, name: str, role: str, command: str, *words: object) -> Server:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(RMQ), command, "--host", "127.0.0.1", *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who stop them in order
            )
        self.servers.append(Server(name, role, process, log))
        return self.servers[-1]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--port", type=int, default=9876, help="of the first name server")
    options.add_argument("--broker-port", type=int, default=10911, help="of the first broker; the others 10 further")
    chosen = options.parse_args()
    folder = (chosen.folder or Path(tempfile.mkdtemp(prefix="rmq-cluster-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    cluster = Cluster(folder)
    try:
        cluster.start(chosen.port, chosen.broker_port)
        cluster.show()
        print("Ctrl-C stops all", flush=True)
        cluster.watch()
    except KeyboardInterrupt:
        print("stopping", flush=True)
    finally:
        cluster.stop()
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
