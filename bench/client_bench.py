"""Measures our client and other Python clients with one real Apache broker in one run. Prints JSON.

    python bench/client_bench.py                     every client
    python bench/client_bench.py --messages 10000

Needs Java 17 and Maven, as `tests/interop` does. The other clients are `rocketmq` (uses the C++ client) and
`pyrocketmq` (uses the Java client), installed from `requirements/peers.txt` into a separate environment. A client that
does not install or run is reported with the reason. CPU is that of the client's process, user + system, per message:
the smallest of three rounds. The last figures are the Java client's: the time from before the send to the handler at
500 messages a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.broker_bench import APACHE_CONF, Peer, load_of
from bench.peers.load import ROUNDS, SMALL_BODY_BYTES
from rmqkit import Message
from rmqkit.sync import Producer
from tests.interop.apache import open_store_with_apache
from tests.interop.kit import default_version, prepare

ROOT = Path(__file__).parents[1]
PEERS = {"rocketmq (C++)": "cpp_client.py", "pyrocketmq (Java)": "jpype_client.py"}
JPYPE_JARS = "4.9.4"
"""The last versions in which the classes are where pyrocketmq expects them."""
RUN_SECONDS_MAX = 400.0
LATENCY = "latency 500 5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=30_000, help="of a round")
    parser.add_argument("--body-bytes", type=int, default=1024)
    arguments = parser.parse_args()
    kit = prepare(default_version())
    jars = prepare(JPYPE_JARS).lib
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        pair = stack.enter_context(open_store_with_apache(kit, folder / "store", folder, APACHE_CONF))
        told = {"rmqkit": ours(pair.namesrv_addr, arguments)}
        python = environment()
        for peer, program in PEERS.items():
            told[peer] = run_peer(python, program, jars, pair.namesrv_addr, arguments)
        load = stack.enter_context(load_of(kit, pair.namesrv_addr, arguments.body_bytes, folder))
        java = Peer("java", pair.broker.pid, load)
        java.ask("")
        told["Java"] = {"latency at 500/s": java.run(LATENCY)}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    print(json.dumps({"bench": "client", **vars(arguments), **machine, "clients": told}, indent=1))


def ours(namesrv: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "rmqkit", "bench", "client", "--json", "--namesrv", namesrv]
    command += ["--messages", str(arguments.messages), "--body-bytes", str(arguments.body_bytes)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS_MAX).stdout
    return by_name(output)


def run_peer(
    python: Path | None, program: str, jars: Path, namesrv: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    if python is None:
        return {"not measured": "requirements/peers.txt does not install here"}
    prefix = f"BenchPeer-{Path(program).stem}"
    with Producer("bench-peers", namesrv) as producer:
        for topic, size in ((prefix, arguments.body_bytes), (f"{prefix}-many", SMALL_BODY_BYTES)):
            producer.send(Message(topic=topic, body=b"first"))
            for turn in range(ROUNDS):
                message = Message(topic=f"{topic}-{turn}", body=os.urandom(size))
                producer.send(message)
                producer.send_many(message for _ in range(arguments.messages - 1))
    command = [python, ROOT / "bench" / "peers" / program, namesrv, prefix, arguments.messages, arguments.body_bytes]
    environ = {**os.environ, "CLASSPATH": f"{jars}/*"}
    run = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=RUN_SECONDS_MAX, env=environ, check=False
    )
    last = run.stdout.strip().rpartition("\n")[2]
    if not last.startswith('{"figures"'):
        return {"not measured": (run.stderr.strip() or run.stdout.strip())[-500:]}
    return by_name(last)


def by_name(output: str) -> dict[str, Any]:
    return {figure.pop("what"): figure for figure in json.loads(output)["figures"]}


def environment() -> Path | None:
    """Return the interpreter that has the other clients, or None."""
    venv = ROOT / ".cache" / "bench-peers"
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", ROOT / "requirements" / "peers.txt"]
    return python if subprocess.run(install, check=False).returncode == 0 else None


if __name__ == "__main__":
    main()
