"""`rmq pipeline`: output for people and programs, exit codes, one-line errors, the bar while stages run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from rmqkit.__main__ import main
from rmqkit.cli import app
from rmqkit.errors import RmqError, SettingsError, StoreError
from rmqkit.spark.commands import session
from rmqkit.spark.commands.session import Rows, fields, pairs, show
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.session import small, small_options

RMQ = Path(sys.executable).with_name("rmq")
SECONDS_MAX = 600

pytestmark = pytest.mark.timeout(2 * SECONDS_MAX)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))


def pipeline(*arguments: object) -> Result:
    """Run a command in this process, in the session that runs."""
    return CliRunner().invoke(app, ["pipeline", *map(str, arguments)])


# ---------------------------------------------------------------- without Spark


def test_help_and_the_servers_need_no_spark():
    code = (
        "import sys; from typer.testing import CliRunner; from rmqkit.cli import app; run = CliRunner().invoke;"
        "helps = [run(app, [*words, '--help']) for words in ([], ['pipeline'], ['pipeline', 'audit'], ['broker'])];"
        "assert all(one.exit_code == 0 for one in helps), helps;"
        "print([name for name in ('pyspark', 'py4j', 'numpy', 'pyarrow', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
    assert done.stdout.strip() == "[]"


def test_pairs_are_read_and_mistakes_named():
    assert pairs(None) == {}
    assert pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for text in ("a", "=1"):
        with pytest.raises(SettingsError, match=f"'{text}' is not a setting: write it as key=value"):
            pairs([text])


@pytest.mark.parametrize(
    "arguments",
    [
        ["summary", "nowhere"],
        ["audit", "nowhere"],
        ["diff", "nowhere", "."],
        ["diff", ".", "nowhere"],
        ["verify", "nowhere"],
        ["rebuild", "nowhere"],
        ["query", "nowhere"],
        ["sql", "file:nowhere", "select 1"],
        ["archive", "nowhere", "."],
        ["replay", "nowhere", "T"],
    ],
)
def test_a_store_that_is_not_there_is_reported_before_spark_starts(arguments, tmp_path, monkeypatch):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rmqkit.spark.spark_session", start)
    arguments = [str(tmp_path.joinpath(one[5:]).as_uri()) if one.startswith("file:") else one for one in arguments]
    done = pipeline(*arguments)
    assert type(done.exception) is StoreError
    text = f"{tmp_path}/nowhere is not a directory: give the store directory, which contains commitlog"
    assert (str(done.exception), done.output) == (text, "")


def test_whether_an_address_is_there_is_left_to_spark(monkeypatch):
    def start(*_: object, **__: object) -> None:
        raise SettingsError("Spark was started")

    monkeypatch.setattr("rmqkit.spark.spark_session", start)
    assert str(pipeline("summary", "s3://bucket/nowhere").exception) == "Spark was started"


class _Found(msgspec.Struct):
    store: str
    body_bytes: int
    last_store_timestamp: datetime
    segments: list[Any]
    notes: list[str]


class _Segment(msgspec.Struct):
    path: str
    records: int


MOMENT = datetime(2026, 11, 21, 13, 0, 0, 250_000, tzinfo=UTC)
FOUND = _Found("/data", 3 << 20, MOMENT, [_Segment("0", 1234567)], [])
ROWS = Rows(
    ["topic", "queueId", "storeSize", "body", "properties", "storeTimestamp"],
    [("t", 1, 20480, b"x" * 60, {"a": "b"}, MOMENT), (None, 12345, 10, b"\xff", {}, None)],
)


def test_an_interrupt_while_spark_starts_ends_what_was_started():
    started = []

    def start() -> None:
        with session.ended_if_interrupted():
            started.append(subprocess.Popen(["sleep", str(SECONDS_MAX)]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started[0].wait(SECONDS_MAX) == -signal.SIGTERM


def test_totals_and_rows_are_tables(capsys):
    show(fields(FOUND, first=ROWS), as_json=False)
    printed = capsys.readouterr().out
    for text in (
        "body bytes",
        "3.0 MiB",
        "1,234,567",
        "12,345",
        "20.0 KiB",
        "a=b",
        f"{'x' * 40}…",
        r"\xff",
        "store size",
    ):
        assert text in printed, text
    assert "notes" not in printed, "an empty list is no news"
    right = next(line for line in printed.splitlines() if "12,345" in line)
    assert "  12,345 │" in right or "│  12,345 │" in right, "numbers are right-aligned"


def test_totals_and_rows_are_json(capsys):
    show(ROWS, as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert first["storeTimestamp"] == "2026-11-21T13:00:00.250+00:00"
    assert (first["body"], first["properties"], first["storeSize"]) == ("x" * 60, {"a": "b"}, 20480)
    assert (second["topic"], second["body"]) == (None, {"base64": "/w=="})
    show(fields(FOUND, first=ROWS), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["segments"] == [{"path": "0", "records": 1234567}]
    assert (found["body_bytes"], found["notes"], len(found["first"])) == (3 << 20, [], 2)


def test_a_table_that_was_cut_says_so(capsys):
    show(Rows(["n"], [(1,)], is_cut=True), as_json=False)
    assert capsys.readouterr().err == "rmq: there are more than 1 rows, --limit shows more\n"


@pytest.mark.parametrize(
    ("is_terminal", "as_json", "remote", "is_shown"),
    [(True, False, "", True), (False, False, "", False), (True, True, "", False), (True, False, "sc://a", False)],
)
def test_spark_shows_its_progress_on_a_terminal(is_terminal, as_json, remote, is_shown, monkeypatch):
    found = []

    def started(name: str, master: str, settings: dict[str, str], *, remote: str) -> None:
        found.append(settings)
        raise SettingsError("no Spark here")

    monkeypatch.setattr("rmqkit.spark.spark_session", started)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with pytest.raises(SettingsError), session.session("summary", "local", remote, ["a=b"], as_json=as_json):
        pass
    assert found == [{"spark.ui.showConsoleProgress": "true", "a": "b"} if is_shown else {"a": "b"}]


# ---------------------------------------------------------------- as a process


@pytest.mark.spark
@pytest.mark.slow
def test_a_program_gets_json_alone(golden, tmp_path):
    """With a Java machine of its own: what Java and the workers write to the process's streams is part of it."""
    command = [RMQ, "pipeline", "summary", golden.root, "--master", "local[1]", "--json", "-o", "topic=GoldTag"]
    command += small_options()
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=small())
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["topic"] for row in rows} == {"GoldTag"}
    assert sum(row["messages"] for row in rows) == 40
    late = (" ", "Traceback", "BrokenPipeError")  # Spark's worker on a busy machine: it still writes when Spark is gone
    said = [line for line in done.stderr.splitlines() if not line.startswith(late)]
    assert not said or "WARNING: Using incubator modules" in done.stderr


