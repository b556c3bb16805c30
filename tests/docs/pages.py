"""The pages, and the groups of pages that run together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.docs.blocks import Block, blocks_of

__all__ = ["PAGES", "ROOT", "RUNS", "blocks_of_all", "needs_spark"]

ROOT = Path(__file__).parents[2]
_NAV = re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs" / name for name in _NAV)]
"""All pages, those of the site in the order of its navigation."""

TUTORIAL = ROOT / "docs/tutorial"
RUNS: dict[str, Sequence[Path]] = {
    "tutorial": [page for page in PAGES if page.parent == TUTORIAL],
    **{str(page.relative_to(ROOT)): [page] for page in PAGES if page.parent != TUTORIAL},
}
"""Pages that share a folder and their servers: each page alone, but the tutorial is one story."""


def blocks_of_all(pages: Iterable[Path]) -> list[Block]:
    """Return the blocks of some pages."""
    return [block for page in pages for block in blocks_of(page)]


def needs_spark(blocks: Iterable[Block]) -> bool:
    """Return True if a block imports Spark."""
    return any(block.is_run and block.language == "python" and "spark" in block.text for block in blocks)
