"""The page about a first handler: its diffs apply to the tree, and the tests then pass.

The tree is a copy, so that the request of the page exists nowhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.sources import ROOT

PAGE = ROOT / "docs/how-to/first-handler.md"
TEST = "packages/rmqkit-server/tests/broker/operations/test_count.py"
HANDLER = "+++ b/packages/rmqkit-server/src/rmqkit/broker/operations/"
_CODES = "tests/tree/test_codes.py"


@pytest.fixture(scope="module")
def diffs() -> list[str]:
    return [block.text for block in blocks_of(PAGE) if block.language == "diff"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the parts of the tree that the tests of the page import."""
    skipped = shutil.ignore_patterns("__pycache__", "golden", "target")
    for folder in ("tests", "docs", "packages"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    for file in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def apply(tree: Path, diff: str) -> None:
    subprocess.run(["git", "apply", "--recount", "-"], cwd=tree, input=diff, text=True, check=True)


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(tree), *map(str, sorted(tree.glob("packages/*/src")))]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_diffs_of_the_page_make_a_request_that_works(tree: Path, diffs: list[str]):
    before = [diff for diff in diffs if HANDLER not in diff]
    assert len(before) == len(diffs) - 1, "all diffs but one change existing files"
    for diff in before:
        apply(tree, diff)
    failed = run(tree, TEST)
    assert failed.returncode == 1 and "request type 6001 not supported" in failed.stdout, failed.stdout
    apply(tree, next(diff for diff in diffs if HANDLER in diff))
    passed = run(tree, TEST, _CODES, "-k", "count or handler or servers or index or COUNT_MESSAGES or CountResponse")
    assert passed.returncode == 0, passed.stdout[-3000:]
