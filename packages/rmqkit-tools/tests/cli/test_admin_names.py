"""Names that lists leave out, questions before a deletion, the format of tables, and mqadmin's names for scripts."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys

import pytest
import typer

from rmqkit.admin import Admin
from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli import app
from rmqkit.cli.frame.nouns import LIVE_TOPICS, confirm, show
from rmqkit.cli.frame.printing import print_table, wrapped
from rmqkit.errors import RmqError, UnknownName
from rmqkit.protocol.names import is_of_applications
from tests.cli.in_process import rmq
from tests.client.peers import standalone


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory):
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    with standalone(tmp_path_factory.mktemp("names"), broker=settings) as address:
        for topic in "Orders", "%RETRY%payers":
            assert rmq("topic", "create", topic, "-b", "broker-a", "-n", address).returncode == 0
        yield address


@pytest.mark.parametrize(
    ("topic", "is_own"),
    [
        ("Orders", True),
        ("NS%Orders", True),
        ("%LMQ%device-7", True),
        ("Other_REPLY_TOPIC", True),
        ("C_REPLY_TOPIC", False),
        ("C", False),
        ("broker-a", False),
        ("%RETRY%payers", False),
        ("%DLQ%payers", False),
        ("SCHEDULE_TOPIC_XXXX", False),
        ("rmq_sys_REVIVE_LOG_C", False),
        ("TBW102", False),
    ],
)
def test_topics_of_applications_are_reported_by_their_names(topic, is_own):
    assert is_of_applications(topic, {"C", "broker-a"}) is is_own


def test_system_topics_are_listed_when_they_are_requested(namesrv):
    assert rmq("topic", "list", "-n", namesrv).stdout == "Orders\n"
    whole = rmq("topic", "list", "--system", "-n", namesrv).stdout.split()
    assert {"%RETRY%payers", "Orders", "SCHEDULE_TOPIC_XXXX", "DefaultCluster", "broker-a"} <= set(whole)
    assert rmq("admin", "topicList", "-n", namesrv).stdout.split() == whole, "scripts know mqadmin's list"
    uses = json.loads(rmq("topic", "list", "--uses", "--json", "-n", namesrv).stdout)
    assert {use["topic"] for use in uses} == {"Orders"}


def test_a_name_that_is_not_there_is_answered_with_those_of_applications(namesrv):
    async def ask(topic):
        async with Admin(namesrv) as admin:
            with pytest.raises(UnknownName) as raised:
                await admin.calls.route(topic)
            return str(raised.value)

    assert asyncio.run(ask("Nothing-like-it")).endswith(": it has Orders")
    assert asyncio.run(ask("%RETRY%payer")).endswith(": did you mean %RETRY%payers?")


def test_shells_complete_system_topics_only_where_no_other_fits(namesrv, monkeypatch):
    monkeypatch.setattr("rmqkit.cli.frame.nouns._COMPLETION_MS", 60_000.0)

    class Given:
        params = {"name_servers": namesrv}  # noqa: RUF012 - as typer has it

    assert LIVE_TOPICS(Given, "") == ["Orders"]
    assert LIVE_TOPICS(Given, "%R") == ["%RETRY%payers"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that puts a text on a terminal as the answer, and returns the stream of the questions."""

    def answering(text):
        asked = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(text))
        monkeypatch.setattr(sys, "stderr", asked)
        return asked

    return answering


def test_a_person_is_asked_before_something_is_deleted(terminal):
    for text in "", "\n", "n\n", "Yes, why not\n":
        asked = terminal(text)
        with pytest.raises(RmqError, match="nothing was changed; --yes skips the question"):
            confirm("delete topic Orders", yes=False)
        assert asked.getvalue() == "delete topic Orders? [y/N] "
    for text in "y\n", "YES\n":
        terminal(text)
        confirm("delete topic Orders", yes=False)


def test_who_said_yes_and_scripts_are_not_asked(terminal, monkeypatch):
    asked = terminal("n\n")
    confirm("delete topic Orders", yes=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    confirm("delete topic Orders", yes=False)
    assert asked.getvalue() == ""


@pytest.mark.parametrize(
    ("command", "question"),
    [
        (("topic", "delete"), "delete topic {} with all its messages? [y/N] "),
        (("group", "delete"), "delete group {}, its offsets, retries and dead letters? [y/N] "),
    ],
)
def test_topics_and_groups_are_kept_unless_the_answer_is_yes(namesrv, terminal, command, question):
    noun, name = command[0], f"kept-{command[0]}"
    assert rmq(noun, "create", name, "-b", "broker-a", "-n", namesrv).returncode == 0

    def delete(*words, answer):
        """Run a delete command in this process with terminals as its streams, and return its question."""
        asked = terminal(answer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", io.StringIO())
            app([*words, "-n", namesrv], standalone_mode=False)
        return asked.getvalue()

    with pytest.raises(RmqError, match="nothing was changed"):
        delete(*command, name, answer="n\n")
    java = {"topic": ("admin", "deleteTopic", "-t"), "group": ("admin", "deleteSubGroup", "-g")}[noun]
    assert delete(*command, name, answer="y\n") == question.format(name)
    assert rmq(noun, "create", name, "-b", "broker-a", "-n", namesrv).returncode == 0
    assert delete(*java, name, answer="n\n") == "", "scripts that use mqadmin's names are not asked"
    with pytest.raises(UnknownName):
        delete(*command, name, answer="y\n")


def test_errors_are_json_where_json_was_requested(namesrv):
    told = rmq("topic", "route", "Nowhere", "--json", "-n", namesrv)
    assert told.returncode == 5 and told.stdout == ""
    error = json.loads(told.stderr)
    assert (error["kind"], error["exitCode"]) == ("UnknownName", 5)
    assert "has no topic Nowhere" in error["error"]
    misspelled = json.loads(rmq("topic", "rout", "--json").stderr)
    assert misspelled["exitCode"] == 2 and "No such command 'rout'" in misspelled["error"]
    plain = rmq("topic", "route", "Nowhere", "-n", namesrv).stderr
    assert plain.startswith("rmq: name server ")


# ---------------------------------------------------------------- tables and help

LONG = "the-department-that-has-long-names-for-everything"


def test_tables_fit_a_terminal_and_keep_their_numbers(monkeypatch):
    rows = [
        {
            "topic": LONG,
            "broker": "broker-a",
            "address": "192.168.100.100:10911",
            "diff": 12_345_678,
            "at": "2026-01-31",
        },
        {"topic": "Orders", "broker": f"{LONG}-b", "address": "10.0.0.1:10911", "diff": 1, "at": "2026-02-01"},
    ]

    def shown(out):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", "80")
        show(rows, as_json=False)
        return out.getvalue().splitlines()

    lines = shown(Terminal())
    assert max(map(len, lines)) <= 80 and LONG not in "".join(lines)
    assert "192.168.100.100:10911  12,345,678  2026-01-31" in lines[1] and "broker-a" in lines[1]
    assert lines[2].startswith("Orders ") and "…" in lines[2]
    assert LONG in shown(io.StringIO())[1], "files and pipes get all of it"


def test_sentences_in_tables_are_wrapped_and_not_cut(monkeypatch):
    sentence = "Orders · paid · no such item in the catalogue of the shop that it was ordered from in spring"
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "60")
    show([{"no": 1, "count": 1234, "kind": sentence, "last": "2026-01-31 12:00:00"}], as_json=False)
    heading, *lines = out.getvalue().splitlines()
    assert max(map(len, (heading, *lines))) <= 60
    at = heading.index("KIND")
    assert " ".join(line[at : heading.index("LAST")].strip() for line in lines) == sentence
    assert lines[0].startswith(" 1  1,234  Orders")
    assert lines[1].startswith(" " * at), "the other columns are empty below their first line"


def test_a_command_in_a_sentence_is_not_broken_over_two_lines():
    text = "bad: 31 dead letters; see why: rmq dead kinds billing; fix its handler, then: rmq replay --dlq billing"
    for width in range(26, 110):
        lines = wrapped(text, width)
        assert max(map(len, lines)) <= width and " ".join(lines) == text
        assert any("rmq dead kinds billing" in line for line in lines)
        assert any("rmq replay --dlq billing" in line for line in lines)
    assert max(map(len, wrapped(text, 12))) <= 12


def test_a_table_of_too_many_columns_has_a_line_for_each_cell(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "30")
    show(
        [{"address": "192.168.100.100:10911", "in_tps": "2.36 (0 ms)", "gone": ""}] * 2
        + [{"address": "192.168.100.101:10911", "in_tps": "2.36 (0 ms)", "gone": "yes"}],
        as_json=False,
    )
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["ADDRESS  192.168.100.100:10911", "IN TPS   2.36 (0 ms)", ""]
    assert lines[6:] == ["ADDRESS  192.168.100.101:10911", "IN TPS   2.36 (0 ms)", "GONE     yes", ""]


def test_tables_of_stores_fit_a_terminal_and_files_get_whole_lines(monkeypatch):
    def shown(out):
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", "60")
        print_table(["topic", "body"], [["Orders", "word " * 80]])
        return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()

    assert max(map(len, shown(Terminal()))) <= 60
    assert any(("word " * 80).strip() in line for line in shown(io.StringIO()))


def test_no_flag_is_shown_with_a_value():
    root = typer.main.get_command(app)

    def flags(command, context):
        yield from (one for one in command.get_params(context) if getattr(one, "is_flag", False))
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            below = command.get_command(context, name)
            yield from flags(below, typer.Context(below, info_name=name, parent=context))

    found = list(flags(root, typer.Context(root, info_name="rmq")))
    assert len(found) > 100 and [one.name for one in found if one.metavar != ""] == []


def test_users_and_policies_under_both_names(namesrv):
    def run(*words):
        found = rmq(*words, "-n", namesrv)
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert "user anna created" in run("user", "create", "anna", "-p", "secret-of-anna")
    run(
        "admin",
        "createAcl",
        "-s",
        "User:anna",
        "-r",
        "Topic:Orders",
        "-a",
        "Pub,Sub",
        "-i",
        "10.0.0.0/8",
        "-d",
        "Allow",
    )
    users = run("user", "list", "--json")
    assert [(one["username"], one["userType"]) for one in json.loads(users)] == [("anna", "Normal")]
    assert "secret" not in users
    assert "Pub,Sub" in run("admin", "listAcl", "-s", "anna")
    verdicts = [
        json.loads(run("policy", "may", "anna", "-r", "Topic:Orders", "-a", action, "-i", ip, "--json"))[0]["may"]
        for action, ip in (("Sub", "10.1.2.3"), ("Sub", "192.0.2.1"), ("Delete", "10.1.2.3"))
    ]
    assert verdicts == ["yes", "no", "no"]
    run("user", "update", "anna", "--status", "disable")
    run("policy", "delete", "anna", "-r", "Topic:Orders")
    assert "no policies" in run("policy", "list")
    run("admin", "deleteUser", "-u", "anna")
    assert json.loads(run("user", "list", "--json")) == []
    assert rmq("policy", "may", "anna", "-r", "*", "-a", "Sub", "-i", "::1", "-n", namesrv).returncode != 0
    assert rmq("user", "create", "bert", "-n", namesrv).returncode != 0  # no secret


def test_a_dry_run_moves_nothing(namesrv):
    rmq("group", "create", "billing", "-n", namesrv)
    shown = rmq("offset", "reset", "billing", "Orders", "-s", "-1", "--dry-run", "--json", "-n", namesrv)
    moves = json.loads(shown.stdout)
    assert {(one["topic"], one["now"], one["skipped"]) for one in moves} == {("Orders", None, 0)}
    assert rmq("offset", "clone", "nobody", "billing", "Orders", "--dry-run", "-n", namesrv).returncode != 0
