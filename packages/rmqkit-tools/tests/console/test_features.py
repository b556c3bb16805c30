"""Each feature of the documents' table has a test that is there."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

PAGE = (ROOT / "docs" / "reference" / "console-features.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| .+? \| `([\w/-]+\.py)::(\w+)`", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("feature", "path", "name"), ROWS, ids=[feature for feature, _, _ in ROWS])
def test_a_feature_has_its_test(feature: str, path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{feature}: {path}::{name}"


def test_all_features_are_reported() -> None:
    assert len(ROWS) == 39
