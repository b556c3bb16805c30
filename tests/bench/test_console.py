"""The bench of the web console measures a broker and a console that it starts, and checks the answers of the
console.
"""

from __future__ import annotations

import pytest

from bench.commands import console as console_figures


@pytest.mark.slow
def test_bench_console_has_every_figure_with_its_budget() -> None:
    said: list[str] = []
    rows = console_figures.measure(
        topics=6, groups=3, messages=1_000, asks=2, pages=8, seconds=0.1, pairs=2, tell=said.append
    )
    figures = {row["what"]: row for row in rows}
    assert [what for what in figures if what.startswith("list /")] == [
        f"list /{page}" for page in console_figures._LISTS
    ]
    assert all(row["measured"] > 0 for what, row in figures.items() if what.startswith(("list", "search", "memory")))
    known = figures["first round of the watcher"]["more"]
    assert (known["topics"] >= 7, known["groups"], known["lags"]) == (True, 3, 15)
    search = figures["search 1 without a match"]["more"]
    assert search == {"examined": 1_000, "left": 0, "stopped": "end"}
    assert figures["8 open pages"]["unit"] == "% of a core"
    assert figures["sends beside a console with open pages"]["more"].keys() == {
        "per_second_with", "per_second_without", "broker_cpu_us_with", "broker_cpu_us_without",
    }  # fmt: skip
    assert said
