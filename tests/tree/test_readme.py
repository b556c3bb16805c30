"""Documents name only files that exist. The examples of the documents are tested in tests/docs."""

from __future__ import annotations

import re

from tests.sources import ROOT, found


def test_every_link_of_the_documents_resolves():
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_folder_and_module_that_the_architecture_names_exists():
    names = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*)`", (ROOT / "docs/architecture.md").read_text())
    named = [name for name in names if "/" in name or ((place := found(name)) is not None and place.is_dir())]
    assert len(named) > 40
    for name in named:
        is_there = found(name) is not None or (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
        assert is_there, f"{name} is not in the tree"
