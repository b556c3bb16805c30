"""The code blocks of a page, and errors in their form.

A page is Markdown. Its ``python`` and ``sh`` blocks are run from top to bottom. So that readers and tests see the same:

- a ``text`` block right after one of them is its output; ``…`` in it stands for text that differs between runs, a
  line of ``…`` for any lines, and runs of blanks count as one;
- a block with a title (``title="orders.py"``) is a file of that name, for the blocks after it;
- a paragraph "*Not run by the tests: why.*" right before a block leaves it out, and gives readers the reason;
- all other blocks are in a language that is data. A block without a language is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DATA", "RUN", "Block", "PageError", "blocks_of", "differs"]

RUN = ("python", "sh")
DATA = ("text", "properties", "yaml", "json", "toml", "ini", "dockerfile", "html", "sql", "xml", "diff")
ANYTHING = "…"

_FENCE = re.compile(r"( *)(`{3,})(.*)")
_INFO = re.compile(r'(\w*)(?: title="([^"]+)")?')
_NOT_RUN = re.compile(r"\*Not run by the tests: (.+?)\.?\*")
_FOLLOWS_WITHIN = 4  # lines between a block and its output: a sentence such as "prints"


class PageError(AssertionError):
    """An error in the form of a page, as this module defines it."""


@dataclass(slots=True)
class Block:
    """A fenced block.

    Attributes:
        line: line of the opening fence, from 1.
        title: the file name, if the block is a file.
        not_run: the reason why it is left out.
        shown: the output on the page, None if there is none.
    """

    page: Path
    line: int
    language: str
    text: str
    title: str = ""
    not_run: str = ""
    shown: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.title and not self.not_run


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in order. The output of a block is part of the block.
    Raises PageError: a block has no language or an unknown one, or is a file that no block uses."""
    blocks: list[Block] = []
    end = -_FOLLOWS_WITHIN
    for block, last_line in _fenced(page):
        is_output = block.language == "text" and not block.title and block.line - end <= _FOLLOWS_WITHIN
        if is_output and blocks and blocks[-1].is_run and blocks[-1].shown is None:
            blocks[-1].shown = block.text
        else:
            if block.language not in (*RUN, *DATA):
                known = ", ".join((*RUN, *DATA))
                raise PageError(f"{block.place}: a block in {block.language or 'no language'}; it has to be in {known}")
            blocks.append(block)
        end = last_line
    _check_files_are_used(blocks)
    return blocks


def _fenced(page: Path) -> Iterator[tuple[Block, int]]:
    lines = page.read_text(encoding="utf-8").splitlines()
    before, at = "", 0
    while at < len(lines):
        opening = _FENCE.fullmatch(lines[at])
        if opening is None:
            before = lines[at].strip() or before
            at += 1
            continue
        indent, fence, info = opening.groups()
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence), None)
        described = _INFO.fullmatch(info.strip())
        if end is None or described is None:
            raise PageError(f"{page.name}:{at + 1}: a fence that does not end, or {info!r} behind it is not understood")
        reason = _NOT_RUN.fullmatch(before)
        text = "".join(line.removeprefix(indent) + "\n" for line in lines[at + 1 : end])
        yield Block(page, at + 1, described[1], text, described[2] or "", reason[1] if reason else ""), end + 1
        before, at = "", end + 1


def _check_files_are_used(blocks: list[Block]) -> None:
    for at, block in enumerate(blocks):
        names = (block.title, f"{block.title.removesuffix('.py')}:")  # uvicorn runs chat:app
        users = [later for later in blocks[at + 1 :] if any(name in later.text for name in names)]
        if block.title and block.language in RUN and not block.not_run and not users:
            raise PageError(f"{block.place}: no block behind this one uses {block.title}: it would not be run")


def differs(shown: str, printed: str) -> str | None:
    """Return None if a page shows the printed text, else the part that is missing in one of them."""
    wanted, lines = shown.split("\n"), printed.rstrip().split("\n")
    pattern = "".join(_line_pattern(line) for line in "\n".join(wanted).rstrip().split("\n"))
    if re.fullmatch(pattern, "".join(f"{_squeezed(line)}\n" for line in lines)):
        return None
    return f"the page shows\n{shown.rstrip()}\nand it prints\n{printed.rstrip()}"


def _line_pattern(line: str) -> str:
    if line.strip() == ANYTHING:
        return r"(?:.*\n)*?"
    return ".*?".join(re.escape(_squeezed(part, strip=False)) for part in _squeezed(line).split(ANYTHING)) + r"\n"


def _squeezed(line: str, *, strip: bool = True) -> str:
    line = re.sub(r"\s+", " ", line)
    return line.strip() if strip else line
