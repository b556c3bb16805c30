"""Docstrings, comments, pages and names of tests are in plain English: first words, and words that say nothing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import FOLDERS, ROOT

FIRST = re.compile(r"(What|Whether|Who|Of|As|By|For those|How|Where|When|Those|Nobody|Told|Tells)\b")
WORDS = re.compile(r"\b(told|tells|anew|whatever|once more|comes again|come again)\b", re.IGNORECASE)
NAMES = re.compile(r"test_.*(told|tells|anew|once_more|comes?_again)(_|$)")
PAGE_WORDS = re.compile(r"\b(told|anew|whatever|once more|comes again|come again)\b", re.IGNORECASE)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each place that is not plain English."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and NAMES.match(node.name):
            yield node.lineno, node.name
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)) is not None:
            line = node.body[0].lineno
            if first := FIRST.match(text):
                yield line, first[0]
            for found in WORDS.finditer(text):
                yield line + text.count("\n", 0, found.start()), found[0]
    if not WORDS.search(source):
        return  # reading tokens takes most of the time
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], found[0]) for found in WORDS.finditer(token.string))


def page_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each place of a page, outside of its code blocks, that is not plain English."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield from ((number, found[0]) for found in PAGE_WORDS.finditer(line))


def _shown(file: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{line}: {word}" for line, word in found]


@pytest.mark.parametrize("folder", [*(f"packages/{name}" for name in FOLDERS), "tests", "bench", "docs", "examples"])
def test_python_is_in_plain_english(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [place for file in files if file != Path(__file__) for place in _shown(file, faults(file.read_text()))] == []


def test_pages_are_in_plain_english() -> None:
    generated = ROOT / "docs/reference"
    pages = [file for file in sorted((ROOT / "docs").rglob("*.md")) if generated not in file.parents]
    pages += [*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md")]
    assert len(pages) > 80
    assert [place for page in pages for place in _shown(page, page_faults(page.read_text()))] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What a store has."""\n', [(1, "What")]),
        ('def f():\n    """Return one.\n\n    The peer is told."""\n', [(4, "told")]),
        ("x = 1  # read anew\n", [(1, "anew")]),
        ('"""Whatsoever."""\nx = "told"\n', []),
        ("def test_a_file_is_made_anew():\n    pass\n", [(1, "test_a_file_is_made_anew")]),
        ('class A:\n    """Of a queue, whatever comes."""\n', [(2, "Of"), (2, "whatever")]),
    ],
)
def test_faults_have_their_lines(source: str, expected: list[tuple[int, str]]) -> None:
    assert list(faults(source)) == expected


def test_code_blocks_of_pages_do_not_count() -> None:
    assert list(page_faults("Told.\n\n```sh\ntold\n```\nIt comes again.\n")) == [(1, "Told"), (6, "comes again")]
