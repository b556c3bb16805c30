"""A test of the suite itself: the name of each behaviour is unique."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def behaviours() -> Iterator[ast.AsyncFunctionDef]:
    """Yield every behaviour of the suite."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node


def test_every_behaviour_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(one.name for one in behaviours()).items() if count > 1] == []
