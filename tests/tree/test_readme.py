"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.standalone import run_standalone

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECONDS_MAX = 100


def example(heading: str) -> list[str]:
    """The Python examples of a section."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_examples_send_and_receive(tmp_path):
    with run_standalone(tmp_path / "store", tmp_path) as standalone:
        asynchronous, synchronous = (
            code.replace("127.0.0.1:9876", standalone.namesrv_addr) for code in example("A client")
        )
        printed = run(asynchronous).splitlines()
        assert re.fullmatch(r"SendStatus\.SEND_OK [0-9A-F]{32}", printed[0])
        assert printed[1] == "paid ['order-17'] b'17'"
        assert run(synchronous) == ""
        standalone.stop()


@pytest.mark.spark
def test_the_spark_example_counts_by_topic_and_tag(tmp_path):
    with run_standalone(tmp_path / "store", tmp_path) as standalone:
        run(example("A client")[1].replace("127.0.0.1:9876", standalone.namesrv_addr))
        standalone.stop()
    (code,) = example("Spark")
    printed = run(code.replace("/tmp/store", str(tmp_path / "store")))
    assert re.search(r"\|Orders *\|created *\| *1\|", printed)


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
