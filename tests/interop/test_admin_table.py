"""Every command of mqadmin that ``rmq`` has: our command with Apache's servers and with rmqkit's, row by row.

The rows are in `admin_rows`, their objects in `admin_world`. The outcome is the table in `docs/reference/mqadmin.md`,
which must equal the result of this test.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rmqkit.cli.admin.mqadmin import JAVA
from tests.interop.admin_rows import consumers, servers
from tests.interop.admin_world import Row, World, open_world
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.mqadmin import run_mqadmin
from tests.interop.standalone import run_standalone

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mqadmin.md"
ROWS = [*servers.ROWS, *consumers.ROWS]
ROWS_MIN = 40
MACHINES = 2
HEAD = """# mqadmin, side by side

A test runs every row with Apache's name server and broker 5.5.0 and with rmqkit's, and checks the result. *As mqadmin*
means that mqadmin gives the same result on Apache's servers. You can also use the names and short options of mqadmin:
`rmq admin topicRoute -t Orders`. The option `-n` for the name servers is left out.

This page is generated: `tests/interop/test_admin_table.py` fails while it is out of date, and writes what it should be.

| mqadmin | rmq | Apache 5.5.0 | rmqkit |
|---|---|---|---|
"""


@dataclass(slots=True)
class Outcomes:
    """The results of the rows, in their order: an empty text is a pass."""

    apache: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    java: dict[int, str] = field(default_factory=dict)

    def page(self) -> str:
        return HEAD + "".join(
            f"| `{row.command}{_shown(row.options)}` | `{' '.join(_shown(row.ours).split())}` "
            f"| {_word(self.apache[number])}{', as mqadmin' if number in self.java else ''} "
            f"| {_word(self.ours[number])} |\n"
            for number, row in enumerate(ROWS)
        )


def _shown(text: str) -> str:
    """Return a command as a person would write it, with names in place of the world's members."""
    shown = text.replace("{", "").replace("}", "").replace("~", " ").replace("|", "\\|")
    return f" {shown}" if shown else ""


def _word(problem: str) -> str:
    return "fails" if problem else "passes"


def run_rows(rows: Sequence[Row], world: World) -> tuple[list[str], list[object]]:
    """Return the problem of each row, and each answer."""
    problems: list[str] = []
    answers: list[object] = []
    for row in rows:
        answer: object = None
        try:
            answer = world.ask(row.ours)
            problems.append("" if row.check(answer, world) else f"not right: {str(answer)[:400]}")
        except (AssertionError, LookupError, TypeError, AttributeError) as error:
            problems.append(f"{type(error).__name__}: {error}: {str(answer)[:400]}")
        answers.append(answer)
    return problems, answers


def disagreement(row: Row, text: str, answer: object) -> str:
    """Return the part of mqadmin's output that does not agree with our answer."""
    assert row.java is not None
    try:
        return "" if row.java(text, answer) else f"mqadmin printed {text[:600]!r}, we answered {answer!s:.300}"
    except (LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}: mqadmin printed {text[:600]!r}"


@pytest.fixture(scope="module")
def outcomes(managed_apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    found, folder = Outcomes(), tmp_path_factory.mktemp("admin-table")
    with (
        ThreadPoolExecutor(MACHINES) as pool,
        open_world("Apache", managed_apache.namesrv_addr, managed_apache.broker_addr, BROKER_NAME, CLUSTER) as world,
    ):
        found.apache, answers = run_rows(ROWS, world)
        twice = [number for number, row in enumerate(ROWS) if row.java is not None and not found.apache[number]]
        texts = [
            pool.submit(mqadmin_texts, managed_apache, world, twice[machine::MACHINES], folder / str(machine))
            for machine in range(MACHINES)
        ]
        found.ours = run_rows_at_ours(folder)
        for number, text in sorted(pair for part in texts for pair in part.result().items()):
            found.java[number] = disagreement(ROWS[number], text, answers[number])
    return found


def mqadmin_texts(apache: ApachePair, world: World, numbers: Sequence[int], folder: Path) -> dict[int, str]:
    """Return mqadmin's output for rows. Some of its commands wait 3 s at their end, so several JVMs share them."""
    folder.mkdir()
    commands = [[ROWS[n].command, *world.fill(ROWS[n].options), "-n", world.namesrv] for n in numbers]
    return dict(zip(numbers, run_mqadmin(apache.kit, commands, folder), strict=True))


def run_rows_at_ours(folder: Path) -> list[str]:
    config = folder / "broker.conf"
    config.write_text(f"brokerClusterName={CLUSTER}\nbrokerName={BROKER_NAME}\n")
    with (
        run_standalone(folder / "store", folder, "-c", str(config)) as own,
        open_world("rmqkit", own.namesrv_addr, own.broker_addr, BROKER_NAME, CLUSTER) as world,
    ):
        return run_rows(ROWS, world)[0]


def failures(problems: Sequence[str]) -> dict[str, str]:
    return {f"{row.command} {row.options}": problem for row, problem in zip(ROWS, problems, strict=True) if problem}


def test_every_row_passes_at_apache_s_servers(outcomes: Outcomes) -> None:
    assert failures(outcomes.apache) == {}


def test_every_row_passes_at_ours(outcomes: Outcomes) -> None:
    assert failures(outcomes.ours) == {}


def test_mqadmin_says_the_same(outcomes: Outcomes) -> None:
    assert {f"{ROWS[n].command} {ROWS[n].options}": problem for n, problem in outcomes.java.items() if problem} == {}


def test_the_table_is_long_enough_and_up_to_date(outcomes: Outcomes, tmp_path: Path) -> None:
    page = outcomes.page()
    assert len(ROWS) >= ROWS_MIN
    assert {row.command for row in ROWS} <= JAVA.keys()
    fresh = tmp_path / PAGE.name
    fresh.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, f"copy {fresh} to {PAGE}"
