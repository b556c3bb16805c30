"""Runs one of our benches with a real Apache broker too: `rmq bench` measures both in one run.

    python bench/beside_apache.py pop --json         the same as rmq bench pop --json --namesrv … --pid …

Needs Java 17 and Maven, as `tests/interop` does. The broker has Apache's defaults instead of the tests' small values.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from broker_bench import APACHE_CONF

from tests.interop.apache import open_store_with_apache
from tests.interop.kit import default_version, prepare
from tests.interop.standalone import RMQ


def main() -> int:
    kit = replace(prepare(default_version()), is_short_lived=False)
    with (
        tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder,
        open_store_with_apache(kit, Path(folder, "store"), Path(folder), APACHE_CONF) as apache,
    ):
        where = ("--namesrv", apache.namesrv_addr, "--pid", str(apache.broker.pid))
        return subprocess.run([RMQ, "bench", *sys.argv[1:], *where], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
