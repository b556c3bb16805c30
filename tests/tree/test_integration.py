"""A package's own tests need no other package: test files that do carry a mark, or are left out if the package is
missing.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.integration import of_others
from tests.sources import ROOT

ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("rmqkit.store", "rmqkit.broker", "rmqkit.namesrv", "rmqkit.admin", "rmqkit.arrow")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import tests.sources
tests.sources.is_installed = lambda package: package == "rmqkit"
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_a_file_needs_the_packages_of_the_test_modules_it_imports():
    tests = ROOT / "packages" / "rmqkit" / "tests"
    assert of_others(tests / "protocol" / "test_ids.py") == set()
    assert of_others(tests / "client" / "consumer" / "test_rebalance.py") == {"rmqkit-server"}
    assert of_others(ROOT / "tests" / "test_package.py") == set()


def test_the_clients_tests_run_without_the_other_packages():
    command = [
        sys.executable,
        "-c",
        ALONE,
        "packages/rmqkit/tests/client/runtime",
        "packages/rmqkit/tests/test_sentences.py",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert re.search(r"left out: \d+ files that need rmqkit-server: pip install -e packages/rmqkit-server", ran.stdout)
    assert re.search(r"^\d\d passed", ran.stdout, re.MULTILINE)
