"""`rmq store query`: SQL over a golden store, as a table, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from rmqkit.extras import install
from tests.cli.in_process import rmq
from tests.golden_stores import unpack_golden

PLAIN = (
    "select topic, count(*) as n, sum(queueId) as s from messages where topic like 'Gold%' group by 1 order by n desc"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("query")).root


def query(*arguments, code=0):
    told = rmq("store", "query", *arguments)
    assert told.returncode == code, told.stderr
    return told.stdout if code == 0 else told.stderr


def test_a_table_has_numbers_to_the_right(store):
    text = query(store, f"{PLAIN} limit 2")
    assert [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")] == [
        [" GoldPlain      ", " 233 ", " 0 "],
        [" GoldInnerBatch ", " 111 ", " 0 "],
    ]


def test_json_is_a_line_for_each_row_and_numbers_stay_numbers(store):
    first, *others = map(json.loads, query(store, PLAIN, "--json").splitlines())
    assert first == {"topic": "GoldPlain", "n": 233, "s": 0} and len(others) > 5
    (row,) = map(json.loads, query(store, "select * from messages", "--json", "--limit", 1).splitlines())
    assert (row["body"], row["properties"]["CLUSTER"]) == ("plain-0", "GoldenCluster")
    assert row["storeTimestamp"] == "2026-11-21T01:53:42.998+00:00"
    odd = (
        "select 1/0 as inf, date '2026-01-31' as d, 1.5::decimal(3,1) as x, 'ff00'::blob as b, null as n from messages"
    )
    (row,) = map(json.loads, query(store, odd, "--json", "--limit", 1).splitlines())
    assert row == {"inf": None, "d": "2026-01-31", "x": 1.5, "b": "ff00", "n": None}


def test_csv_has_a_heading_and_can_be_read_back(store):
    text = query(store, "select topic, properties, body from messages where topic = 'GoldTag' limit 2", "--csv")
    heading, first, _ = csv.reader(io.StringIO(text))
    assert heading == ["topic", "properties", "body"]
    assert first[0] == "GoldTag" and json.loads(first[1])["TAGS"] == "TagA" and first[2] == "tagged TagA 0"


def test_a_table_of_many_rows_says_that_there_are_more(store):
    told = rmq("store", "query", store, "select topic from messages")
    assert told.stdout.count("Gold") == 50 and told.stderr == "rmq: there are more than 50 rows, --limit shows more\n"
    assert len(query(store, "select topic from messages", "--csv").splitlines()) == 621


def test_damage_is_an_error_or_left_out(store, tmp_path):
    copy = unpack_golden("5.4.0", tmp_path / "copy").root
    path = min((copy / "commitlog").iterdir())
    with path.open("r+b") as file:
        file.write(b"\xff" * 4)
    count = "select count(*) as n from messages"
    told = query(copy, count, code=1)
    assert "damage at byte 0" in told and "--skip-damage reads on" in told and told.count("\n") == 1
    assert query(copy, count, "--skip-damage", "--csv") == "n\n619\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("select topc from messages",), 2, 'Candidate bindings: "topic"'),
        (("selct",), 2, 'syntax error at or near "selct"'),
        (("select cast(topic as int) from messages",), 1, "Could not convert string 'Gold"),
        (("select 1", "--json", "--csv"), 2, "--csv and --json exclude each other"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(store, arguments, code, text):
    told = query(store, *arguments, code=code)
    assert text in told and told.count("\n") == 1


def test_a_store_that_is_not_there_is_named(tmp_path):
    told = query(tmp_path, "select count(*) from messages", code=1)
    assert told == f"rmq: {tmp_path}/commitlog does not exist: give the store directory, the one that holds commitlog\n"


def test_without_duckdb_the_extra_is_named(store, monkeypatch):
    for package in "duckdb", "numpy":  # both are in it: one command brings them
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "rmqkit.arrow", raising=False)
    told = query(store, "select 1", code=2)
    assert told == f"rmq: SQL over a store needs duckdb, which is not installed: {install('query')}\n"


OUTSIDE = {
    "read": "select * from read_text('{file}')",
    "glob": "select * from glob('/etc/*')",
    "csv by name": "select * from '{file}.csv'",
    "copy": "copy (select 1) to '{file}.out'",
    "attach": "attach '{file}.db' as other",
    "export": "export database '{file}.dir'",
    "load": "load json_of_nobody",
    "install": "install httpfs",
    "setting": "set enable_external_access = true",
    "lock": "set lock_configuration = false",
    "two at once": "set enable_external_access = true; select * from read_text('{file}')",
    "variables of the program": "select * from messages_of_the_program",
}


@pytest.mark.parametrize("sql", OUTSIDE.values(), ids=OUTSIDE)
def test_a_statement_reaches_nothing_but_the_store(store, tmp_path, sql):
    (tmp_path / "secret").write_text("the secret")
    (tmp_path / "secret.csv").write_text("a,b\nthe,secret\n")
    before = sorted(tmp_path.iterdir())
    told = rmq("store", "query", store, sql.format(file=tmp_path / "secret"))
    assert told.returncode != 0, told.stdout
    assert "the secret" not in told.stdout + told.stderr and sorted(tmp_path.iterdir()) == before


def test_unsafe_lets_a_statement_read_and_write_files(store, tmp_path):
    (tmp_path / "notes").write_text("own notes")
    assert "own notes" in query(store, f"select content from read_text('{tmp_path / 'notes'}')", "--unsafe")
    query(store, f"copy (select topic from messages limit 3) to '{tmp_path / 'topics.csv'}'", "--unsafe")
    assert len((tmp_path / "topics.csv").read_text().splitlines()) == 4


def test_the_refusal_names_the_option(store):
    assert "--unsafe" in query(store, "select * from read_text('/etc/hostname')", code=2)
