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


def test_every_folder_and_module_of_the_architecture_picture_exists():
    picture = (ROOT / "docs/architecture.md").read_text().split("```")[1].split("src/rmqkit/\n")[1]
    folder = "src/rmqkit/"
    for line in picture.splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.split(r"  +", line.strip())[0].replace(",", " ").split()
        if indent < 4:
            folder = (
                ("src/rmqkit/" + names[0]) if indent and names[0].endswith("/") else "src/rmqkit/" if indent else ""
            )
            names = names if indent else [name for name in names if name.endswith("/")]
            paths = [ROOT / ("src/rmqkit" if indent else "") / name for name in names]
        else:
            paths = [ROOT / folder / name for name in names]
        for path in paths:
            assert path.exists() or path.with_suffix(".py").exists(), f"{path} is in the picture and not in the tree"
