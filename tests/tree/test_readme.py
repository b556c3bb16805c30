"""What documents say about files is true; what their examples do is tested in tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_link_of_the_documents_resolves():
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_folder_and_module_that_the_architecture_names_exists():
    names = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*)`", (ROOT / "docs/architecture.md").read_text())
    named = [name for name in names if "/" in name or (ROOT / "src/rmqkit" / name).is_dir()]
    assert len(named) > 40
    for name in named:
        places = [ROOT / "src/rmqkit" / name, ROOT / name]
        assert any(path.exists() or path.with_suffix(".py").exists() for path in places), f"{name} is not in the tree"
