"""Every code block of the documents works as the page says; see `blocks` for the form of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmqkit.admin.messages import sending
from rmqkit.cli.frame import nouns, profiles
from tests.cli.in_process import rmq
from tests.docs import commands
from tests.docs.blocks import Block, PageError, blocks_of, differs
from tests.docs.given import GIVEN
from tests.docs.pages import PAGES, ROOT, RUNS, blocks_of_all, needs_spark
from tests.docs.runner import Here, PageRun, free_ports, standalone, starts_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECONDS_MAX = 1200  # for a busy machine


def _runs(*, with_spark: bool) -> Iterator[object]:
    for name, pages in RUNS.items():
        blocks = blocks_of_all(pages)
        if any(block.is_run for block in blocks) and needs_spark(blocks) is with_spark:
            yield pytest.param(name, blocks, id=name)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS_MAX)
@pytest.mark.parametrize(("name", "blocks"), list(_runs(with_spark=False)))
def test_a_page_does_what_it_says(name: str, blocks: list[Block], tmp_path: Path):
    (tmp_path / "page").mkdir()
    run_page(name, blocks, tmp_path / "page", tmp_path)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(_SECONDS_MAX)
@pytest.mark.parametrize(("name", "blocks"), list(_runs(with_spark=True)))
def test_a_page_with_spark_does_what_it_says(
    name: str, blocks: list[Block], tmp_path: Path, spark: SparkSession, spark_folder: Path
):
    """Run in the session of all tests, which the page's `spark_session()` returns, and in that session's folder."""
    clear(spark_folder)
    try:
        run_page(name, blocks, spark_folder, tmp_path, Here())
    finally:
        clear(spark_folder)
        for row in spark.sql("SHOW VIEWS").collect():
            spark.catalog.dropTempView(row.viewName)


def run_page(name: str, blocks: list[Block], folder: Path, tmp_path: Path, here: Here | None = None) -> None:
    ports, servers_folder = free_ports(), tmp_path / "servers"
    servers_folder.mkdir()
    with nullcontext() if any(map(starts_server, blocks)) else standalone(servers_folder, ports):
        GIVEN.get(name, lambda *_: None)(folder, ports)
        with PageRun(folder, ports, here) as run:
            for block in blocks:
                run.run(block)


def clear(folder: Path) -> None:
    """Remove the files of other pages from a shared folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_every_page_of_the_folder_is_in_the_site():
    assert set((ROOT / "docs").rglob("*.md")) == set(PAGES) - {ROOT / "README.md", ROOT / "CHANGELOG.md"}


def page(folder: Path, text: str) -> list[Block]:
    path = folder / "page.md"
    path.write_text(text)
    return blocks_of(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```\nls\n```\n", "a block in no language"),
        ("```perl\nprint 1;\n```\n", "a block in perl"),
        ("```sh\nls\n", "a fence that does not end"),
        ('```python title="a.py"\npass\n```\n', "no block behind this one uses a.py"),
    ],
)
def test_a_block_that_would_not_be_run_is_refused(tmp_path, text, error):
    with pytest.raises(PageError, match=error):
        page(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```sh\necho one\nfalse\n```\n", r"page.md:1: ended with exit code 1\none"),
        ("```sh\necho one\n```\nprints\n```text\ntwo\n```\n", "the page shows\ntwo\nand it prints\none"),
        ("```python\nprint(1)\nraise ValueError('seen')\n```\n", r"page.md:1: failed\n1\n(.|\n)*ValueError: seen"),
        (
            "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
            r"page.md:5: failed(.|\n)*line 6.*(.|\n)*AssertionError",
        ),
        ("```sh\nrmq broker -n nowhere --store s\n```\n", "the server is not ready"),
    ],
)
def test_a_block_that_does_something_else_fails(tmp_path, text, error):
    *before, last = page(tmp_path, text)
    with PageRun(tmp_path, free_ports()) as run:
        for block in before:
            run.run(block)
        with pytest.raises(PageError, match=error):
            run.run(last)


def test_what_one_block_does_the_next_one_finds(tmp_path):
    text = """
```sh
export FRUIT=apple
mkdir below
cd below
```

*Not run by the tests: it would end them.*

```sh
exit 1
```

```properties title="fruit.conf"
listenPort=10911
```

```sh
pwd; cat ~/fruit.conf
```

```text
~/below
listenPort=10911
```

```python
import os

fruit = os.environ["FRUIT"]
```

```python
print(fruit, 10911 in range(20000))
```

```text
apple …
```
"""
    with PageRun(tmp_path, free_ports()) as run:
        for block in page(tmp_path, text):
            run.run(block)


@pytest.mark.parametrize(("chosen", "timeout_ms"), [((), 60_000), (("--timeout", "800"), 800)])
def test_a_command_of_a_page_has_time(tmp_path, monkeypatch, chosen, timeout_ms):
    text = "```sh\ncommand -v rmq; rmq profile list\n```\n\n```text\n…/tests/docs/bin/rmq\nno profiles; …\n```\n"
    with PageRun(tmp_path, free_ports()) as run:
        run.run(*page(tmp_path, text))
    got: dict[str, object] = {}
    monkeypatch.setattr(nouns, "_run", lambda operation, given, options: got.update(options))
    monkeypatch.setattr(profiles, "resolved", commands.resolved)
    monkeypatch.setattr(sending, "SILENT_SECONDS", 2)
    assert rmq("cluster", "list", *chosen).returncode == 0
    assert (got["timeout_ms"], sending.SILENT_SECONDS) == (timeout_ms, 60)


def test_what_a_page_shows_may_leave_out_what_changes():
    assert differs("a … c\n…\nlast\n", "a  b   c\nmore\nmore\nlast\n") is None
    assert differs("a … c\n…\nlast\n", "a b c\nlast\n") is None
    assert differs("a\n…\n", "a\n") is None
    assert differs("a … c\n", "a b d\n") is not None
    assert differs("a\n", "a\nb\n") is not None