# ---------------------------------------------------------------- in one session


@pytest.mark.spark
def test_what_fails_in_a_worker_is_one_line_and_exit_code_1(golden, tmp_path, spark, monkeypatch, capsys):
    path = tmp_path / "store/commitlog" / f"{0:020d}"
    path.parent.mkdir(parents=True)
    content = bytearray((golden.root / "commitlog" / path.name).read_bytes())
    content[4:8] = bytes(4)  # the first magic
    path.write_bytes(content)
    command = ["rmq", "pipeline", "summary", str(tmp_path / "store"), "--master", "local[1]"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (1, "")
    first, *_, last = told.err.splitlines()
    assert first == "rmq: summary starts Spark at local[1]"
    assert last.startswith(f"rmq: {path}: damage at byte 0 ")
    assert "Traceback" not in told.err


@pytest.mark.spark
def test_a_person_gets_a_table_and_the_session_continues(golden, spark: SparkSession):
    done = pipeline("summary", golden.root)
    assert done.exit_code == 0, done.output
    assert "first store timestamp" in done.stdout
    assert "GoldPlain" in done.stdout
    assert "231" in done.stdout
    assert spark.range(3).count() == 3, "a session that was there before is not stopped"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (["/"], StoreError, "/commitlog does not exist: give the store directory"),
        (["/", "-o", "topci=a"], SettingsError, "option 'topci' is not known: did you mean topic?"),
        (["/", "-o", "topic"], SettingsError, "'topic' is not a setting: write it as key=value"),
        (["/", "--conf", "x"], SettingsError, "'x' is not a setting: write it as key=value"),
    ],
)
def test_mistakes_are_one_line(arguments, kind, text, spark: SparkSession):
    done = pipeline("summary", *arguments)
    assert done.exit_code == 1
    assert type(done.exception) is kind
    assert text in str(done.exception)


