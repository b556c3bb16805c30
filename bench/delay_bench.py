"""Measures messages of delay levels: a million pending, a thousand becoming due every second. Prints JSON.

    python bench/delay_bench.py                                  against an `rmq standalone` started here
    python bench/delay_bench.py --pending 100000 --seconds 10    smaller and shorter

The pending messages are on nine levels of an hour and more. The stream that becomes due meanwhile is on nine levels of
2 to 10 s. The error of a delivery is the store time of the delivered copy minus the time of the send and its delay, so
it includes the send. A consumer with long polling gets the message a little later. The figures are those of
`bench.commands.timer` (`rmq bench timer`), which measures timed messages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.timer import DUE_SECONDS, Waiting
from rmqkit.protocol.codes import CURRENT_VERSION, version_name

LEVELS = " ".join([f"{seconds}s" for seconds in DUE_SECONDS] + [f"{hours}h" for hours in range(1, 10)])
SHORT = len(DUE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pending", type=int, default=1_000_000, help="messages that wait all the time")
    parser.add_argument("--rate", type=int, default=1000, help="messages that become due in a second")
    parser.add_argument("--seconds", type=int, default=30, help="for which messages become due")
    parser.add_argument("--body-bytes", type=int, default=100)
    arguments = parser.parse_args()
    with server() as (name_server, pid):
        figures = asyncio.run(measure(Waiting(name_server, pid, os.urandom(arguments.body_bytes)), arguments))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    asked = {"version": version_name(CURRENT_VERSION), **vars(arguments)}
    print(json.dumps({"bench": "delay", **machine, **asked, "figures": figures}, indent=1))


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Run a standalone. Yield its name server's address and its process id."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        config = Path(folder) / "broker.conf"
        config.write_text(f"messageDelayLevel={LEVELS}\n")
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(Path(folder) / "store"), "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None, "stdout is piped"
            yield dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])["namesrv"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def measure(load: Waiting, arguments: argparse.Namespace) -> dict[str, object]:
    try:
        await load.connect()
        filled = await load.fill(arguments.pending, in_hours, is_timed=False)
        return {"pending": filled, "due": await load.become_due(arguments.rate, arguments.seconds, in_seconds)}
    finally:
        await load.close()


def in_hours(number: int, now_ms: float) -> tuple[float, str]:
    level = SHORT + 1 + number % 9
    return now_ms + (level - SHORT) * 3_600_000, f"DELAY\x01{level}\x02"


def in_seconds(number: int, now_ms: float) -> tuple[float, str]:
    level = 1 + number % SHORT
    return now_ms + DUE_SECONDS[level - 1] * 1000, f"DELAY\x01{level}\x02"


if __name__ == "__main__":
    main()
