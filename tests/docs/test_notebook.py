"""The notebook runs from its first cell to its last, with fewer orders, in the session of the tests."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEWER = {"30_000": "3_000", "10_000": "1_000", "order-4711": "order-471"}
MAGIC = re.compile(r"^%matplotlib inline$", re.MULTILINE)


@pytest.fixture
def namespace(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the namespace of the cells. Their session is that of the tests, and remains open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    names: dict[str, Any] = {"__name__": "__main__"}
    yield names
    pyplot.close("all")
    spark.catalog.clearCache()
    spark.catalog.dropTempView("log")
    if "server" in names:
        names["server"].kill()
        names["server"].wait()
        names["server"].stdout.close()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_its_first_cell_to_its_last(namespace: dict[str, Any]) -> None:
    notebook = nbformat.read(ROOT / "examples/pipeline.ipynb", 4)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown), "the stored notebook contains its pictures"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                source = MAGIC.sub("", cell.source)
                for many, few in FEWER.items():
                    source = source.replace(many, few)
                exec(compile(source, "pipeline.ipynb", "exec"), namespace)
    printed = output.getvalue()
    numbers = re.search(r"([\d,]+) of 3,000 orders have no payment; sent without one: ([\d,]+)", printed)
    assert numbers, printed
    assert numbers[1] == numbers[2]
    large = re.search(r"([\d,]+) large orders in the topic, ([\d,]+) in the files", printed)
    assert large, printed
    assert large[1] == large[2]
    assert "\nsound\n" in printed
    assert "broker stopped, exit code 0" in printed
