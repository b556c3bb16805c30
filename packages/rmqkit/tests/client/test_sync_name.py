"""The facade under the name programs import it by."""

from __future__ import annotations

import subprocess
import sys


def test_both_ways_to_import_the_facade_have_the_same_classes():
    program = (
        "from rmqkit.sync import Producer, PushConsumer, run\n"
        "from rmqkit import sync\n"
        "import rmqkit.sync as module\n"
        "assert sync is module and sync.Producer is Producer\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
