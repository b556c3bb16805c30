"""Notes such as ``Source: store.md §3.3`` in the code name sections that the specification has."""

import re
from pathlib import Path

import pytest
from docs.site_docstrings import SPECIFICATION, references, with_links

from tests.sources import ROOT

PAGES = ROOT / "docs/spec"
HEADING = re.compile(r"^#+ (\d+(?:\.\d+)*) .*\{ #s([\d-]+) \}$", re.MULTILINE)


def sections(page: str) -> dict[str, str]:
    """Return the anchor of each numbered section."""
    return dict(HEADING.findall((PAGES / page).read_text()))


@pytest.fixture(scope="module")
def known() -> set[tuple[str, str]]:
    return {(page, number) for page in SPECIFICATION for number in sections(page)}


@pytest.mark.parametrize("folder", ["packages", "tests", "bench"])
def test_every_reference_to_a_section_resolves(folder: str, known: set[tuple[str, str]]) -> None:
    lost, resolved = [], 0
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file == Path(__file__):
            continue
        text = file.read_text()
        for found, document in references(text):
            if document is not None and document.startswith("RFC "):
                continue
            if (document, found[2]) in known:
                resolved += 1
            else:
                line = text.count("\n", 0, found.start()) + 1
                lost.append(f"{file.relative_to(ROOT)}:{line}: {document} §{found[2]}")
    assert not lost, "docs/spec has these sections"
    assert resolved, f"{folder} has references"


@pytest.mark.parametrize("page", SPECIFICATION)
def test_numbers_and_anchors_of_sections_agree_and_are_unique(page: str) -> None:
    found = HEADING.findall((PAGES / page).read_text())
    assert found, "the page has numbered sections"
    assert all(anchor == number.replace(".", "-") for number, anchor in found)
    assert len({number for number, _ in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Source: store.md §3.3, §4; grpc.md §1.", [("store.md", "3.3"), ("store.md", "4"), ("grpc.md", "1")]),
        ("RFC 9113 §5.1, then lite.md §2", [("RFC 9113", "5.1"), ("lite.md", "2")]),
        ("only §7", [(None, "7")]),
    ],
)
def test_references_name_the_document_before_them(text: str, expected: list[tuple[str | None, str]]) -> None:
    assert [(document, found[2]) for found, document in references(text)] == expected


def test_the_site_links_references_of_docstrings_to_their_sections() -> None:
    text = "Read a file.\n\nSource: store.md §3.3, RFC 9113 §5."
    assert with_links(text) == "Read a file.\n\nSource: store.md [§3.3](../../spec/store.md#s3-3), RFC 9113 §5."
