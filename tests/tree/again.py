"""Repeated test runs of one commit on a busy machine: every run must have the same result.

``python -m tests.tree.again`` (`make again`) runs `make test` `--runs` times while `--busy` processes use the CPU. It
prints a line of JSON for each run: seconds, exit code, pytest's last line, the names of the failed tests. The exit code
is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run a number of processes that use the CPU without a pause."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(command: list[str]) -> dict[str, object]:
    """Run the tests once and return a summary of the output."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "seconds": round(time.monotonic() - begin),
        "load": round(os.getloadavg()[0], 1),
        "exit": done.returncode,
        **summary(done.stdout),
    }


def summary(printed: str) -> dict[str, object]:
    """Return pytest's last line, and the failed tests."""
    results = re.findall(r"^=* ?(\d+ (?:passed|failed|error).*?)=*$", printed, re.MULTILINE)
    return {
        "result": results[-1].strip() if results else "no result",
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="run the tests again and again beside a load")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute all the time")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    failed = 0
    with busy(arguments.busy):
        for number in range(1, arguments.runs + 1):
            found = run(arguments.command or ["make", "test"])
            failed += found["exit"] != 0
            print(json.dumps({"run": number, **found}), flush=True)
    print(json.dumps({"runs": arguments.runs, "runs_failed": failed}))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
