"""`make test` leaves out one folder: tests that start other people's programs are in tests/interop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interop import reference
from tests.sources import ROOT, files_of_tests

PEERS = re.compile(r"mark\.interop|tests\.interop\.(kit|go_and_node|mqadmin)|ApachePair|servers import .*\bAPACHE\b")


def test_nobody_else_starts_them():
    inside, outside = [], []
    for path in files_of_tests():
        if PEERS.search(path.read_text()) and path != Path(__file__):
            (inside if ROOT / "tests" / "interop" in path.parents else outside).append(path.name)
    assert outside == []
    assert len(inside) > 10


@pytest.mark.parametrize("start", reference.NEW)
def test_what_is_new_in_a_version_names_tests(start: str) -> None:
    file, _, test = start.partition("::")
    (path,) = (ROOT / "tests" / "interop").rglob(file)
    assert not test or f"def {test.partition('[')[0]}" in path.read_text()


@pytest.mark.parametrize(
    ("nodeid", "version", "is_skipped"),
    [
        ("tests/interop/test_lite_consumer.py::test_a[apache]", "5.4.0", True),
        ("tests/interop/test_lite_consumer.py::test_a[apache]", "5.5.0", False),
        ("tests/interop/test_lite_consumer.py::test_a[apache]", "5.10.1", False),
        ("tests/interop/test_lite_consumer.py::test_a[ours]", "5.4.0", False),
        ("tests/interop/test_sql92.py::test_a", "5.4.0", False),
    ],
)
def test_tests_of_something_new_are_skipped_with_older_versions(nodeid: str, version: str, is_skipped: bool) -> None:
    assert (reference.reason_to_skip(nodeid, version) is not None) is is_skipped
