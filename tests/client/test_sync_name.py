"""The facade under the name programs import it by."""

from __future__ import annotations

import subprocess
import sys


def test_both_ways_to_import_the_facade_have_the_same_classes():
    program = (
        "from rmqkit.sync import Producer, PushConsumer, run\n"
        "from rmqkit import sync\n"
        "import rmqkit.sync as module, rmqkit.client.sync.facade as home\n"
        "assert sync.Producer is Producer is module.Producer is home.Producer\n"
        "assert sorted(module.__all__) == sorted(home.__all__) and all(hasattr(module, one) for one in home.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
