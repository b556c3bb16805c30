"""`make test` leaves out one folder: tests that start other people's programs are in tests/interop."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sources import ROOT, files_of_tests

PEERS = re.compile(r"mark\.interop|tests\.interop\.(kit|go_and_node|mqadmin)|ApachePair|servers import .*\bAPACHE\b")


def test_nobody_else_starts_them():
    inside, outside = [], []
    for path in files_of_tests():
        if PEERS.search(path.read_text()) and path != Path(__file__):
            (inside if ROOT / "tests" / "interop" in path.parents else outside).append(path.name)
    assert outside == []
    assert len(inside) > 10
