"""``rmq bench spark`` and Apache's ``MessageDecoder``: fetches the jars, compiles ``peers/DecodeLoad.java``.

    python bench/spark_bench.py [--quick] [--only 3,4,9] [--json] ...     all options of `rmq bench spark`

Needs Java 17 and Maven, as `tests/interop` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.interop.kit import default_version, prepare

PEERS = Path(__file__).parent / "peers"


def main() -> int:
    """Compile, then measure; the exit code is that of the measurement."""
    kit = prepare(default_version())
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as classes:
        jars = f"{kit.lib}/*"
        javac = kit.java.resolve().with_name("javac")
        subprocess.run([javac, "-nowarn", "-d", classes, "-cp", jars, PEERS / "DecodeLoad.java"], check=True)
        command = [
            sys.executable,
            "-m",
            "rmqkit",
            "bench",
            "spark",
            "--rocketmq-classpath",
            classes + os.pathsep + jars,
        ]
        return subprocess.run([*command, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