@pytest.mark.spark
def test_what_spark_itself_refuses_is_one_line(spark: SparkSession):
    with pytest.raises(RmqError, match="PARSE_SYNTAX_ERROR") as caught, session.one_line_errors():
        spark.sql("selec 1")
    assert "\n" not in str(caught.value)


@pytest.mark.spark
def test_an_audit_prints_findings_and_writes_its_report(golden, tmp_path, spark: SparkSession):
    report = tmp_path / "audit.html"
    done = pipeline("audit", golden.root, "--report", report, "--period", 1)
    assert done.exit_code == 0, done.output
    assert "Traffic: Topic GoldPlain: 233 messages, 40% of all 584; busiest second from " in done.stdout
    assert "Consumers: Group g_tag is 11 messages behind" in done.stdout
    assert f"Report: {report}" in done.stdout
    assert report.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.spark
def test_a_difference_is_exit_code_1(golden, tmp_path, spark: SparkSession):
    (tmp_path / "commitlog").mkdir()
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.write_bytes((golden.root / "commitlog" / path.name).read_bytes())
    done = pipeline("diff", tmp_path, tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["is_equal"] is True
    done = pipeline("diff", golden.root, tmp_path, "--json", "--limit", 2)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["is_equal"], found["only_right"]) == (False, 0)
    assert found["equal_end"] == found["right_end"] < 131072, "where the records of the only file end"
    assert found["only_left"] > 2
    assert len(found["differences"]) == 2


@pytest.mark.spark
def test_an_archive_is_made_and_searched(golden, tmp_path, spark: SparkSession):
    messages, archived = golden.manifest["messages"], tmp_path / "archive"
    done = pipeline("archive", golden.root, archived, "--include-newest", "--partition-by", "day", "--json")
    assert done.exit_code == 0, done.output
    totals = json.loads(done.stdout)
    assert (totals["run"], totals["rows"], len(totals["segments"])) == (1, len(messages), 4)
    [some] = [one for one in messages if one["topic"] == "GoldKey" and one["keys"] == "key-0"]
    for path in (golden.root, archived):
        begin, words = str(some["storeTimestamp"]), ["--topic", "GoldKey", "--id", some["msgId"]]
        done = pipeline("query", path, *words, "--from", begin, "-o", "maxHashSlotNum=64", "--json")
        assert [json.loads(line)["queueOffset"] for line in done.stdout.splitlines()] == [some["queueOffset"]]
        done = pipeline("sql", path, "select topic, count(*) n from messages group by topic order by n desc", "--json")
        assert json.loads(done.stdout.splitlines()[0]) == {"topic": "GoldPlain", "n": 233}
        done = pipeline("query", path, "--topic", "GoldPlain", "--limit", 3)
        assert done.stdout.count("GoldPlain") == 3
        assert "more than 3 rows" in done.stderr
    done = pipeline("sql", archived, "select nix from messages")
    assert done.exit_code == 1
    assert "\n" not in str(done.exception)
