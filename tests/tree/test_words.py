"""Docstrings and comments are in plain English: their first words, and words that say nothing.

``LEFT`` is the number of places in each package that still have to be rewritten. It may only become smaller: when you
rewrite some, the test asks for the new number. A new package starts at 0.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import FOLDERS, ROOT

LEFT: dict[str, int] = {}
FIRST = re.compile(r"(What|Whether|Who|Of|As|By|For those|How|Where|When|Those|Nobody|Told|Tells)\b")
WORDS = re.compile(r"\b(told|tells|anew|whatever|once more|comes again|come again)\b", re.IGNORECASE)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each place that is not plain English."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)) is not None:
            line = node.body[0].lineno
            if first := FIRST.match(text):
                yield line, first[0]
            for found in WORDS.finditer(text):
                yield line + text.count("\n", 0, found.start()), found[0]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], found[0]) for found in WORDS.finditer(token.string))


def faults_of(folder: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in sorted(folder.rglob("*.py"))
        for line, word in faults(file.read_text())
    ]


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_is_in_plain_english(package: str) -> None:
    found = faults_of(FOLDERS[package])
    left = LEFT.get(package, 0)
    shown = "\n".join(found[-10:])
    assert len(found) <= left, f"{len(found) - left} more than before, maybe among these:\n{shown}"
    assert len(found) == left, f"write {len(found)} for {package} into LEFT"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What a store has."""\n', [(1, "What")]),
        ('def f():\n    """Return one.\n\n    The peer is told."""\n', [(4, "told")]),
        ("x = 1  # read anew\n", [(1, "anew")]),
        ('"""Whatsoever."""\nx = "told"\n', []),
        ('class A:\n    """Of a queue, whatever comes."""\n', [(2, "Of"), (2, "whatever")]),
    ],
)
def test_faults_have_their_lines(source: str, expected: list[tuple[int, str]]) -> None:
    assert list(faults(source)) == expected
