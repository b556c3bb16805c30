"""The list of changes that cannot alter behaviour: each names a line that exists, and gives a reason."""

from __future__ import annotations

import tomllib

import pytest

from tests.mutants.__main__ import EQUIVALENT
from tests.mutants.rooms import ROOMS
from tests.sources import ROOT

LISTED = tomllib.loads(EQUIVALENT.read_text())["mutant"]


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant["after"][:40])
def test_a_listed_change_is_of_a_line_that_exists(mutant: dict[str, str]) -> None:
    lines = {line.strip() for line in (ROOT / mutant["path"]).read_text().splitlines()}
    assert mutant["before"] in lines, "remove the entry, or run `make mutants` for the room again"
    assert mutant["after"] != mutant["before"] and len(mutant["reason"]) > 10


def test_rooms_name_code_and_tests_that_exist() -> None:
    paths = [path for room in ROOMS.values() for path in (*room.code, *room.tests)]
    assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == []
