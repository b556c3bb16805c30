"""Every command of Apache's mqadmin, run with Apache's servers and with ours on the same small world.

The lines are in `admin_rows.java`. The table in ``docs/reference/java-mqadmin.md`` must equal the results of this test.
A command that works with Apache's servers must work with ours, or be refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rmqkit import Message, sync
from rmqkit.client.runtime.settings import Tracing
from tests.interop.admin_rows.consumers import waits_for
from tests.interop.admin_rows.java import LINES, Line
from tests.interop.admin_world import World, open_world
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import run_mqadmin
from tests.interop.standalone import run_standalone
from tests.patience import producing

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "java-mqadmin.md"
COMMAND = re.compile(r"^   (\w+) {2,}\S", re.MULTILINE)
FAILURE = re.compile(
    r"^(?:(?:Caused by: )?(?:org|com|java)\.[\w.$]+(?:Exception|Error): *|(?=RocksDB load error))(.*)$", re.MULTILINE
)
REFUSAL = re.compile(r"CODE: (\d+) +DESC: *(.*?)(?: BROKER: \S+)?$")
TRACED = "7F0000010001234518B4AAC210FBFFF1"
SUFFIX = "_java"
WORKS, ELSE = "works", "prints something else: "
REASON = " not supported: "
ASKED_WITH = ("namesrv", "broker", "broker_name", "cluster", "topic", "empty", "group", "twin", "online", "producers")
HEAD = """# Java's mqadmin

A test runs every command of Java's mqadmin 5.5.0 with Apache's name server and broker 5.5.0 and with rmqkit's. *Works*
means that the output of the command says so. Otherwise the table shows the code and the text of the refusal, or the
output of the tool. Controllers, broker containers and other kinds of stores are not part of the test.

If a command works with Apache's servers but not with rmqkit's, rmqkit refuses it with a reason. `rmq` has most of
these commands, too: see [side by side](mqadmin.md). The option `-n` for the name servers is left out.

This page is generated: `tests/interop/test_java_mqadmin.py` fails while it is out of date, and writes a new one.

| mqadmin | Apache 5.5.0 | rmqkit |
|---|---|---|
"""

Outputs = tuple[list[str], dict[str, str]]
"""The output of every line, the list of commands first, and the names that replaced the lines' members."""


@pytest.fixture(scope="module")
def both(managed_apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outputs, Outputs]:
    folder = tmp_path_factory.mktemp("java-mqadmin")
    config = folder / "broker.conf"
    config.write_text(f"brokerClusterName={CLUSTER}\nbrokerName={BROKER_NAME}\n")
    with (
        run_standalone(folder / "store", folder, "-c", str(config)) as own,
        open_world(
            "Apache", managed_apache.namesrv_addr, managed_apache.broker_addr, BROKER_NAME, CLUSTER, suffix=SUFFIX
        ) as theirs,
        open_world("rmqkit", own.namesrv_addr, own.broker_addr, BROKER_NAME, CLUSTER, suffix=SUFFIX) as ours,
        ThreadPoolExecutor(2) as pool,
    ):
        assert all(map(send_traced, (theirs, ours)))
        running = [pool.submit(run_lines, managed_apache.kit, world, folder / world.side) for world in (theirs, ours)]
        return running[0].result(), running[1].result()


def run_lines(kit: ApacheKit, world: World, folder: Path) -> Outputs:
    (folder / "files").mkdir(parents=True)
    for name, body in (
        ("topics", '[{"topicName":"mq_listed","readQueueNums":2,"writeQueueNums":2,"perm":6}]'),
        ("groups", '[{"groupName":"mq_listed_group","retryMaxTimes":3}]'),
    ):
        (folder / "files" / f"{name}.json").write_text(body)
    names = {name: str(getattr(world, name)) for name in (*ASKED_WITH, "client_id")}
    first = world.messages[0]
    names |= {
        "traced": TRACED,
        "message_id": first.message_id,
        "unique_key": first.unique_key,
        "folder": str(folder / "files"),
    }
    return run_mqadmin(kit, [[], *(words(line, names) for line in LINES)], folder), names


def send_traced(world: World) -> bool:
    """Send a message with a traced producer, and wait until the trace can be found."""
    with sync.Producer("mq_traced", world.namesrv, settings=producing(trace=Tracing())) as producer:
        producer.send(Message(topic=world.empty, body=b"traced", msg_id=TRACED))
    return waits_for(lambda: len(world.ask(f"message trace {TRACED}")) == 1)


def words(line: Line, names: Mapping[str, str]) -> list[str]:
    stop = [str(line.stops_after)] if line.stops_after else []
    name_servers = [] if " -n " in line.command else ["-n", names["namesrv"]]
    return [*stop, *line.command.format(**names).split(), *name_servers]


def outcomes(found: Outputs) -> list[str]:
    """Return the outcome of each line: that it works, or the reason why not."""
    outputs, names = found
    return [outcome(line, output, names) for line, output in zip(LINES, outputs[1:], strict=True)]


def outcome(line: Line, output: str, names: Mapping[str, str]) -> str:
    failures = FAILURE.findall(output)
    if failures and not line.stops_after:
        refusal = REFUSAL.search(failures[-1])
        said = f"{refusal[1]}: {refusal[2]}" if refusal else failures[-1]
        for name in ("folder", "namesrv", "broker"):
            said = said.replace(names[name], name.upper())
        return " ".join(said.split())
    shows = line.shows
    for name, value in names.items():
        shows = shows.replace(f"{{{name}}}", re.escape(value))
    return WORKS if re.search(shows, output) else f"{ELSE}{output[:400]!r}"


def page(theirs: Sequence[str], ours: Sequence[str]) -> str:
    rows = (
        f"| `{re.sub('[{}]', '', line.command)}` | {_cell(their)} | {_cell(our, line.reason)} |\n"
        for line, their, our in zip(LINES, theirs, ours, strict=True)
    )
    return HEAD + "".join(rows)


def _cell(text: str, reason: str = "") -> str:
    return (f"{text}: {reason}" if reason else text).replace("|", "\\|")


def test_the_lines_are_all_commands_that_the_tool_has(both: tuple[Outputs, Outputs]) -> None:
    for outputs, _ in both:
        assert set(COMMAND.findall(outputs[0])) == {line.name for line in LINES}


def test_what_works_at_apache_s_works_at_ours_or_is_refused_with_the_reason(both: tuple[Outputs, Outputs]) -> None:
    theirs, ours = map(outcomes, both)
    bad = {
        line.command: (their, our)
        for line, their, our in zip(LINES, theirs, ours, strict=True)
        if their.startswith(ELSE) or (their != our and not (their == WORKS and (REASON in our or line.reason)))
    }
    assert bad == {}


def test_the_page_is_up_to_date(both: tuple[Outputs, Outputs], tmp_path: Path) -> None:
    fresh = tmp_path / PAGE.name
    fresh.write_text(page(*map(outcomes, both)), encoding="utf-8")
    assert PAGE.exists(), f"copy {fresh} to {PAGE}"
    assert PAGE.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"), f"copy {fresh} to {PAGE}"
